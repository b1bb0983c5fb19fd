"""Lock files, so that several processes of kvtool do not disturb each other.

If a process dies, the system releases its locks.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from kvtool.console import Console
from kvtool.errors import KvtoolError, writing
from kvtool.project import Project


@contextlib.contextmanager
def try_lock_dir(directory: Path, error: type[KvtoolError], doing: str) -> Iterator[None]:
    """Lock an existing folder without waiting. Raise `error` if another kvtool has locked the folder.

    doing: the verb of the error message, such as "is building" in "another kvtool is building there"
    """
    try:
        with filelock.FileLock(directory / "kvtool.lock").acquire(blocking=False):
            yield
    except filelock.Timeout:
        raise error(
            f"another kvtool {doing} there", why=f"{directory} is locked", next_step="wait for it, then try again"
        ) from None


@contextlib.contextmanager
def lock_file(path: Path, console: Console, what: str) -> Iterator[None]:
    """Lock a file. If another kvtool has locked it, print a message and wait."""
    with writing(str(path.parent), "set KVTOOL_CACHE to a writable directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            held = lock.acquire(timeout=0.3)
        except filelock.Timeout:
            console.step(f"waiting: another kvtool works on {what}")
            held = lock.acquire()
    with held:
        yield


def hold_tree(project: Project, console: Console) -> contextlib.AbstractContextManager[None]:
    """Lock a patched tree. The lock file is in the cache, because the tree may not exist yet."""
    name = hashlib.sha256(str(project.tree).encode()).hexdigest()[:16]
    return lock_file(project.cache / "locks" / f"tree-{name}.lock", console, str(project.tree))

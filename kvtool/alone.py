"""Work that two kvtools must not do in one directory at once."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from kvtool.errors import KvtoolError


@contextlib.contextmanager
def alone(directory: Path, error: type[KvtoolError], doing: str) -> Iterator[None]:
    """Hold a directory that exists. Raises `error` when another kvtool holds it; never waits.

    doing: what the other one does there, as in "another kvtool is building there". Whoever would rather wait takes
    kvtool.upstream.cache.guard().
    """
    try:
        with filelock.FileLock(directory / "kvtool.lock").acquire(blocking=False):
            yield
    except filelock.Timeout:
        raise error(
            f"another kvtool {doing} there", why=f"{directory} is locked", next_step="wait for it, then try again"
        ) from None

"""The user-wide cache of upstream trees: one bare git repository, safe under several processes and under a kill.

Layout: upstream.git (refs/kvtool/upstream/<tag> -> base commit), kvtool-tmp/ (whatever is under way; KVTOOL_CACHE may
be a directory that has a tmp/ of the user's), *.lock. A tree enters in this order: downloaded into kvtool-tmp/,
verified, objects copied, ref written. A kill before the last step leaves nothing but garbage in kvtool-tmp/ and
unreferenced objects, which the next holder of the lock removes.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from kvtool.console import Console
from kvtool.errors import DiskError, LockError, writing
from kvtool.gitcmd import Git
from kvtool.locks import lock_file
from kvtool.upstream.lock import Upstream

# why git cannot read what may well be whole
_DENIED = re.compile(r"dubious ownership|Permission denied|not permitted|Input/output error|memory", re.IGNORECASE)


def ref_of(tag: str) -> str:
    """Return the ref of a tag's base commit."""
    return f"refs/kvtool/upstream/{tag}"


class Cache:
    """The cache below one directory (project.cache)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repo, self.tmp = root / "upstream.git", root / "kvtool-tmp"
        self.git = Git(self.repo)

    def base(self, upstream: Upstream) -> str | None:
        """Return the base commit of this upstream if it is cached, complete, and has the tree of the lock."""
        if not (self.repo / "HEAD").is_file():
            return None
        commit = self.git.resolve(ref_of(upstream.tag) + "^{commit}")
        if commit is None or self.git.resolve(f"{commit}^{{tree}}") != upstream.tree:
            return None
        return commit if self.git.ok("rev-list", "--objects", "--quiet", commit) else None

    @contextlib.contextmanager
    def locked(self, console: Console) -> Iterator[Path]:
        """Hold the cache; yields an empty scratch directory that is removed at the end."""
        with lock_file(self.root / "cache.lock", console, "the cache"):
            self._sweep()
            with writing(str(self.root)):
                scratch = tempfile.TemporaryDirectory(dir=self.tmp, ignore_cleanup_errors=True)
            with scratch as name:
                yield Path(name)

    def _sweep(self) -> None:
        """Remove leftovers of a killed process. The caller holds the lock, so no other process uses the cache."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(parents=True, exist_ok=True)
        if self.repo.is_dir():
            left = [*self.repo.glob("objects/pack/tmp_*"), *self.repo.glob("refs/kvtool/**/*.lock")]
            left += [self.repo / name for name in ("packed-refs.lock", "config.lock", "shallow.lock")]
            for path in left:
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove leftovers of a killed process, unless another process works here; never wait, never fail."""
        with contextlib.suppress(OSError, filelock.Timeout):
            if any(self.tmp.iterdir()):
                with filelock.FileLock(self.root / "cache.lock", timeout=0):
                    self._sweep()

    def adopt(self, source: Git, tree: str, upstream: Upstream, scratch: Path) -> str:
        """Copy a tree out of `source` (a repository that has it) and name it. LockError when it is the wrong one."""
        if tree != upstream.tree:
            raise LockError(
                f"this is not {upstream.label}",
                why=f"its tree is {tree}, patches/upstream.lock has {upstream.tree}",
                next_step="fetch it from another source, or correct the lock if upstream really moved the tag",
            )
        ref = ref_of(upstream.tag)
        # no parent, and the identity and date of all of kvtool's commits: its id depends on tree and tag only
        commit = source.line("commit-tree", tree, input=f"{upstream.label}\n")
        source.run("update-ref", ref, commit)
        if self.repo.exists():
            asked = self.git.run("rev-list", "--objects", "--all", "--quiet", check=False)
            if asked.returncode != 0:
                if denied := _DENIED.search(asked.stderr):
                    raise DiskError(f"cannot read {self.repo}", why=denied[0], output=asked.stderr.strip())
                shutil.rmtree(self.repo, ignore_errors=True)  # damaged
        if not self.repo.exists():
            Git.create(scratch / "upstream.git").repo.rename(self.repo)
        self.git.fetch(source.repo, f"+{ref}:{ref}")
        if self.base(upstream) is None:
            raise LockError(f"the cache at {self.root} is damaged", next_step=f"remove {self.repo} and fetch again")
        return commit

    def prune(self, keep: str) -> int:
        """Remove every upstream but one, and pack what stays; the bytes that are free now. Only under the lock."""
        before = _size(self.repo)
        for ref in self.git.line("for-each-ref", "--format=%(refname)", "refs/kvtool").split():
            if ref != ref_of(keep):
                self.git.run("update-ref", "-d", ref)
        self.git.run("gc", "--quiet", "--prune=now")
        return before - _size(self.repo)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

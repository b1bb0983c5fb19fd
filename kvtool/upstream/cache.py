"""Keep upstream trees in the user's cache: one bare git repository that several processes can use at the same time.

The cache has upstream.git, in which refs/kvtool/upstream/<tag> names the commit of each tag. It has kvtool-tmp/ for
unfinished work; the name is not tmp/, because KVTOOL_CACHE may be a folder that has a tmp/ of the user. It also has the
lock files *.lock.

A tree is added in these steps: it is downloaded into kvtool-tmp/, its id is compared with the lock, its objects are
copied, and its ref is written. If kvtool is killed before the last step, only files in kvtool-tmp/ and objects without
a ref are left. The next process that locks the cache removes them.
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

# messages of git that mean that it cannot read the repository, although it may be undamaged
_DENIED = re.compile(r"dubious ownership|Permission denied|not permitted|Input/output error|memory", re.IGNORECASE)


def ref_of(tag: str) -> str:
    """Return the name of the ref that points to the commit of a tag."""
    return f"refs/kvtool/upstream/{tag}"


class Cache:
    """Manage the cache in one folder (project.cache)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repo, self.tmp = root / "upstream.git", root / "kvtool-tmp"
        self.git = Git(self.repo)

    def base(self, upstream: Upstream) -> str | None:
        """Return the commit of an upstream if the cache has it; else None.

        The commit must be complete in the cache, and its tree must have the id from upstream.lock.
        """
        if not (self.repo / "HEAD").is_file():
            return None
        commit = self.git.resolve(ref_of(upstream.tag) + "^{commit}")
        if commit is None or self.git.resolve(f"{commit}^{{tree}}") != upstream.tree:
            return None
        return commit if self.git.ok("rev-list", "--objects", "--quiet", commit) else None

    @contextlib.contextmanager
    def locked(self, console: Console) -> Iterator[Path]:
        """Lock the cache. Yield an empty folder for temporary files, which is removed at the end."""
        with lock_file(self.root / "cache.lock", console, "the cache"):
            self._sweep()
            with writing(str(self.root)):
                scratch = tempfile.TemporaryDirectory(dir=self.tmp, ignore_cleanup_errors=True)
            with scratch as name:
                yield Path(name)

    def _sweep(self) -> None:
        """Remove the leftovers of a killed process. The caller has locked the cache, so no other process uses it."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir(parents=True, exist_ok=True)
        if self.repo.is_dir():
            left = [*self.repo.glob("objects/pack/tmp_*"), *self.repo.glob("refs/kvtool/**/*.lock")]
            left += [self.repo / name for name in ("packed-refs.lock", "config.lock", "shallow.lock")]
            for path in left:
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove the leftovers of a killed process, unless another process uses the cache.

        This never waits and never fails.
        """
        with contextlib.suppress(OSError, filelock.Timeout):
            if any(self.tmp.iterdir()):
                with filelock.FileLock(self.root / "cache.lock", timeout=0):
                    self._sweep()

    def adopt(self, source: Git, tree: str, upstream: Upstream, scratch: Path) -> str:
        """Copy a tree from a repository into the cache, and give it a ref.

        Raise LockError if the tree has the wrong id.
        """
        if tree != upstream.tree:
            raise LockError(
                f"this is not {upstream.label}",
                why=f"its tree is {tree}, patches/upstream.lock has {upstream.tree}",
                next_step="fetch it from another source, or correct the lock if upstream really moved the tag",
            )
        ref = ref_of(upstream.tag)
        # The commit has no parent, and the identity and date of all commits of kvtool. So its id depends only on tree
        # and tag.
        commit = source.line("commit-tree", tree, input=f"{upstream.label}\n")
        source.run("update-ref", ref, commit)
        if self.repo.exists():
            asked = self.git.run("rev-list", "--objects", "--all", "--quiet", check=False)
            if asked.returncode != 0:
                if denied := _DENIED.search(asked.stderr):
                    raise DiskError(f"cannot read {self.repo}", why=denied[0], output=asked.stderr.strip())
                shutil.rmtree(self.repo, ignore_errors=True)  # the repository is damaged
        if not self.repo.exists():
            Git.create(scratch / "upstream.git").repo.rename(self.repo)
        self.git.fetch(source.repo, f"+{ref}:{ref}")
        if self.base(upstream) is None:
            raise LockError(f"the cache at {self.root} is damaged", next_step=f"remove {self.repo} and fetch again")
        return commit

    def prune(self, keep: str) -> int:
        """Remove every upstream except `keep`, and pack the rest.

        Return the number of freed bytes. The caller holds the lock.
        """
        before = _size(self.repo)
        for ref in self.git.line("for-each-ref", "--format=%(refname)", "refs/kvtool").split():
            if ref != ref_of(keep):
                self.git.run("update-ref", "-d", ref)
        self.git.run("gc", "--quiet", "--prune=now")
        return before - _size(self.repo)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""Run git without the user's configuration, so that commit ids are the same on every machine.

Commits are made in a temporary repository, which can read the objects of other repositories and is removed afterwards.
fetch() copies the wanted commits out of it.
"""

import atexit
import contextlib
import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Self

from kvtool import process
from kvtool.console import Progress
from kvtool.errors import DiskError, KvtoolError, MissingToolError, TreeError
from kvtool.process import Completed, Environment

# kvtool makes all of its own commits with this identity and this time.
IDENTITY = {"NAME": "kvtool", "EMAIL": "kvtool@localhost", "DATE": "1767225600 +0000"}  # 2026-01-01T00:00:00Z

# Settings that the .git/config of a repository could change. kvtool sets them in the environment, which has priority.
_OVERRIDES = {
    "commit.gpgsign": "false",
    "core.hooksPath": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.safecrlf": "false",
    "core.attributesFile": os.devnull,
    "core.quotePath": "false",
    "core.fsmonitor": "false",
    "diff.renames": "false",
    "diff.orderFile": os.devnull,
    "diff.suppressBlankEmpty": "false",
    "diff.submodule": "short",
    "diff.algorithm": "myers",
    "diff.indentHeuristic": "true",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "log.showSignature": "false",
    "merge.conflictStyle": "zdiff3",
    "merge.default": "text",
    "merge.directoryRenames": "false",
    "merge.renames": "true",
    "merge.renormalize": "false",
    "maintenance.auto": "false",
    "fetch.fsckObjects": "false",
    "fetch.unpackLimit": "1",
}

_SEALED = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",  # also keep the login program of git for Windows from opening a window
    "GIT_EDITOR": "false",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in IDENTITY.items()},
    "LC_ALL": "C",
    "TZ": "UTC",
    "GIT_CONFIG_COUNT": str(len(_OVERRIDES)),
    **{f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(_OVERRIDES)},
    **{f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(_OVERRIDES.values())},
}

_INSTALL = "install git: apt install git (Debian), xcode-select --install (macOS), winget install Git.Git (Windows)"

# The user's settings that are kept: ignored files, trusted repositories, and what is needed to reach a mirror (ssh, a
# proxy, certificates or a login).
_LET_IN = (
    r"^(core\.(excludesfile|sshcommand|askpass)|safe\.directory|ssh\.variant"
    r"|http\.(.+\.)?(proxy|ssl[a-z]+)|credential\..+|url\..+\.insteadof)$"
)
_LET_IN_VARIABLES = re.compile(r"GIT_(SSH(_COMMAND|_VARIANT)?|ASKPASS|(PROXY_)?SSL_\w+)")

_FOREIGN = re.compile(r"detected dubious ownership in repository at '(.*)'")
DISK_FULL = re.compile(r"(?i)ENOSPC|No space left|Out of diskspace|Disk quota|disk full|write new index file")


def sealed_environment(extra: Environment | None = None) -> Environment:
    """Return the changes of the environment for a git call.

    The user's GIT_* variables are removed. The identity, the dates and the language are fixed.
    """
    own = (name for name in os.environ if name.startswith("GIT_") and not _LET_IN_VARIABLES.fullmatch(name))
    inherited = dict.fromkeys(own, None)
    return {**inherited, **_SEALED, **_let_in(frozenset(os.environ.items())), **(extra or {})}


@functools.cache
def _let_in(_environment: frozenset[tuple[str, str]]) -> Environment:
    """Return environment variables that give git the user's settings whose names match _LET_IN.

    The settings are in a temporary config file. git can also read settings from environment variables, but git does not
    pass these variables on to the git process that reads a mirror. If the user did not configure ssh, ssh runs in
    BatchMode. Otherwise ssh could wait forever for a password, because there is no terminal.
    """
    asked = ["git", "-C", Path(sys.executable).anchor, "config", "-z", "--get-regexp", _LET_IN]
    done = process.capture(asked, env={"GIT_DIR": os.devnull, "GIT_CONFIG": None}, check=False)
    entries = done.stdout.split("\0")[:-1]
    named = any(name in os.environ for name in ("GIT_SSH", "GIT_SSH_COMMAND"))
    chosen = named or any(entry.startswith("core.ssh") for entry in entries)
    ssh = {} if chosen else {"GIT_SSH_COMMAND": "ssh -o BatchMode=yes"}
    if not entries:
        return ssh
    descriptor, name = tempfile.mkstemp(prefix="kvtool-", suffix=".gitconfig")
    atexit.register(Path(name).unlink, missing_ok=True)
    os.close(descriptor)
    Path(name).write_text("".join(map(_setting, entries)), encoding="utf-8", errors="surrogateescape")
    return {"GIT_CONFIG_GLOBAL": name, **ssh}


def _setting(entry: str) -> str:
    """Return an entry of `git config -z` as a line of a config file.

    The entry may contain a password. So it is passed to git in a file, and not in the command line, which other users
    can read.
    """
    key, told, value = entry.partition("\n")
    section, _, rest = key.partition(".")
    within, _, name = rest.rpartition(".")

    def quoted(text: str) -> str:
        return '"' + re.sub(r'(["\\])', r"\\\1", text).replace("\n", "\\n") + '"'

    return f"[{section}{' ' + quoted(within) if within else ''}]\n{name}{' = ' + quoted(value) if told else ''}\n"


class Git:
    """Run git in one repository, with or without a work tree."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo.absolute()

    @classmethod
    def create(cls, repo: Path, *, bare: bool = True) -> Self:
        """Create an empty repository, and its folder if it does not exist."""
        repo.mkdir(parents=True, exist_ok=True)
        git = cls(repo)
        git.run("init", "--quiet", *(["--bare"] if bare else []), ".")
        return git

    def run(
        self,
        *args: str | Path,
        env: Environment | None = None,
        input: str | bytes | Path | None = None,
        check: bool = True,
        error: type[KvtoolError] = KvtoolError,
    ) -> Completed:
        """Run git to the end. If git fails and `check` is True, raise `error` with git's output.

        Some failures raise an error even if `check` is False, because the caller would misread the exit code as git's
        answer: DiskError if the disk is full, TreeError if another user owns the repository, and `error` if git was
        killed by a signal.
        """
        done = process.capture(self._located(args), env=sealed_environment(env), input=input, check=False)
        if done.returncode != 0 and (found := _FOREIGN.search(done.stderr)):
            raise TreeError(
                f"git refuses to work in {found[1]}",
                why="another user owns it (git's safe.directory)",
                next_step=f"if you trust it: git config --global --add safe.directory {process.quote([found[1]])}",
                output=done.stderr.strip(),
            )
        if done.returncode < 0 or (done.returncode != 0 and (check or DISK_FULL.search(done.stderr))):
            output = (done.stderr + done.stdout).strip()
            if DISK_FULL.search(output):
                raise DiskError("the disk is full", why=f"git {args[0]} could not write", output=output)
            command = process.quote(["git", *args])
            raise error(f"git {args[0]} failed with exit code {done.returncode}", why=command, output=output)
        return done

    def line(self, *args: str | Path, env: Environment | None = None, input: str | bytes | Path | None = None) -> str:
        """Return the output of a git call that prints one line."""
        return self.run(*args, env=env, input=input).stdout.strip()

    def raw(self, *args: str | Path) -> bytes:
        """Return the output of a git call as bytes."""
        return self.run(*args).raw

    def entries(self, *args: str | Path) -> list[str]:
        """Return the entries that a git call with -z prints."""
        return self.run(*args).stdout.split("\0")[:-1]

    def paths(self, tree: str) -> frozenset[str]:
        """Return the paths of the files in a tree or a commit."""
        return frozenset(self.entries("ls-tree", "-r", "-z", "--name-only", tree))

    def changed(self, old: str, new: str) -> list[str]:
        """Return the paths that differ between two trees or commits."""
        return self.entries("diff", "--name-only", "--no-renames", "-z", old, new)

    def dirty(self) -> tuple[str, ...]:
        """Return the paths with uncommitted changes. Untracked files count, ignored files do not."""
        entries = self.entries("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
        return tuple(entry[3:] for entry in entries)

    def renamed(self, old: str, new: str) -> dict[str, str]:
        """Return the new path of each file that was renamed between two trees or commits, by its old path."""
        found = self.entries("diff", "--find-renames", "-l7000", "--diff-filter=R", "--name-status", "-z", old, new)
        return dict(zip(found[1::3], found[2::3], strict=True))

    def fetch(self, repo: Path, *refspecs: str) -> None:
        """Copy commits from another repository. A refspec without a target copies them without making a ref."""
        self.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", repo, *refspecs)

    def ok(self, *args: str | Path) -> bool:
        """Run git, and return whether it succeeded."""
        return self.run(*args, check=False).returncode == 0

    def watch(self, *args: str | Path, bar: Progress, phases: Sequence[str]) -> Completed:
        """Run git, and show its progress on the bar. The caller must check the exit code.

        phases: the names of the phases in git's output, in order; each phase adds up to 100 to the bar
        """

        def on_line(line: str) -> None:
            for number, phase in enumerate(phases):
                if found := re.search(rf"{phase}:\s+(\d+)%", line):
                    bar.update(100 * number + int(found[1]))

        return process.stream(self._located(args), env=sealed_environment(), on_line=on_line)

    def resolve(self, revision: str) -> str | None:
        """Return the object id of a revision, None if it does not exist."""
        done = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", revision, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def blobs(self, *names: str) -> list[tuple[str, bytes]]:
        """Return the id and the content of files named as TREE:PATH; ("", b"") for a missing file. Runs git once."""
        raw = self.run("cat-file", "--batch", "-z", input="\0".join((*names, ""))).raw
        found, at = list[tuple[str, bytes]](), 0
        for name in names:
            missing = name.encode("utf-8", "surrogateescape") + b" missing\n"
            if raw.startswith(missing, at):
                at += len(missing)
                found.append(("", b""))
                continue
            start = raw.index(b"\n", at) + 1
            blob, kind, *size = raw[at:start].decode("ascii").split()  # git prints no size for a submodule
            at = start + int(size[0]) + 1 if size else start
            found.append((blob, raw[start : at - 1]) if kind == "blob" else ("", b""))
        return found

    def _located(self, args: tuple[str | Path, ...]) -> list[str]:
        located = process.which("git")
        if located is None:
            raise MissingToolError("git is not installed", why="it is not on PATH", next_step=_INSTALL)
        return [str(located), "-C", str(self.repo), *(str(a) for a in args)]


def folders(paths: Iterable[str]) -> set[str]:
    """Return all folders above some paths."""
    return {str(parent) for path in paths for parent in PurePosixPath(path).parents}


class Scratch(Git):
    """Run git in a bare repository in a temporary folder, which is removed afterwards."""

    def place(self) -> Path:
        """Make an empty folder next to the repository."""
        return Path(tempfile.mkdtemp(dir=self.repo.parent))


@contextlib.contextmanager
def scratch_repository(*repositories: Path, below: Path | None = None) -> Iterator[Scratch]:
    """Make a temporary repository that can read the objects of other repositories without copying them.

    These repositories need not exist yet. If one is created later, as a bare repository, the next call of git finds its
    objects.

    below: the parent folder of the temporary folder, None for the system's
    """
    with tempfile.TemporaryDirectory(prefix="kvtool-", dir=below) as name:
        scratch = Scratch.create(Path(name).resolve() / "repo.git")
        objects, shallow = [], set[str]()
        for repository in repositories:
            if not repository.exists():
                objects.append(repository / "objects")
                continue
            asked = Git(repository).run("rev-parse", "--git-path", "objects", "--git-path", "shallow")
            inside, cut = ((repository / path).resolve() for path in asked.stdout.split("\n")[:2])
            objects.append(inside)
            # The file `shallow` lists the commits at which the history of a shallow clone ends. Without this file, git
            # would search for parents that do not exist.
            if cut.is_file():
                shallow |= set(cut.read_text("ascii").split())
        (scratch.repo / "objects/info/alternates").write_text("".join(f"{path}\n" for path in objects), "utf-8")
        if shallow:
            (scratch.repo / "shallow").write_text("".join(f"{commit}\n" for commit in sorted(shallow)), "ascii")
        yield scratch

"""Define every error that kvtool raises on purpose: what failed, why, what to do next, and an exit code.

Exit code 0 means ok and 130 means interrupted, as in every shell. cli.py lists all codes for users. The command
`kvtool bisect --at` uses the codes of git bisect run instead: 0 good, 1 bad, 125 skip, 128 anything else.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar


class KvtoolError(Exception):
    """The root of the tree; raised itself only for what should not happen.

    what: one sentence, no full stop needed. why: the reason as far as it is known. next_step: a command to type or a
    thing to do. output: captured output of a process that failed, shown below the message.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, *, code: str = "", exit_code: int = 0) -> None:
        """Inherit `code` and `exit_code` unless the subclass sets them."""
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

    def __init__(self, what: str, *, why: str = "", next_step: str = "", output: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.next_step, self.output = what, why, next_step, output

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what

    def to_json(self) -> dict[str, Any]:
        """Return the "error" object of a JSON document; a frozen contract."""
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "next": self.next_step,
            "output": self.output,
        }


class DiskError(KvtoolError, code="disk"):
    """The disk is full, or a directory kvtool must write to cannot be written."""


class UsageError(KvtoolError, code="usage", exit_code=2):
    """An argument, a file of the project or an environment variable is wrong."""


class ConflictError(KvtoolError, code="conflict", exit_code=3):
    """A patch does not apply."""


class TreeError(KvtoolError, code="tree", exit_code=4):
    """The patched tree is in the wrong state: stale, dirty, not applied, or not made by kvtool."""


class LockError(KvtoolError, code="lock", exit_code=5):
    """Something fetched does not match patches/upstream.lock: truncated, corrupt, or the wrong tree."""


class DriftError(KvtoolError, code="drift", exit_code=6):
    """The patched tree differs from patches/ and cpp/."""


class LintError(KvtoolError, code="lint", exit_code=6):
    """The series and its files are not as they should be."""


class BuildError(KvtoolError, code="build", exit_code=7):
    """Configure or build failed, or cannot work on this machine."""


class MissingToolError(KvtoolError, code="missing_tool", exit_code=7):
    """A required program is not installed; the message explains how to install it."""


class VerifyError(KvtoolError, code="verify", exit_code=8):
    """The programs did not pass a check."""


class MeasureError(KvtoolError, code="measure", exit_code=8):
    """A measurement could not be made, or (with --strict) a bar was missed."""


class NetworkError(KvtoolError, code="network", exit_code=9):
    """A server could not be reached: every source of an upstream that is not cached, or a server to watch."""


class BisectBad(KvtoolError, code="bad", exit_code=1):
    """`kvtool bisect --at`: the patch does not apply to this commit (git bisect run reads 1 as bad)."""


class BisectSkip(KvtoolError, code="skip", exit_code=125):
    """`kvtool bisect --at`: this commit cannot be judged; git bisect run tries another."""


class BisectAbort(KvtoolError, code="abort", exit_code=128):
    """`kvtool bisect --at`: something else is wrong; git bisect run stops instead of calling the commit bad."""


@contextlib.contextmanager
def writing(what: str, next_step: str = "") -> Iterator[None]:
    """Turn an OSError in the block into a DiskError: `what` cannot be written."""
    try:
        yield
    except OSError as err:
        raise DiskError(f"cannot write {what}", why=str(err), next_step=next_step) from err


def must_be_writable(file: Path) -> None:
    """Raise DiskError now if a file cannot be written, and not after an hour of work. Keeps an existing file."""
    with writing(str(file), "name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        tempfile.TemporaryFile(dir=file.parent).close()

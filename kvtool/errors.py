"""Define all errors that kvtool raises on purpose: what failed, why, what to do next, and an exit code.

Exit code 0 means success, and 130 means interrupted, as in every shell. cli.py lists all codes for users. `kvtool
bisect --at` uses the codes of git bisect run instead: 0 good, 1 bad, 125 skip, 128 any other error.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar


class KvtoolError(Exception):
    """A bug in kvtool.

    This class is also the base of all other errors of kvtool.

    what: one sentence about what failed, without a full stop
    why: the reason, "" if it is unknown
    next_step: a command to type, or a thing to do
    output: the output of a process that failed, which is printed below the message
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, *, code: str = "", exit_code: int = 0) -> None:
        """Set the error code and the exit code of a subclass. A code that is not given is inherited."""
        cls.code, cls.exit_code = code or cls.code, exit_code or cls.exit_code

    def __init__(self, what: str, *, why: str = "", next_step: str = "", output: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.next_step, self.output = what, why, next_step, output

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what

    def to_json(self) -> dict[str, Any]:
        """Return the "error" object of a JSON document. Scripts read it, so its fields must not change."""
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "next": self.next_step,
            "output": self.output,
        }


class DiskError(KvtoolError, code="disk"):
    """The disk is full, or kvtool cannot write to a folder."""


class UsageError(KvtoolError, code="usage", exit_code=2):
    """An argument, a file of the project or an environment variable is wrong."""


class ConflictError(KvtoolError, code="conflict", exit_code=3):
    """A patch does not apply."""


class TreeError(KvtoolError, code="tree", exit_code=4):
    """The patched tree is in the wrong state: stale, dirty, not applied, or not made by kvtool."""


class LockError(KvtoolError, code="lock", exit_code=5):
    """A download does not match patches/upstream.lock: it is truncated, damaged, or has a wrong tree."""


class DriftError(KvtoolError, code="drift", exit_code=6):
    """The patched tree differs from patches/ and cpp/."""


class LintError(KvtoolError, code="lint", exit_code=6):
    """The series or its files have a mistake."""


class BuildError(KvtoolError, code="build", exit_code=7):
    """Configuring or building failed, or is not possible on this machine."""


class MissingToolError(KvtoolError, code="missing_tool", exit_code=7):
    """A required program is not installed. The message explains how to install it."""


class VerifyError(KvtoolError, code="verify", exit_code=8):
    """A program did not pass a check."""


class MeasureError(KvtoolError, code="measure", exit_code=8):
    """A measurement failed or, with --strict, a figure misses its target."""


class NetworkError(KvtoolError, code="network", exit_code=9):
    """A server could not be reached.

    Either kvtool needed to download an upstream, and no source of the download answered. Or `kvtool top` watches a
    llama-server, and that server did not answer.
    """


class BisectBad(KvtoolError, code="bad", exit_code=1):
    """A patch does not apply to a commit (`kvtool bisect --at`).

    git bisect run reads exit code 1 as bad.
    """


class BisectSkip(KvtoolError, code="skip", exit_code=125):
    """A commit cannot be judged (`kvtool bisect --at`). git bisect run then tries another commit."""


class BisectAbort(KvtoolError, code="abort", exit_code=128):
    """`kvtool bisect --at` ended with an error that is not a verdict on the commit.

    git bisect run then stops, instead of treating the commit as bad.
    """


@contextlib.contextmanager
def writing(what: str, next_step: str = "") -> Iterator[None]:
    """Turn an OSError in the block into a DiskError, which says that `what` cannot be written."""
    try:
        yield
    except OSError as err:
        raise DiskError(f"cannot write {what}", why=str(err), next_step=next_step) from err


def must_be_writable(file: Path) -> None:
    """Raise DiskError if a file cannot be written.

    Call this before an hour of work whose result is written to the file. An existing file is kept.
    """
    with writing(str(file), "name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError("it is a directory")
        tempfile.TemporaryFile(dir=file.parent).close()

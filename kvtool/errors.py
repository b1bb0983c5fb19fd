"""Every error kvtool raises on purpose: what failed, why, what to do next, and one exit code each.

Exit codes: 0 ok, 1 internal (also a full disk), 2 usage, 3 conflict, 4 stale or dirty tree, 5 lock mismatch,
6 export drift or lint, 7 build (also a missing tool), 8 verify or measure, 9 network. 130 is an interrupt, as in every
shell. `kvtool bisect --at` speaks to git bisect run instead: 0 good, 1 bad, 125 skip, 128 anything else.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar


class KvtoolError(Exception):
    """The root of the tree; raised itself only for what should not happen.

    what: one sentence, no full stop needed. why: the reason as far as it is known. next_step: a command to type or a
    thing to do. output: captured output of a process that failed, shown below the message.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init__(self, what: str, *, why: str = "", next_step: str = "", output: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step
        self.output = output

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what

    def to_json(self) -> dict[str, Any]:
        """The "error" object of a JSON document; a frozen contract."""
        return {
            "code": self.code,
            "exit_code": self.exit_code,
            "what": self.what,
            "why": self.why,
            "next": self.next_step,
            "output": self.output,
        }


class DiskError(KvtoolError):
    """The disk is full, or a directory kvtool must write to cannot be written."""

    code = "disk"


class UsageError(KvtoolError):
    """An argument, a file of the project or an environment variable is wrong."""

    exit_code = 2
    code = "usage"


class ConflictError(KvtoolError):
    """A patch does not apply."""

    exit_code = 3
    code = "conflict"


class TreeError(KvtoolError):
    """The patched tree is not what the command needs: stale, dirty, not applied, not kvtool's."""

    exit_code = 4
    code = "tree"


class LockError(KvtoolError):
    """Something fetched does not match patches/upstream.lock: truncated, corrupt, or the wrong tree."""

    exit_code = 5
    code = "lock"


class DriftError(KvtoolError):
    """The patched tree and patches/ + cpp/ say different things."""

    exit_code = 6
    code = "drift"


class LintError(KvtoolError):
    """The series and its files are not as they should be."""

    exit_code = 6
    code = "lint"


class BuildError(KvtoolError):
    """Configure or build failed, or cannot work on this machine."""

    exit_code = 7
    code = "build"


class MissingToolError(KvtoolError):
    """A program that is needed is not installed; next_step says how to get it."""

    exit_code = 7
    code = "missing_tool"


class VerifyError(KvtoolError):
    """The binaries do not do what they should."""

    exit_code = 8
    code = "verify"


class MeasureError(KvtoolError):
    """A measurement could not be made, or (with --strict) a bar was missed."""

    exit_code = 8
    code = "measure"


class NetworkError(KvtoolError):
    """What is needed could not be reached: a source of upstream with nothing cached, a server that is to be watched."""

    exit_code = 9
    code = "network"


class BisectBad(KvtoolError):
    """`kvtool bisect --at`: the patch does not apply there; the code is what git bisect run takes for bad."""

    exit_code = 1
    code = "bad"


class BisectSkip(KvtoolError):
    """`kvtool bisect --at`: this commit cannot tell; git bisect run tries another."""

    exit_code = 125
    code = "skip"


class BisectAbort(KvtoolError):
    """`kvtool bisect --at`: something else is wrong; git bisect run stops instead of calling the commit bad."""

    exit_code = 128
    code = "abort"


@contextlib.contextmanager
def writing(what: str, next_step: str = "") -> Iterator[None]:
    """An OSError inside is a DiskError: `what` cannot be written."""
    try:
        yield
    except OSError as err:
        raise DiskError(f"cannot write {what}", why=str(err), next_step=next_step) from err

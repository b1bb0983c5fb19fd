"""What a canary reports: each step, and what broke, under a key that stays while the same thing is broken. Pure."""

import enum
import hashlib
from dataclasses import dataclass

from kvtool.errors import KvtoolError
from kvtool.result import CheckOutcome, PatchOutcome
from kvtool.tree.apply import PatchReport
from kvtool.verify.report import Verified

SCHEMA = 1  # of the JSON document; raised when a field changes its meaning or goes away
_TAIL = 40  # lines of a failed step's log to keep


class StepName(enum.StrEnum):
    """What a canary does, in this order; a step that fails ends it."""

    FETCH = "fetch"
    REBASE = "rebase"
    BUILD = "build"
    VERIFY = "verify"


@dataclass(frozen=True)
class Step:
    """One step. outcome: skipped when an earlier one failed or it was not asked for; log: the end of what it said."""

    name: StepName
    outcome: CheckOutcome
    seconds: float = 0.0
    summary: str = ""
    log: str = ""


@dataclass(frozen=True)
class Breakage:
    """One thing that is broken. patch, file: "" where none can be named; what: for people, not part of the key.

    where: the hunk's function, the object that does not build, or the check that fails.
    """

    step: StepName
    patch: str
    file: str
    where: str
    what: str

    @property
    def key(self) -> str:
        """The same for the same breakage on another day and another tag: no tag, date or line number is in it."""
        parts = (str(self.step), self.patch, self.file, self.where)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def of_patches(reports: tuple[PatchReport, ...]) -> tuple[Breakage, ...]:
    """One for each patch that has no place of its own fault; one that an earlier patch blocks says nothing new."""
    found: list[Breakage] = []
    for report in reports:
        if report.outcome is PatchOutcome.CONFLICT:
            hunk = report.failed[0]
            function = hunk.header.partition("@@ ")[2].partition("@@")[2].strip()
            found.append(Breakage(StepName.REBASE, report.id, hunk.path, function, str(hunk)))
        elif report.lost:
            found.append(Breakage(StepName.REBASE, report.id, "", "lost", f"{report.id} lost {report.lost}"))
    return tuple(found)


def of_verified(verified: Verified) -> tuple[Breakage, ...]:
    """One for all failed checks, named after the first: they are the same breakage more often than not."""
    if not verified.failed:
        return ()
    first, more = verified.failed[0], len(verified.failed) - 1
    also = f", and {more} more checks" if more else ""
    return (Breakage(StepName.VERIFY, "", "", first.id, f"{first.id}: {first.reason}{also}"),)


def of_error(step: StepName, err: KvtoolError) -> Breakage:
    """An error that ended a step: a build names its object in `what`, anything else is told by its kind."""
    where = err.what if step is StepName.BUILD else err.code
    return Breakage(step, "", "", where, str(err))


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL:])

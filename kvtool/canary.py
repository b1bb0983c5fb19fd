"""Define the parts of a canary's report: the newest tag, each step, and breakages with a stable key.

The key of a breakage stays the same while the same part is broken.
"""

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.errors import KvtoolError, NetworkError
from kvtool.gitcmd import Git, scratch_repository
from kvtool.process import redact_urls
from kvtool.project import place_of
from kvtool.replay.apply import PatchReport
from kvtool.result import CheckOutcome, PatchOutcome
from kvtool.upstream.lock import Lock
from kvtool.verify.report import Verified

SCHEMA = 1  # version of the JSON document; raised when a field changes its meaning or is removed


class StepName(enum.StrEnum):
    """Name the steps of a canary in order; a failed step ends it."""

    FETCH = "fetch"
    REBASE = "rebase"
    BUILD = "build"
    VERIFY = "verify"


@dataclass(frozen=True)
class CanaryStep:
    """Hold the result of one step.

    outcome: skipped after a failed step, or if the step was not requested
    log: the end of the step's output
    """

    name: StepName
    outcome: CheckOutcome
    seconds: float = 0.0
    summary: str = ""
    log: str = ""


@dataclass(frozen=True)
class Breakage:
    """One thing that is broken. patch, file: "" where none can be named; what: for people, not part of the key.

    where: the hunk's function, the check that fails, or the kind of error.
    """

    step: StepName
    patch: str
    file: str
    where: str
    what: str

    @property
    def key(self) -> str:
        """Return a hash that is equal for the same breakage on another day and tag.

        It contains no tag, date or line number.
        """
        parts = (str(self.step), self.patch, self.file, self.where)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def of_patches(reports: tuple[PatchReport, ...]) -> tuple[Breakage, ...]:
    """Return a breakage for each patch with a conflict of its own; blocked patches add nothing."""
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
    """Return one breakage for all failed checks, named after the first: usually they have one cause."""
    if not verified.failed:
        return ()
    first, more = verified.failed[0], len(verified.failed) - 1
    also = f", and {more} more checks" if more else ""
    return (Breakage(StepName.VERIFY, "", "", first.id, f"{first.id}: {first.reason}{also}"),)


def of_error(step: StepName, err: KvtoolError) -> Breakage:
    """Return an error that ended a step, identified by its kind.

    The objects that a failed build names, and their order, are random.
    """
    return Breakage(step, "", "", err.code, str(err))


# --- upstream's newest tag -------------------------------------------------------------------------------------

# llama.cpp tags each build with a running number, and tags some of them again as a version. Both continue.
_SCHEMES = (re.compile(r"b\d+"), re.compile(r"v\d+\.\d+(\.\d+)?"))


def candidates(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the first tag of each of upstream's schemes. Tags of other schemes are ignored."""
    return tuple(filter(None, (next(filter(scheme.fullmatch, tags), "") for scheme in _SCHEMES)))


def newest(lock: Lock, remote: str) -> tuple[str, str, str]:
    """Return the newest tag of a remote, its origin, and the reason if the remote was not used.

    remote: a URL or path. If it cannot be reached or has no tags, the last tag of the lock is returned, with the
    origin "upstream.lock".
    """
    try:
        with scratch_repository() as git:
            return _newest(git, remote), redact_urls(remote), ""
    except NetworkError as err:
        return list(lock.upstreams)[-1], "upstream.lock", err.why


def _newest(git: Git, remote: str) -> str:
    where = place_of(remote)

    def ask(*command: str) -> list[str]:
        done = git.run(*command, check=False)
        if done.returncode != 0:
            why = redact_urls((done.stderr.strip().splitlines() or [remote])[0])
            raise NetworkError("the remote cannot be asked", why=why)
        return done.stdout.splitlines()

    listed = ask("ls-remote", "--tags", "--refs", "--sort=-v:refname", where)  # the highest first
    found = candidates([line.partition("refs/tags/")[2] for line in listed])
    if not found:
        raise NetworkError("the remote has no tag", why=f"{redact_urls(remote)} has no tag b<number> or v<version>")
    if len(found) == 1:
        return found[0]
    # Names do not show whether b11063 is older than v0.5.0, but dates do. Commits alone are a few hundred bytes.
    refs = (f"+refs/tags/{tag}:refs/tags/{tag}" for tag in found)
    ask("fetch", "--quiet", "--depth=1", "--filter=tree:0", "--no-tags", where, *refs)
    return max(found, key=lambda tag: int(git.line("log", "-1", "--format=%ct", tag)))

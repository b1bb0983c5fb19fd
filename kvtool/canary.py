"""What a canary needs to know, and says: upstream's newest tag; each step; what broke, by a key that stays while the
same thing is broken."""

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

SCHEMA = 1  # of the JSON document; raised when a field changes its meaning or goes away


class StepName(enum.StrEnum):
    """What a canary does, in this order; a step that fails ends it."""

    FETCH = "fetch"
    REBASE = "rebase"
    BUILD = "build"
    VERIFY = "verify"


@dataclass(frozen=True)
class CanaryStep:
    """One step. outcome: skipped when an earlier one failed or it was not asked for; log: the end of what it said."""

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
    """An error that ended a step, told by its kind: which objects a build names, and in what order, is chance."""
    return Breakage(step, "", "", err.code, str(err))


# --- upstream's newest tag -------------------------------------------------------------------------------------

# llama.cpp tags each build with a running number, and some of them again as a version; both go on.
_SCHEMES = (re.compile(r"b\d+"), re.compile(r"v\d+\.\d+(\.\d+)?"))


def candidates(tags: Sequence[str]) -> tuple[str, ...]:
    """The first tag of each of upstream's schemes; tags that follow none are passed over."""
    return tuple(filter(None, (next(filter(scheme.fullmatch, tags), "") for scheme in _SCHEMES)))


def newest(lock: Lock, remote: str) -> tuple[str, str, str]:
    """The newest tag of a remote (URL or path), or the last of the lock when it cannot be asked or has none; which of
    the two ("upstream.lock") told it; and why the remote was not asked."""
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
    # Names do not say whether b11063 is older than v0.5.0, dates do; commits alone are a few hundred bytes.
    refs = (f"+refs/tags/{tag}:refs/tags/{tag}" for tag in found)
    ask("fetch", "--quiet", "--depth=1", "--filter=tree:0", "--no-tags", where, *refs)
    return max(found, key=lambda tag: int(git.line("log", "-1", "--format=%ct", tag)))

"""Define what `kvtool canary` reports: the newest tag, each step, and breakages.

A breakage has a key that stays the same as long as the same thing is broken.
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

SCHEMA = 1  # version of the JSON document; it is raised if a field is removed or changes its meaning


class StepName(enum.StrEnum):
    """Name the steps of a canary in their order. After a step that failed, no further step runs."""

    FETCH = "fetch"
    REBASE = "rebase"
    BUILD = "build"
    VERIFY = "verify"


@dataclass(frozen=True)
class CanaryStep:
    """Hold the result of one step.

    outcome: SKIPPED if an earlier step failed, or if the user did not ask for the step
    log: the end of the step's output
    """

    name: StepName
    outcome: CheckOutcome
    seconds: float = 0.0
    summary: str = ""
    log: str = ""


@dataclass(frozen=True)
class Breakage:
    """Describe one thing that is broken.

    patch: the id of the patch, "" for a breakage without a patch, such as a failed build
    file: the path of the file, "" for a breakage without a file
    where: the function of the hunk, the id of the check that fails, or the kind of error
    what: a text for people; it is not a part of the key
    """

    step: StepName
    patch: str
    file: str
    where: str
    what: str

    @property
    def key(self) -> str:
        """Return a hash that identifies the breakage. It stays the same on later days and on later tags.

        It is made of the step, the patch, the file and `where`, without the tag, the date and line numbers.
        """
        parts = (str(self.step), self.patch, self.file, self.where)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def of_patches(reports: tuple[PatchReport, ...]) -> tuple[Breakage, ...]:
    """Return a breakage for each patch that has a conflict or lost lines.

    A patch that is only blocked by another patch has no breakage of its own.
    """
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
    """Return one breakage for all failed checks, because they usually have the same cause; nothing if no check failed.

    The breakage has the id of the first failed check.
    """
    if not verified.failed:
        return ()
    first, more = verified.failed[0], len(verified.failed) - 1
    also = f", and {more} more checks" if more else ""
    return (Breakage(StepName.VERIFY, "", "", first.id, f"{first.id}: {first.reason}{also}"),)


def of_error(step: StepName, err: KvtoolError) -> Breakage:
    """Return the breakage for an error that ended a step. It is identified by the kind of the error.

    The files that a failed build names are not used, because they and their order change from build to build.
    """
    return Breakage(step, "", "", err.code, str(err))


# --- upstream's newest tag -------------------------------------------------------------------------------------

# llama.cpp tags each build with a number (b11063), and some of them also as a version (v0.5.0). Both series continue.
_SCHEMES = (re.compile(r"b\d+"), re.compile(r"v\d+\.\d+(\.\d+)?"))


def candidates(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the first build tag (b11063) and the first version tag (v0.5.0) of a list. Other tags are ignored."""
    return tuple(filter(None, (next(filter(scheme.fullmatch, tags), "") for scheme in _SCHEMES)))


def newest(lock: Lock, remote: str) -> tuple[str, str, str]:
    """Return the newest tag of a remote, where it was found, and the reason if the remote was not used.

    If the remote cannot be reached or has no such tags, the last tag of the lock and "upstream.lock" are returned.

    remote: a URL or a path
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
            raise NetworkError("the remote cannot be reached", why=why)
        return done.stdout.splitlines()

    listed = ask("ls-remote", "--tags", "--refs", "--sort=-v:refname", where)  # sorted with the highest version first
    found = candidates([line.partition("refs/tags/")[2] for line in listed])
    if not found:
        raise NetworkError("the remote has no tag", why=f"{redact_urls(remote)} has no tag b<number> or v<version>")
    if len(found) == 1:
        return found[0]
    # The names do not show whether b11063 is older than v0.5.0, but the dates do. To read them, fetch only the commits,
    # which have a few hundred bytes.
    refs = (f"+refs/tags/{tag}:refs/tags/{tag}" for tag in found)
    ask("fetch", "--quiet", "--depth=1", "--filter=tree:0", "--no-tags", where, *refs)
    return max(found, key=lambda tag: int(git.line("log", "-1", "--format=%ct", tag)))

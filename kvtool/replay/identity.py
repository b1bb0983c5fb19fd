"""Find the patch of each commit of the patched tree. Git is not run.

These rules are tried in order. A patch gets at most one commit, and a commit at most one patch:

1. The user has assigned the commit to the patch, with `kvtool export --assign COMMIT=ID` or a trailer
   `Kvtool-Patch: ID` in the message.
2. kvtool itself made the commit from the patch.
3. The commit changes the same lines as the patch (git's patch-id). If several commits do, the commit with the subject
   of the patch is chosen.
4. The commit has the subject of the patch.

So a commit can be reworded, changed, moved or split, and two patches may have the same subject.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtool.errors import UsageError
from kvtool.replay.apply import Applied, Commit
from kvtool.series.patchfile import changed_rows
from kvtool.series.series import LoadedPatch

_TRAILER = re.compile(r"^Kvtool-Patch: *([a-z0-9][a-z0-9-]*)\s*$", re.MULTILINE)
_ASSIGNED = re.compile(r"([0-9a-f]{4,40})=([a-z0-9][a-z0-9-]*)")


@dataclass(frozen=True)
class Candidate:
    """Hold a commit of the tree that is not a fixup, and the diff of its files that patches change."""

    commit: Commit
    diff: bytes


def parse_assignments(assigned: Sequence[str], commits: Sequence[Commit], ids: Sequence[str]) -> dict[str, str]:
    """Return the patch that the user assigned to each commit, by full commit id.

    Raises UsageError for a text that is not COMMIT=ID.
    """
    found: dict[str, str] = {}
    for text in assigned:
        parsed = _ASSIGNED.fullmatch(text)
        matching = [commit.id for commit in commits if parsed and commit.id.startswith(parsed[1])]
        if not parsed or len(matching) != 1 or parsed[2] not in ids:
            raise UsageError(
                f"--assign {text} does not name a commit of the tree and a patch of the series",
                next_step="write it as COMMIT=ID; git log and kvtool status list both",
            )
        found[matching[0]] = parsed[2]
    return found


def match_patches(
    candidates: Sequence[Candidate], patches: Sequence[LoadedPatch], applied: Applied, assigned: Mapping[str, str]
) -> dict[str, str]:
    """Return the id of each commit's patch, by commit id. Commits that belong to no patch are left out."""
    by_id = {loaded.patch.id: loaded for loaded in patches if loaded.wanted}
    made = {report.commit: report.id for report in applied.patches if report.commit and report.id in by_id}
    found: dict[str, str] = {}

    def take(commit: Commit, patch: str) -> None:
        if patch in by_id and patch not in found.values() and commit.id not in found:
            found[commit.id] = patch

    for each in candidates:
        take(each.commit, assigned.get(each.commit.id, ""))
    for each in candidates:
        for name in _TRAILER.findall(each.commit.message):
            take(each.commit, name)
    for each in candidates:
        take(each.commit, made.get(each.commit.id, ""))
    rows = {name: changed_rows(loaded.mail.diff) for name, loaded in by_id.items()}
    subjects = {name: loaded.mail.subject for name, loaded in by_id.items()}
    changed = {each.commit.id: changed_rows(each.diff) for each in candidates if each.diff}
    for same_lines, same_subject in ((True, True), (True, False), (False, True)):
        for name in by_id:
            for each in candidates:
                is_equal = bool(rows[name]) and changed.get(each.commit.id) == rows[name]
                is_named = each.commit.subject == subjects[name]
                if (is_equal or not same_lines) and (is_named or not same_subject):
                    take(each.commit, name)
    return found


def contains_patch(diffs: Sequence[bytes], patch: bytes) -> bool:
    """Return True if the diffs together add every line that the patch adds.

    If the patch adds no lines, the diffs must remove every line that the patch removes. Empty lines do not count.
    """
    have, need = (_signed_rows(part) for part in (diffs, [patch]))
    added = Counter({key: count for key, count in need.items() if key[1].startswith(b"+") and key[1][1:].strip()})
    removed = Counter({key: count for key, count in need.items() if key[1].startswith(b"-") and key[1][1:].strip()})
    wanted = added or removed
    return bool(wanted) and wanted <= have


def _signed_rows(diffs: Sequence[bytes]) -> Counter[tuple[str, bytes]]:
    return Counter((path, row) for diff in diffs for path, rows in changed_rows(diff) for row in rows)

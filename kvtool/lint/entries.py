"""Check the entries of series.toml: each entry alone, against upstream.lock, and against the other entries."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvtool.lint import LintFinding
from kvtool.series.series import Patch, entry_problems, patch_of
from kvtool.upstream.lock import Lock

_ENTRY = re.compile(r"^\s*\[\[\s*patch\s*\]\]")


class SeriesText:
    """Find the lines of the entries in the text of series.toml, because the TOML parser does not report lines."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._lines = text.split("\n")
        self._starts = [n for n, line in enumerate(self._lines) if _ENTRY.match(line)]

    def finding(self, entry: int, key: str, rule: str, what: str, next_step: str) -> LintFinding:
        """Return a finding for the line of a key. If the entry lacks the key, the finding has the line of [[patch]].

        entry: the number of the entry, counted from 0
        """
        line = 0  # 0 if the entries are written as an inline array
        if entry < len(self._starts):
            start, stop = [*self._starts, len(self._lines)][entry : entry + 2]
            key_line = re.compile(rf"^\s*(\"?){re.escape(key)}\1\s*[=.]")
            line = next((n for n in range(start, stop) if key_line.match(self._lines[n])), start) + 1
        return LintFinding(self.file, line, rule, what, next_step)


def parse_entries(tables: list[Any], text: SeriesText) -> tuple[dict[int, Patch], list[LintFinding]]:
    """Return the valid [[patch]] tables by their number, and the mistakes in the other tables."""
    patches: dict[int, Patch] = {}
    found: list[LintFinding] = []
    for number, table in enumerate(tables):
        problems = list(entry_problems(table))
        if not problems:
            patches[number] = patch_of(table)
        for key, problem in problems:
            what = f"{problem.what} ({problem.why})" if problem.why else problem.what
            found.append(text.finding(number, key, "entry", what, problem.next_step or "correct it"))
    return patches, found


def lint_entries(
    patches: Mapping[int, Patch], lock: Lock | None, known_tests: Collection[str], text: SeriesText
) -> Iterator[LintFinding]:
    """Yield the mistakes in valid entries.

    lock: None if upstream.lock cannot be read; then the tags are not checked
    """
    taken: set[tuple[str, str]] = set()
    for number, patch in patches.items():
        for key, name in (("id", patch.id), ("file", patch.file)):
            if (key, name) in taken:
                what = f"another patch has the {key} {name!r}"
                yield text.finding(number, key, "twice", what, f"choose a unique {key}")
            taken.add((key, name))
        if patch.status != "local" and not patch.pr:
            what = f"{patch.id} has the upstream status {patch.status}, but no pr"
            yield text.finding(number, "upstream", "pr", what, "add pr = the pull request's address, or number as #123")
        for test in [test for test in patch.tests if test not in known_tests]:
            what = f"{patch.id}: there is no test {test!r}"
            yield text.finding(number, "tests", "test", what, f"name one of {', '.join(sorted(known_tests))}")
        if lock is not None:
            yield from _span(number, patch, lock, text)


def _span(number: int, patch: Patch, lock: Lock, text: SeriesText) -> Iterator[LintFinding]:
    """Check that from and until are tags of the lock, and that from is before until."""
    known = lock.upstreams
    for key, tag in (("from", patch.since), ("until", patch.until)):
        if tag and tag not in known:
            what = f"{patch.id}: {key} = {tag!r} is not in upstream.lock"
            yield text.finding(number, key, "span", what, f"name one of {', '.join(known)}")
    both = patch.since in known and patch.until in known
    if both and known[patch.since].order >= known[patch.until].order:
        what = f"{patch.id}: no tag is between from = {patch.since} and until = {patch.until}"
        todo = "until is the first tag that the patch is not applied to; name a later tag"
        yield text.finding(number, "until", "span", what, todo)

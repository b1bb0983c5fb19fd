"""Findings of a run of hours, kept as they come: an interrupted one goes on where it stopped.

A JSON Lines file: a check's arguments and its finding in each. Taken over is what passed and said no more than that;
what failed, could not be done or was done in part runs again, and so does what cannot be read, such as a last line that
was cut off.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtool.result import CheckOutcome, plain, read
from kvtool.verify.checks import Check, Finding

_Key = tuple[str, tuple[str, ...]]


class Journal:
    """The findings of one set of programs, models and circumstances, whose fingerprint is `of`, below `work`."""

    def __init__(self, work: Path, of: str) -> None:
        self._file = work / f"matrix-{of}.jsonl"
        self._known: dict[_Key, Finding] = dict(_read(self._file))

    def known(self, checks: Iterable[Check]) -> dict[str, Finding]:
        """By check id: what an earlier run found out about these checks."""
        return {check.id: self._known[key] for check in checks if (key := _key(check)) in self._known}

    def add(self, check: Check, finding: Finding) -> None:
        """Keep a finding; written when this returns."""
        self._known[_key(check)] = finding
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            out.write("\n" + _line(_key(check), finding))  # ends a line that was cut off

    def forget(self, checks: Sequence[Check]) -> None:
        """The run over these checks is complete and told: the next one starts anew. What other runs left stays."""
        for check in checks:
            self._known.pop(_key(check), None)
        if not self._known:
            self._file.unlink(missing_ok=True)
            return
        fresh = self._file.with_name(f"{self._file.name}.new")
        fresh.write_text("".join(_line(key, finding) for key, finding in self._known.items()), "utf-8")
        fresh.replace(self._file)


def _key(check: Check) -> _Key:
    return check.id, check.args


def _line(key: _Key, finding: Finding) -> str:
    return json.dumps({"args": key[1], "finding": plain(finding)}) + "\n"


def _read(file: Path) -> Iterator[tuple[_Key, Finding]]:
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry: dict[str, Any] = json.loads(line)
            found = read(Finding, entry["finding"])
            # a reason beside "passed" says what was left out, or done in another way
            if found.outcome is CheckOutcome.PASSED and not found.reason:
                yield (found.id, tuple(str(arg) for arg in entry["args"])), found

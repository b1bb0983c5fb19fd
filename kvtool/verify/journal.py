"""Findings of a run of hours, kept as they come: an interrupted one goes on where it stopped.

A JSON Lines file, a finding in each. Taken over is what passed and said no more than that; what failed, could not be
done or was done in part runs again, and so does what cannot be read, such as a last line that was cut off.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from kvtool.result import CheckOutcome, from_plain, to_plain
from kvtool.verify.checks import Check, Finding


class Journal:
    """The findings of one run below `work`. of: the fingerprint of its programs, models, circumstances and checks.

    known: by check id, what an earlier run of the same found out.
    """

    def __init__(self, work: Path, of: str) -> None:
        self._file = work / f"matrix-{of}.jsonl"
        self.known = {found.id: found for found in _read(self._file)}

    def add(self, _check: Check, finding: Finding) -> None:
        """Keep a finding; written when this returns."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(f"\n{json.dumps(to_plain(finding))}\n")  # ends a line that was cut off

    def forget(self) -> None:
        """The run is complete and told: the next one starts anew."""
        self._file.unlink(missing_ok=True)


def _read(file: Path) -> Iterator[Finding]:
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = from_plain(Finding, json.loads(line))
            # a reason beside "passed" says what was left out, or done in another way
            if found.outcome is CheckOutcome.PASSED and not found.reason:
                yield found

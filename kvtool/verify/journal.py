"""Store the findings of a run of hours as they arrive, so that an interrupted run can continue.

The file is JSON Lines, a finding per line. Findings that passed without a remark are reused. Failed, skipped and
partial checks run again, and so do unreadable lines, such as a truncated last line.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from kvtool.result import CheckOutcome, from_plain, to_plain
from kvtool.verify.checks import Check, Finding


class Journal:
    """Store the findings of one run below `work`.

    of: the fingerprint of its programs, models, circumstances and checks
    known: by check id, the findings of an earlier run of the same
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
        """Delete the findings after they were reported, so the next run starts from the beginning."""
        self._file.unlink(missing_ok=True)


def _read(file: Path) -> Iterator[Finding]:
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = from_plain(Finding, json.loads(line))
            # a reason after "passed" describes an omitted part, or another method
            if found.outcome is CheckOutcome.PASSED and not found.reason:
                yield found

"""Write each finding to a file when it arrives, so that an interrupted run of several hours can continue.

The file is JSON Lines, with one finding per line. The next run reuses the findings that passed without a remark. A
check runs again if it failed, was skipped or ran only in part. It also runs again if its line cannot be read, for
example because the last line was cut off.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from kvtool.result import CheckOutcome, from_plain, to_plain
from kvtool.verify.checks import Check, Finding


class Journal:
    """Store the findings of one run in a file in the folder `work`.

    of: a hash of the programs, the models, the circumstances and the checks of the run; part of the file's name
    known: the findings of an earlier run with the same hash, by the id of the check
    """

    def __init__(self, work: Path, of: str) -> None:
        self._file = work / f"matrix-{of}.jsonl"
        self.known = {found.id: found for found in _read(self._file)}

    def add(self, _check: Check, finding: Finding) -> None:
        """Write a finding to the file before this function returns."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            # begin with a line end, in case the last line of an interrupted run was cut off
            out.write(f"\n{json.dumps(to_plain(finding))}\n")

    def forget(self) -> None:
        """Delete the file after the findings were reported. The next run then starts from the beginning."""
        self._file.unlink(missing_ok=True)


def _read(file: Path) -> Iterator[Finding]:
    for line in file.read_text("utf-8", "replace").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = from_plain(Finding, json.loads(line))
            # if a check that passed has a reason, a part of it was left out or another method was used, so run it again
            if found.outcome is CheckOutcome.PASSED and not found.reason:
                yield found

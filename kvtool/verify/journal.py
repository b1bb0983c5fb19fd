"""Findings of a run of hours, kept as they come: an interrupted one goes on where it stopped.

A JSON Lines file. The first line names the programs that were verified, each other one is a check's arguments and its
finding. What failed is not taken over (it runs again), nor anything of other programs, nor what cannot be read, such
as a last line that was cut off.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtool.result import CheckOutcome, plain
from kvtool.verify.checks import Check, Finding

_Key = tuple[str, tuple[str, ...]]


class Journal:
    """The findings in one file. programs: a word that changes with the programs under test."""

    def __init__(self, file: Path, programs: str) -> None:
        self._file, self._programs = file, programs
        self._known: dict[_Key, Finding] = dict(_read(file, programs))
        self._write()

    def known(self, checks: Iterable[Check]) -> dict[str, Finding]:
        """By check id: what an earlier run found out about these checks."""
        return {check.id: self._known[key] for check in checks if (key := _key(check)) in self._known}

    def add(self, check: Check, finding: Finding) -> None:
        """Keep a finding; on the disk before this returns."""
        self._known[_key(check)] = finding
        with self._file.open("a", encoding="utf-8") as out:
            out.write(_line(_key(check), finding))

    def forget(self, checks: Sequence[Check]) -> None:
        """The run over these checks is complete: the next one starts anew. What other runs left stays."""
        for check in checks:
            self._known.pop(_key(check), None)
        if self._known:
            self._write()
        else:
            self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        """The file as it should be, in place of what is there."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lines = [_line(key, finding) for key, finding in self._known.items()]
        fresh = self._file.with_name(f"{self._file.name}.new")
        fresh.write_text("".join([json.dumps({"programs": self._programs}) + "\n", *lines]), "utf-8")
        fresh.replace(self._file)


def _key(check: Check) -> _Key:
    return check.id, check.args


def _line(key: _Key, finding: Finding) -> str:
    return json.dumps({"args": key[1], "finding": plain(finding)}) + "\n"


def _read(file: Path, programs: str) -> Iterator[tuple[_Key, Finding]]:
    try:
        first, *rest = file.read_text("utf-8", "replace").splitlines() or [""]
    except FileNotFoundError:
        return
    if first != json.dumps({"programs": programs}):
        return
    for line in rest:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry: dict[str, Any] = json.loads(line)
            fields = {**entry["finding"], "outcome": CheckOutcome(entry["finding"]["outcome"])}
            found = Finding(**fields)
            if found.outcome is not CheckOutcome.FAILED:
                yield (found.id, tuple(entry["args"])), found

"""Print the result of verify: a summary that people read in ten seconds, and all details for scripts."""

import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvtool.console import Console
from kvtool.errors import KvtoolError, VerifyError
from kvtool.result import CheckOutcome, Result
from kvtool.verify.checks import Finding, class_rank


@dataclass(frozen=True)
class Tally:
    """Count the kv-check runs of one memory class.

    same: the number of runs with equal results
    grown: the number of runs with equal results in which the cache really grew
    """

    runs: int
    same: int
    grown: int
    not_run: int
    failed: int


@dataclass(frozen=True)
class ClassRow:
    """Hold one memory class (the kind of llama.cpp's cache): its number of models, and its runs by variant."""

    memory_class: str
    models: int
    variants: dict[Any, Tally]


def is_model_run(finding: Finding) -> bool:
    """Return True if the finding is about kv-check on one model, and not about all models together."""
    return finding.kind in ("kv-check", "retype") and finding.id.count("/") >= 2


def tally(findings: Sequence[Finding]) -> Tally:
    """Count findings by their outcome."""
    of = Counter(f.outcome for f in findings)
    grown = sum(f.grown for f in findings if f.outcome is CheckOutcome.PASSED)
    return Tally(len(findings), of[CheckOutcome.PASSED], grown, of[CheckOutcome.SKIPPED], of[CheckOutcome.FAILED])


def variant_of(found: Finding) -> str:
    """Return how kv-check ran a model, for example "fa-on" for flash attention."""
    return found.id.split("/", 2)[2]


def class_rows(findings: Iterable[Finding], variant: Callable[[Finding], Any] = variant_of) -> tuple[ClassRow, ...]:
    """Group the findings of kv-check by memory class and by variant."""
    by_class: dict[str, dict[Any, list[Finding]]] = defaultdict(lambda: defaultdict(list))
    for found in filter(is_model_run, findings):
        by_class[found.group][variant(found)].append(found)
    rows = []
    for name in sorted(by_class, key=class_rank):
        models = {f.model for runs in by_class[name].values() for f in runs}
        rows.append(ClassRow(name, len(models), {key: tally(runs) for key, runs in by_class[name].items()}))
    return tuple(rows)


@dataclass(frozen=True)
class Verified(Result, command="verify"):
    """Hold all results of verify.

    mode: "quick", "full" or "matrix"; the id of the patch is added if only the tests of one patch ran
    seconds: the duration of the whole command, including the build
    error: the reason why a report could not be written to its file
    """

    tag: str
    mode: str
    bin_dir: Path
    classes: tuple[ClassRow, ...]
    findings: tuple[Finding, ...]
    junit: Path | None
    seconds: float

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Return the findings that failed."""
        return tuple(f for f in self.findings if f.outcome is CheckOutcome.FAILED)

    @property
    def failure(self) -> KvtoolError | None:
        every = len(self.findings)
        if wrong := self.failed:
            first = wrong[0]
            alone = re.fullmatch("kv-check/[^/]+/fa-(on|off)(/quick)?", first.id)
            again = f"kvtool verify --models {first.model} --json" if alone else "the same command with --json"
            return VerifyError(
                f"{len(wrong)} of {every} checks failed",
                why=f"{first.id}: {first.reason}",
                next_step=f"{again} (its details end with the program's log)",
            )
        if any(f.outcome is CheckOutcome.PASSED for f in self.findings):
            return self.error
        none = "there was nothing to check"
        why = f"none of {every} checks could be done: {self.findings[0].reason}" if every else none
        next_step = "kvtool verify --quick, which chooses models that a static cache can run"
        return VerifyError("nothing was compared", why=why, next_step=next_step)

    def render(self, console: Console) -> None:
        if self.classes:
            _render_classes(console, self.classes)
        if others := [f for f in self.findings if not is_model_run(f)]:
            console.line()
            result = {CheckOutcome.PASSED: "ok"}
            rows = [(f.id, result.get(f.outcome, f.status), f.reason, f"{f.seconds:.0f}") for f in others]
            console.table(("check", "result", "details", ">s"), rows)
        self._render_reasons(console)
        for found in self.failed:
            console.line(f"FAILED {found.id}: {found.status}: {found.reason}", style="red")
        total = tally(self.findings)
        verdict = "dynamic equals static" if total.same else "nothing"
        verdict = f"{total.failed} checks failed" if total.failed else verdict
        said = f"{verdict}: {total.same} checks passed, {total.not_run} not possible, {self.seconds:.0f} s"
        console.line()
        style = "bold green" if self.failure is None else "bold red"
        console.line(f"llama.cpp {self.tag}, {self.mode}: {said}", style=style)

    def _render_reasons(self, console: Console) -> None:
        """Print which models did not grow or could not run, and why."""
        by_reason: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in filter(is_model_run, self.findings):
            if found.outcome is not CheckOutcome.FAILED and not found.grown:
                by_reason[found.status, found.reason].add(found.model)
        if by_reason:
            console.line()
        for (status, reason), models in sorted(by_reason.items()):
            console.line(f"{status} ({len(models)}): {', '.join(sorted(models))}: {reason}", style="dim")


def _render_classes(console: Console, rows: Sequence[ClassRow]) -> None:
    columns = ("memory class", ">models", ">runs", ">same", ">grew", ">not possible", ">FAILED")
    body = [(row.models, *map(sum, zip(*map(astuple, row.variants.values()), strict=True))) for row in rows]
    total = tuple(map(sum, zip(*body, strict=True)))
    named = [(row.memory_class, *numbers) for row, numbers in zip(rows, body, strict=True)]
    # leave zeros out, so that the other numbers are easy to see
    console.table(columns, [[cell or "" for cell in line] for line in (*named, ("all", *total))])


# --- for CI systems ----------------------------------------------------------------------------------------------

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _clean(text: str) -> str:
    """Replace characters that XML 1.0 does not allow. The output of a model may contain any character."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def as_junit(findings: Iterable[Finding]) -> str:
    """Return a JUnit report, which CI systems read: a suite for each kind of check, a case for each check."""
    root = ET.Element("testsuites", name="kvtool verify")
    for kind, group in groupby(findings, key=lambda f: f.kind):
        cases = list(group)
        of = tally(cases)
        counts = {"tests": of.runs, "errors": 0, "failures": of.failed, "skipped": of.not_run}
        took = f"{sum(case.seconds for case in cases):.3f}"
        suite = ET.SubElement(root, "testsuite", {k: str(v) for k, v in counts.items()}, name=kind, time=took)
        for case in cases:
            named = {"classname": f"verify.{kind}", "name": _clean(case.id), "time": f"{case.seconds:.3f}"}
            element = ET.SubElement(suite, "testcase", named)
            if case.outcome is CheckOutcome.FAILED:
                body = ET.SubElement(element, "failure", type=case.status, message=_clean(case.reason))
                body.text = _clean(str(case.details.get("log", "")))
            elif case.outcome is CheckOutcome.SKIPPED:
                ET.SubElement(element, "skipped", message=_clean(f"{case.status}: {case.reason}"))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

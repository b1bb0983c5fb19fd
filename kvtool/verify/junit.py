"""Findings as a JUnit report, the format that CI systems read."""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from kvtool.result import CheckOutcome
from kvtool.verify.checks import Finding

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _clean(text: str) -> str:
    """Without what XML 1.0 cannot hold: a model may say anything."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def report(findings: Iterable[Finding]) -> str:
    """One test suite per kind of check, one test case per check, in their order."""
    root = ET.Element("testsuites", name="kvtool verify")
    for kind, group in groupby(findings, key=lambda f: f.kind):
        cases = list(group)
        outcomes = Counter(case.outcome for case in cases)
        suite = ET.SubElement(root, "testsuite", name=kind, tests=str(len(cases)), errors="0")
        suite.set("failures", str(outcomes[CheckOutcome.FAILED]))
        suite.set("skipped", str(outcomes[CheckOutcome.SKIPPED]))
        suite.set("time", f"{sum(case.seconds for case in cases):.3f}")
        for case in cases:
            element = ET.SubElement(suite, "testcase", classname=f"verify.{kind}", name=_clean(case.id))
            element.set("time", f"{case.seconds:.3f}")
            if case.outcome is CheckOutcome.FAILED:
                body = ET.SubElement(element, "failure", type=case.status, message=_clean(case.reason))
                body.text = _clean(str(case.details.get("log", "")))
            elif case.outcome is CheckOutcome.SKIPPED:
                ET.SubElement(element, "skipped", message=_clean(f"{case.status}: {case.reason}"))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def write_junit(path: Path, findings: Iterable[Finding]) -> None:
    """Write the report, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(findings), "utf-8")

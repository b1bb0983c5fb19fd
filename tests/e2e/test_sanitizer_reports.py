"""Test that kv-check fails if a sanitizer reports something on either side, or the same on both sides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SANITIZED, Real

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or SANITIZED,  # the library of a sanitizer must be loaded first
    reason="the report is made by a preloaded library",
)

REPORT = "cache.cpp:1:2: runtime error: it is undefined"
# the file for reports that do not end the process; the dynamic side is the second to end
SOURCE = """
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
static int sides(void) {
    FILE * file = fopen(getenv("REPORT_LOG"), "a+");
    fputs("x", file);
    int n = (int) ftell(file);
    fclose(file);
    return n;
}
__attribute__((destructor)) static void report(void) {
    if (strchr(getenv("REPORT_SIDES"), '0' + sides())) {
        fputs("%s\\n", stderr);
    }
}
"""


@pytest.fixture(scope="module")
def reporting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler
    work = tmp_path_factory.mktemp("reporting")
    (work / "report.c").write_text(SOURCE % REPORT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", work / "report.so", work / "report.c"], check=True)
    return work / "report.so"


@pytest.mark.parametrize(
    ("sides", "status", "whose"),
    [
        ("", "same", ""),
        ("1", "differs", "exit: on the static side: sanitizer: "),
        ("2", "dynamic-fails", "exit: sanitizer: "),
        ("12", "differs", "exit: on both sides: sanitizer: "),
    ],
)
def test_report_fails_check(real: Real, reporting: Path, tmp_path: Path, sides: str, status: str, whose: str) -> None:
    more = {"LD_PRELOAD": str(reporting), "REPORT_LOG": str(tmp_path / "ended"), "REPORT_SIDES": sides}
    argv: list[str | Path] = [
        real.bin / "kv-check",
        "-m",
        real.toys / "llama-dense.gguf",
        "--quick",
        "--checks",
        "prompt",
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["status"], answer["reason"]) == (status, whose + REPORT if whose else "")
    assert (done.returncode == 0) == (status == "same")

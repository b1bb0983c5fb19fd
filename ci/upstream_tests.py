"""Upstream's own tests: on upstream's tree, on the patched one, and there with --kv-dynamic for all of them.

    python ci/upstream_tests.py UNPATCHED_BUILD PATCHED_BUILD [--only REGEX] [--model FILE]... [--junit DIR]

Both are build directories of the same tag with the tests built (LLAMA_BUILD_TESTS=ON). What ctest knows and what was
built is run; tests that would download something are left out. With --model (toys that speak, kvtool/verify/models.py)
the tests of states and of recurrent rollback also run on these models with -c 4096, beyond the 256 positions at which
upstream's own toys end: only there does anything grow.

Prints a row per test that is not passed everywhere, and the number of the others. Exit code 1 when the patched tree
fails where the unpatched one passes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

DYNAMIC = {"LLAMA_ARG_KV_DYNAMIC": "1"}
DOWNLOADS = "download|thread-safety|model-load-cancel|autorelease|backend-sampler|eval-callback"
ON_MODELS = ("test-save-load-state", "test-state-restore-fragmented", "test-recurrent-state-rollback")
COLUMNS = ("unpatched", "patched", "--kv-dynamic")
TIMEOUT = 900  # seconds for one test


def by_ctest(build: Path, env: Mapping[str, str], only: str, report: Path) -> dict[str, str]:
    """Name and outcome (ok, FAILED, not built, not run) of every test of a build directory."""
    leave_out = f"{DOWNLOADS}|test-state-restore-fragmented"
    argv: list[str | Path] = [
        "ctest",
        "--test-dir",
        build,
        "--output-junit",
        report,
        "--timeout",
        str(TIMEOUT),
        "-E",
        leave_out,
    ]
    subprocess.run([*argv, "-R", only], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = {"run": "ok", "fail": "FAILED", "notrun": "not run", "disabled": "not run"}
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = words.get(case.get("status", ""), "not run")
        unable = "Unable to find executable" in "".join(case.itertext())
        outcomes[case.get("name", "")] = "not built" if unable else outcome
    return outcomes


def on_model(build: Path, env: Mapping[str, str], test: str, model: Path) -> str:
    """One of the state tests on one model."""
    program = build / "bin" / test
    if not program.is_file():
        return "not built"
    argv: list[str | Path] = [program, "-m", model, "-c", "4096", "-t", "1"]
    try:
        done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "FAILED"
    return "ok" if done.returncode == 0 else "FAILED"


def column(build: Path, env: Mapping[str, str], only: str, models: Sequence[Path], report: Path) -> dict[str, str]:
    outcomes = by_ctest(build, env, only, report)
    for model in models:
        for test in ON_MODELS:
            if re.search(only, test):
                outcomes[f"{test} -c 4096, {model.stem}"] = on_model(build, env, test, model)
    return outcomes


def show(columns: Sequence[Mapping[str, str]]) -> int:
    """Print the rows that matter. Returns how many tests only the patched tree fails."""
    names = sorted(set().union(*columns))
    rows = [(name, *(outcomes.get(name, "not there") for outcomes in columns)) for name in names]
    print("| test | " + " | ".join(COLUMNS) + " |\n|---|---|---|---|")
    for row in rows:
        if set(row[1:]) != {"ok"}:
            print("| " + " | ".join(row) + " |")
    print(f"\n{sum(set(row[1:]) == {'ok'} for row in rows)} of {len(rows)} tests pass in all three columns.")
    return sum(row[1] == "ok" and "FAILED" in row[2:] for row in rows)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpatched", type=Path, help="build directory of upstream's tree")
    parser.add_argument("patched", type=Path, help="build directory of the patched tree")
    parser.add_argument("--only", default=".", help="tests whose name matches")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model for the tests of states")
    parser.add_argument("--junit", type=Path, help="keep ctest's reports here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        reports = (args.junit or Path(scratch)).absolute()
        reports.mkdir(parents=True, exist_ok=True)
        builds = (args.unpatched, args.patched, args.patched)
        columns = [
            column(build.absolute(), env, args.only, args.model, reports / f"{name.lstrip('-')}.xml")
            for name, build, env in zip(COLUMNS, builds, ({}, {}, DYNAMIC), strict=True)
        ]
    return 1 if show(columns) else 0


if __name__ == "__main__":
    sys.exit(main())

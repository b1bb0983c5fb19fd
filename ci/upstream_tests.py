"""Run upstream's own tests: on upstream's tree, on the patched one, and on the patched one with --kv-dynamic for all.

    python ci/upstream_tests.py UNPATCHED_BUILD PATCHED_BUILD [--only REGEX] [--model FILE]... [--server-tests DIR]

Both are build directories of the same tag with the tests built (LLAMA_BUILD_TESTS=ON). The script runs all tests of
ctest that were built, except tests that would download a file. With --model (toys with a vocabulary,
kvtool/verify/models.py), the tests of states and of recurrent rollback also run on these models; test-save-load-state
uses a prompt of 600 tokens, so that the cache has to grow. Upstream's own toys end at 256 positions, the size of a
cache before its first growth, and most of ctest's tests do not read --kv-dynamic's variable: for them, the third column
repeats the second. With --server-tests (upstream's tools/server/tests, whose requirements.txt must be installed), the
server's tests run as well, with the first model instead of downloads (ci/offline_server_models.py).

Prints a row per test that does not pass everywhere, and the number of the others. Exit code 1 if a test that passes on
the unpatched tree fails or is missing on the patched one.
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
# Settings that make a test need more than the first 256 cells: the batch has the length of its prompt, and the log
# level info shows the growth. The other two tests use fewer cells with any settings.
BEYOND = {"test-save-load-state": ("-c", "4096", "-b", "600", "-lv", "4")}
COLUMNS = ("unpatched", "patched", "--kv-dynamic")
TIMEOUT = 900  # seconds for one test
UNSTEADY = re.compile(r"0x[0-9a-f]+|\d+\.\d+")  # addresses and times in a message
WIDTH = 160  # characters of how a test failed


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
    report.unlink(missing_ok=True)  # an old one is not this run's
    subprocess.run([*argv, "-R", only], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = {"run": "ok", "fail": "FAILED", "notrun": "not run", "disabled": "not run"}
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = words.get(case.get("status", ""), "not run")
        unable = "Unable to find executable" in "".join(case.itertext())
        outcomes[case.get("name", "")] = "not built" if unable else outcome
    return outcomes


def on_model(build: Path, env: Mapping[str, str], test: str, model: Path) -> str:
    """Run one of the state tests on one model."""
    program = build / "bin" / test
    if not program.is_file():
        return "not built"
    argv: list[str | Path] = [program, "-m", model, *BEYOND.get(test, ()), "-t", "1"]
    with tempfile.TemporaryDirectory() as scratch:  # some leave a state file where they are
        try:
            done = subprocess.run(argv, env={**os.environ, **env}, cwd=scratch, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return "FAILED: timeout"
    if done.returncode != 0:
        return f"FAILED: exit code {done.returncode}"
    if env and test in BEYOND and b"resizing KV cache" not in done.stdout + done.stderr:
        return "FAILED: nothing grew"
    return "ok"


def of_server(build: Path, env: Mapping[str, str], tests: Path, model: Path, report: Path) -> dict[str, str]:
    """Return name and outcome of every server test, which upstream runs with pytest, and the text of failures."""
    more = {
        "LLAMA_SERVER_BIN_PATH": str(build / "bin" / "llama-server"),
        "KVTOOL_SERVER_MODEL": str(model.absolute()),
        "PYTHONPATH": str(Path(__file__).parent.absolute()),
    }
    argv: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-p", "offline_server_models"]
    argv.append(f"--junitxml={report}")
    report.unlink(missing_ok=True)
    done = subprocess.run(argv, cwd=tests, env={**os.environ, **env, **more}, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # 1: tests failed
        raise SystemExit(f"pytest ended with exit code {done.returncode} in {tests}")
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        failure = next((found for what in ("failure", "error") if (found := case.find(what)) is not None), None)
        outcome = "not run" if case.find("skipped") is not None else "ok"
        if failure is not None:
            outcome = f"FAILED: {UNSTEADY.sub('#', ' '.join(failure.get('message', '').split()))}"
        outcomes[f"server: {case.get('classname', '').removeprefix('unit.')}::{case.get('name')}"] = outcome
    return outcomes


def column(build: Path, env: Mapping[str, str], args: argparse.Namespace, reports: Path, name: str) -> dict[str, str]:
    outcomes = by_ctest(build, env, args.only, reports / f"{name}.xml")
    for model in args.model:
        for test in ON_MODELS:
            if re.search(args.only, test):
                words = " ".join((test, *BEYOND.get(test, ())))
                outcomes[f"{words}, {model.stem.rpartition('-')[0]}"] = on_model(build, env, test, model.absolute())
    if args.server_tests is not None:
        outcomes |= of_server(build, env, args.server_tests, args.model[0], reports / f"{name}-server.xml")
    return outcomes


def show(columns: Sequence[Mapping[str, str]]) -> int:
    """Print the rows that matter. Returns how many tests only the patched tree fails."""
    names = sorted(set().union(*columns))
    rows = [(name, *(outcomes.get(name, "not there") for outcomes in columns)) for name in names]
    print("| test | " + " | ".join(COLUMNS) + " |\n|---|---|---|---|")
    passed = left_out = 0
    for name, *outcomes in rows:
        passed += set(outcomes) == {"ok"}
        left_out += set(outcomes) == {"not run"}
        if set(outcomes) not in ({"ok"}, {"not run"}) and outcomes != ["not there", "ok", "ok"]:
            # how it fails is worth a word only where that differs: then the cache may have a part in it
            alike = len(set(outcomes)) == 1
            words = [outcome.partition(":")[0] if alike else outcome[:WIDTH] for outcome in outcomes]
            print("| " + " | ".join([name, *words]).replace("\n", " ") + " |")
    print(f"\n{passed} of {len(rows)} tests pass in all three columns, {left_out} run in none.")
    # include missing tests, and our own tests that fail
    return sum(
        any(outcome != row[1] and (row[1] == "ok" or outcome.startswith("FAILED")) for outcome in row[2:])
        and not all(outcome.startswith("FAILED") for outcome in row[1:])
        for row in rows
    )


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpatched", type=Path, help="build directory of upstream's tree")
    parser.add_argument("patched", type=Path, help="build directory of the patched tree")
    parser.add_argument("--only", default=".", help="tests whose name matches")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model for the tests of states")
    parser.add_argument("--junit", type=Path, help="keep ctest's reports here")
    parser.add_argument("--server-tests", type=Path, help="upstream's tools/server/tests; needs a --model")
    args = parser.parse_args()
    if args.server_tests is not None and not args.model:
        parser.error("--server-tests needs a --model")
    with tempfile.TemporaryDirectory() as scratch:
        reports = (args.junit or Path(scratch)).absolute()
        reports.mkdir(parents=True, exist_ok=True)
        builds = (args.unpatched, args.patched, args.patched)
        columns = [
            column(build.absolute(), env, args, reports, name.lstrip("-"))
            for name, build, env in zip(COLUMNS, builds, ({}, {}, DYNAMIC), strict=True)
        ]
    return 1 if show(columns) else 0


if __name__ == "__main__":
    sys.exit(main())

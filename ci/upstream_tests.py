"""Run upstream's own tests without the patches, with the patches, and with --kv-dynamic for all contexts.

    python ci/upstream_tests.py UNPATCHED_BUILD PATCHED_BUILD [--only REGEX] [--model FILE]... [--server-tests DIR]

All tests run three times, and each run is a column of the printed table. `unpatched` is upstream's tree. `patched` is
the patched tree. `--kv-dynamic` is the patched tree with LLAMA_ARG_KV_DYNAMIC=1, which sets --kv-dynamic for all
contexts of each program that reads this variable. Both builds must be of the same tag, and must contain the tests
(LLAMA_BUILD_TESTS=ON). The script runs all tests of ctest that were built, except the tests that would download a file.

With --model, the tests of states and of recurrent rollback also run on these models, which are test models with a
vocabulary (kvtool/verify/models.py). test-save-load-state then has a prompt of 600 tokens, so that the cache has to
grow. Upstream's own test models end at 256 positions, which is the size of a cache before its first growth. Most tests
of ctest do not read LLAMA_ARG_KV_DYNAMIC, so their results in the columns `patched` and `--kv-dynamic` are equal.

With --server-tests (upstream's tools/server/tests, whose requirements.txt must be installed), the tests of the server
also run. They use the first model instead of downloads (ci/offline_server_models.py).

Prints a row for each test that does not pass everywhere, and the number of the other tests. The exit code is 1 if a
test that passes on the unpatched tree fails or is missing on the patched tree.
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
# Settings with which a test needs more than the first 256 cells. The batch is as long as the prompt, and the log level
# "info" prints the growth. The other two tests use fewer cells with any settings.
BEYOND = {"test-save-load-state": ("-c", "4096", "-b", "600", "-lv", "4")}
COLUMNS = ("unpatched", "patched", "--kv-dynamic")
TIMEOUT = 900  # seconds for one test
UNSTEADY = re.compile(r"0x[0-9a-f]+|\d+\.\d+")  # addresses and times in a message, which differ in each run
WIDTH = 160  # most characters of a failure that are printed


def by_ctest(build: Path, env: Mapping[str, str], only: str, report: Path) -> dict[str, str]:
    """Return the name and the outcome (ok, FAILED, not built, not run) of every test of a build."""
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
    report.unlink(missing_ok=True)  # remove the report of an earlier run
    subprocess.run([*argv, "-R", only], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = {"run": "ok", "fail": "FAILED", "notrun": "not run", "disabled": "not run"}
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = words.get(case.get("status", ""), "not run")
        unable = "Unable to find executable" in "".join(case.itertext())
        outcomes[case.get("name", "")] = "not built" if unable else outcome
    return outcomes


def on_model(build: Path, env: Mapping[str, str], test: str, model: Path) -> str:
    """Run one of the tests of states on one model, and return the outcome."""
    program = build / "bin" / test
    if not program.is_file():
        return "not built"
    argv: list[str | Path] = [program, "-m", model, *BEYOND.get(test, ()), "-t", "1"]
    with tempfile.TemporaryDirectory() as scratch:  # some tests leave a state file in the current folder
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
    """Return the name and the outcome of every test of the server, with the text of a failure.

    Upstream runs these with pytest.
    """
    more = {
        "LLAMA_SERVER_BIN_PATH": str(build / "bin" / "llama-server"),
        "KVTOOL_SERVER_MODEL": str(model.absolute()),
        "PYTHONPATH": str(Path(__file__).parent.absolute()),
    }
    argv: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-p", "offline_server_models"]
    argv.append(f"--junitxml={report}")
    report.unlink(missing_ok=True)
    done = subprocess.run(argv, cwd=tests, env={**os.environ, **env, **more}, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # exit code 1 only means that tests failed
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
    """Print the tests that do not pass everywhere. Return the number of tests that fail only on the patched tree."""
    names = sorted(set().union(*columns))
    rows = [(name, *(outcomes.get(name, "not there") for outcomes in columns)) for name in names]
    print("| test | " + " | ".join(COLUMNS) + " |\n|---|---|---|---|")
    passed = left_out = 0
    for name, *outcomes in rows:
        passed += set(outcomes) == {"ok"}
        left_out += set(outcomes) == {"not run"}
        if set(outcomes) not in ({"ok"}, {"not run"}) and outcomes != ["not there", "ok", "ok"]:
            # print how a test fails only if that differs between the columns, because then the cache may be the reason
            alike = len(set(outcomes)) == 1
            words = [outcome.partition(":")[0] if alike else outcome[:WIDTH] for outcome in outcomes]
            print("| " + " | ".join([name, *words]).replace("\n", " ") + " |")
    print(f"\n{passed} of {len(rows)} tests pass in all three columns, {left_out} run in none.")
    # count tests that are missing, and also tests of this project that fail
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

"""Test that the Makefile, ci/ and the workflows agree, and that they report their failures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fakes

ROOT = Path(__file__).resolve().parents[2]
NEW_TREE = "b" * 40

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")


def run(*argv: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True)


def test_workflows_call_local_commands() -> None:
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert {file.stem for file in files} == {"action", "ci", "nightly", "release"}
    commands = [command for file in files for command in re.findall(r"run: (.+)", file.read_text())]
    for command in commands:
        script = re.match(r"bash (\S+)", command)
        assert script, command
        assert (ROOT / script[1]).is_file(), command


def test_nightly_jobs_are_known() -> None:
    jobs = re.search(r"what: \[(.+)\]", (ROOT / ".github/workflows/nightly.yml").read_text())
    assert jobs
    script = (ROOT / "ci" / "nightly.sh").read_text()
    known = {name for case in re.findall(r"^([a-z |-]+)\)", script, re.MULTILINE) for name in case.split(" | ")}
    assert set(jobs[1].split(", ")) == known


def test_suite_limits_parallel_e2e_files() -> None:
    runs = re.findall(r"^ *(?:pytest|ctest) .*", (ROOT / "ci" / "suite.sh").read_text(), re.MULTILINE)
    words = ("tests/e2e", "--numprocesses", "--maxprocesses 2 --dist loadfile", "ctest")
    assert [tuple(word in run for word in words) for run in runs] == [
        (False, True, False, False),
        (True, True, True, False),
        (False, False, False, True),
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_verify_matches_main_job() -> None:
    def verbs(*options: str) -> list[str]:
        said = run("make", "-n", "-o", ".venv", "verify", *options).stdout
        return [words.strip() for words in re.findall(r"^\.venv/bin/kvtool ([^;\n]+)", said, re.MULTILINE)]

    model = "fetch --model smollm2 --quiet"
    assert verbs() == ["doctor", "fetch", "apply", "build --cpu --no-ui", "verify --cpu --quick", model]
    metal = ["doctor --metal", "fetch", "apply", "build --metal --no-ui", "verify --metal", model]
    assert verbs("BACKEND=metal", "FULL=1") == metal
    assert "FULL=1" in run("make", "-n", "-o", ".venv", "verify").stdout, "it prints how to run everything"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_names_every_target() -> None:
    listed = set(re.findall(r"^  make (\w+)", run("make", "help").stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony and listed == set(phony[1].split())


def copy_of_setup(tmp_path: Path) -> Path:
    (tmp_path / "ci").mkdir()
    return Path(shutil.copy(ROOT / "ci" / "setup.sh", tmp_path / "ci"))


def test_setup_refuses_old_python(tmp_path: Path) -> None:
    script = copy_of_setup(tmp_path)
    old = tmp_path / "bin" / "python3"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho Python 3.9.1\nexit 1\n")
    old.chmod(0o755)
    (old.parent / "dirname").symlink_to(shutil.which("dirname") or "")
    done = run("/bin/sh", script, env={"PATH": str(old.parent)})
    assert done.returncode == 7
    assert "no Python 3.11 or newer found (python3: Python 3.9.1)" in done.stderr
    assert "sudo apt-get install python3" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_uses_given_python_only(tmp_path: Path) -> None:
    done = run("/bin/sh", copy_of_setup(tmp_path), env={"PATH": "/usr/bin:/bin", "PYTHON": "/no/python"})
    assert done.returncode == 7
    assert "/no/python" in done.stderr


def test_setup_keeps_linked_environment(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    copy_of_setup(tmp_path / "real")
    made = tmp_path / "real" / ".venv" / "bin"
    made.mkdir(parents=True)
    # the path with links resolved, as Python sees it
    (made / "activate").write_text(f"VIRTUAL_ENV={(tmp_path / 'real').resolve()}/.venv\n")
    (made / "python").write_text("#!/bin/sh\n")
    (made / "python").chmod(0o755)
    (tmp_path / "link").symlink_to("real")
    done = run("/bin/sh", "ci/setup.sh", cwd=tmp_path / "link", env={**os.environ, "PWD": str(tmp_path / "link")})
    assert (done.returncode, done.stdout) == (0, "installing kvtool into .venv\n"), done


# --- the GPU script -----------------------------------------------------------------------------------------------


def gpu(tmp_path: Path, programs: dict[str, str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run ci/gpu.sh in a tree of its own, without a GPU.

    programs: the shell code of each program of the build
    """
    (tmp_path / "ci").mkdir(exist_ok=True)
    toys = tmp_path / "llama.cpp" / "build" / "gpu" / "toys"
    toys.mkdir(parents=True, exist_ok=True)
    for file in (toys / "llama-dense.gguf", tmp_path / "llama.cpp" / "CMakeLists.txt"):
        file.touch()
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, does in {"nvidia-smi": "exit 9", **programs}.items():
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    settings = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OUT": str(tmp_path / "out"), **env}
    return run("bash", Path(shutil.copy(ROOT / "ci" / "gpu.sh", tmp_path / "ci")), env=settings, cwd=tmp_path)


def test_gpu_script_without_gpu(tmp_path: Path) -> None:
    done = gpu(tmp_path, {})
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("NOT RUN: everything, because there is no GPU here")


def test_gpu_steps_save_results_once(tmp_path: Path) -> None:
    count = f"echo x >>{tmp_path}/calls; "
    fine = count + """echo noise; echo '{"status": "same", "storage": "in place"}'"""
    build = {"BIN": str(tmp_path / "bin"), "DEVICE": "CPU"}
    done = gpu(tmp_path, {"test-kv-device": count + "echo lost; exit 7", "kv-check": fine}, **build)
    assert done.returncode == 1, done.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == "pages"
    answer = {"status": "same", "storage": "in place"}
    by_copy = ("check-llama-dense-copy", "fa-off-llama-dense-copy")
    in_place = (f"{what}-llama-dense-inplace" for what in ("check", "q8", "retype", "streams", "iq4-k", "quick"))
    assert {row["step"]: (row["rc"], row["answer"]) for row in rows} == {
        "pages": (7, None),
        **dict.fromkeys(in_place, (0, answer)),
        # both ran, but grew in another way than they should; then a static cache is compared with itself
        **dict.fromkeys(by_copy, ("lacks", answer)),
        **dict.fromkeys((f"self-{name}" for name in by_copy), (0, answer)),
    }
    assert "FAILED pages: lost" in (tmp_path / "out" / "summary.txt").read_text()
    assert "pages: exit code 7" in (tmp_path / "out" / "failed.log").read_text()
    assert "NOT RUN: bench, because" in done.stdout
    assert "NOT RUN: qwen35-dense, because" in done.stdout
    assert gpu(tmp_path, {}, **build).returncode == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == len(rows)


# --- one issue per breakage ---------------------------------------------------------------------------------------

KEY = "0123456789abcdef"
GH = """
import json, os, sys
log = os.environ["GH_LOG"]
with open(log, "a") as file:
    file.write(json.dumps([*sys.argv[1:], sys.stdin.read() if "--body-file" in sys.argv else ""]) + "\\n")
if os.environ.get("GH_FAILS"):
    sys.exit("gh: not logged in")
print(os.environ.get("GH_ISSUES", "[]") if "list" in sys.argv else "https://example.invalid/issues/7")
"""


def canary_report(tmp_path: Path, key: str = KEY, code: str = "conflict") -> Path:
    report = {
        "tag": "b100",
        "tree": NEW_TREE,
        "locked": "v1",
        "key": key,
        "steps": [
            {"name": "fetch", "outcome": "passed", "summary": "", "log": ""},
            {"name": "rebase", "outcome": "failed", "summary": "no place", "log": "the log"},
        ],
        "breakages": [{"step": "rebase", "patch": "flag", "file": "src/b.h", "where": "f", "what": "src/b.h hunk 1"}],
        "error": {"code": code, "next": "kvtool rebase b100"},
    }
    if not key:
        report |= {"breakages": []}
        del report["error"]
    path = tmp_path / "canary.json"
    path.write_text(json.dumps(report))
    return path


def issue(tmp_path: Path, report: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run ci/issue.py with an imitated gh. Return the result and the calls of gh, each with its stdin at the end."""
    folder, log = tmp_path / "bin", tmp_path / "gh.log"
    folder.mkdir(exist_ok=True)
    fakes.program(folder / "gh", GH)
    log.write_text("")
    settings = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "GH_LOG": str(log), **env}
    done = run(sys.executable, ROOT / "ci" / "issue.py", report, env=settings)
    return done, [json.loads(line) for line in log.read_text().splitlines()]


def test_new_breakage_opens_issue(tmp_path: Path) -> None:
    done, calls = issue(tmp_path, canary_report(tmp_path))
    assert done.returncode == 0 and "issues/7" in done.stdout, done.stderr
    assert [call[:2] for call in calls] == [["issue", "list"], ["issue", "create"]]
    title, text = calls[1][3], calls[1][-1]
    assert title == "canary: rebase: flag on llama.cpp b100"
    assert f"kvtool-canary-key: {KEY}" in text and "the log" in text and "`kvtool rebase b100`" in text


def test_known_breakage_opens_no_issue(tmp_path: Path) -> None:
    mine = json.dumps([{"number": 3, "body": f"x\nkvtool-canary-key: {KEY}\n"}])
    done, calls = issue(tmp_path, canary_report(tmp_path), GH_ISSUES=mine)
    assert "issue #3" in done.stdout and [call[1] for call in calls] == ["list"]
    other = json.dumps([{"number": 3, "body": "kvtool-canary-key: feedfeedfeedfeed"}])
    assert [call[1] for call in issue(tmp_path, canary_report(tmp_path), GH_ISSUES=other)[1]] == ["list", "create"]


@pytest.mark.parametrize(("key", "code"), [("", "conflict"), (KEY, "network"), (KEY, "missing_tool")])
def test_machine_failure_opens_no_issue(tmp_path: Path, key: str, code: str) -> None:
    done, calls = issue(tmp_path, canary_report(tmp_path, key, code))
    assert (done.returncode, calls) == (0, [])


def test_gh_failure_is_error(tmp_path: Path) -> None:
    done, _ = issue(tmp_path, canary_report(tmp_path), GH_FAILS="1")
    assert done.returncode != 0 and "not logged in" in done.stderr


def load_ci_script(name: str) -> Any:
    """Import a script of ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_bits_unlike_upstream_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    bits = load_ci_script("upstream_bits")
    theirs = bits.Said(("prompt 0 1", "copy 0 2"), 0)
    same, off = theirs._replace(grew=True), bits.Said(("prompt 0 1", "copy 0 3"), 0, True)
    short, ended = bits.Said(("prompt 0 1",), 0, True), bits.Said(("prompt 0 1",), -6)

    def row(upstream: Any, ours: Any) -> Any:
        return bits.Row("toy", ("fa",), upstream, {"without the flag": upstream, "in place": same, "by copy": ours})

    found = [row(theirs, same), row(theirs, off), row(theirs, short), row(theirs, ended), row(ended, off)]
    assert [bits.Row.difference(each, "by copy") for each in found] == [
        "",
        "'copy 0 3' instead of 'copy 0 2'",
        "'exit code 0' instead of 'copy 0 2'",
        "'exit code -6' instead of 'copy 0 2'",
        "",  # upstream prints no more than this
    ]
    assert bits.show(found) == 1 and bits.show(found[:1]) == 0
    assert bits.show([row(theirs, theirs)]) == 2  # equal, but the cache never grew by copy
    assert "| fa | 5 | 5, 0 | 5, 5 | 2, 4 | 1 |" in capsys.readouterr().out


def test_new_upstream_test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_ci_script("upstream_tests")
    unpatched = {"same": "ok", "lost": "ok", "gone": "ok", "broken": "ok", "bad": "FAILED: 1", "out": "not run"}
    patched = {
        **unpatched,
        "lost": "not run",
        "broken": "FAILED: 2",
        "bad": "FAILED: 3",
        "ours": "ok",
        "new": "FAILED: 4",
    }
    del patched["gone"]
    assert script.show([unpatched, patched, patched]) == 4  # the tests "lost", "gone", "broken" and "new"
    out = capsys.readouterr().out
    assert "| bad | FAILED: 1 | FAILED: 3 | FAILED: 3 |" in out  # the messages differ, so they are printed
    assert "| ours |" not in out
    assert "1 of 8 tests pass in all three columns, 1 run in none" in out

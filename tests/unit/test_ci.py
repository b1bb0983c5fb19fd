"""The Makefile, ci/ and the workflow: they agree with each other, and what goes wrong is said."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD_TREE, NEW_TREE = "a" * 40, "b" * 40

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shell scripts")


def run(*argv: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_workflow_only_calls_what_a_person_can_run() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    commands = re.findall(r"run: (.+)", text)
    assert len(commands) == 3
    for command in commands:
        script = re.fullmatch(r"bash (\S+)|make (\w+).*", command)
        assert script, command
        if script[1]:
            assert (ROOT / script[1]).is_file(), command
        else:
            assert re.search(rf"^{script[2]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_verify_is_the_main_job_in_order() -> None:
    done = run("make", "-n", "-o", ".venv", "verify", "BACKEND=metal", "QUICK=1")
    verbs = re.findall(r"^\.venv/bin/kvtool (.+)$", done.stdout, re.MULTILINE)
    assert verbs == ["doctor", "fetch", "apply", "build --metal", "verify --metal --quick"], done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_names_every_target() -> None:
    listed = set(re.findall(r"^  make (\w+)", run("make", "help").stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony and listed == set(phony[1].split())


def copy_of_setup(tmp_path: Path) -> Path:
    (tmp_path / "ci").mkdir()
    return Path(shutil.copy(ROOT / "ci" / "setup.sh", tmp_path / "ci"))


def test_setup_with_an_old_python_says_what_to_install(tmp_path: Path) -> None:
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


def test_setup_takes_only_the_python_it_is_given(tmp_path: Path) -> None:
    done = run("/bin/sh", copy_of_setup(tmp_path), env={"PATH": "/usr/bin:/bin", "PYTHON": "/no/python"})
    assert done.returncode == 7
    assert "/no/python" in done.stderr


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "upstream.lock"
    path.write_text(
        f'current = "b1"\nremote = "r"  # kept\n\n[[upstream]]\ntag = "b1"\ndate = "2026-01-01"\ntree = "{OLD_TREE}"\n'
    )
    return path


def pin(lock: Path, tag: str, tree: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, ROOT / "ci" / "pin.py", lock, tag, tree)


def test_pin_adds_the_newest_upstream_last_and_makes_it_current(lock: Path) -> None:
    assert pin(lock, "b2", NEW_TREE).returncode == 0
    document = tomllib.loads(lock.read_text())
    assert document["current"] == "b2"
    assert [(entry["tag"], entry["tree"]) for entry in document["upstream"]] == [("b1", OLD_TREE), ("b2", NEW_TREE)]
    assert "# kept" in lock.read_text()


def test_pin_takes_a_known_tag_and_refuses_one_that_was_moved(lock: Path) -> None:
    assert pin(lock, "b1", OLD_TREE).returncode == 0
    assert len(tomllib.loads(lock.read_text())["upstream"]) == 1
    before = lock.read_text()
    moved = pin(lock, "b1", NEW_TREE)
    assert moved.returncode != 0
    assert "the tag was moved" in moved.stderr
    assert lock.read_text() == before

"""Killed at any moment: nothing is lost, and the next call works. And two at once on one tree.

The moments are chosen by a stand-in for git that kills kvtool (and itself) at its n-th call, before or after the call,
so the states that a kill between two git calls can leave are tried. A sample of them keeps the suite quick;
KILL_ALL=1 tries every one. Then each command is killed at random times, a few in the suite; KVTOOL_KILLS=N kills each N
times, KVTOOL_SEED chooses other times.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli
from tests.conftest import Tiny, git

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stands in for git with a shell script")

KILLS = int(os.environ.get("KVTOOL_KILLS", "4"))  # read here: the tests' own environment has none of kvtool's settings
SEED = int(os.environ.get("KVTOOL_SEED", "1"))

SCRIPT = """#!/bin/sh
echo >> {counter}
if [ "$(wc -l < {counter})" -eq "${{KILL_AT:-0}}" ]; then
    [ "$KILL_WHEN" = after ] && {git} "$@" > /dev/null 2>&1
    kill -KILL $PPID
    exit 137
fi
exec {git} "$@"
"""


def moments(calls: int) -> list[tuple[int, str]]:
    """At which call, and on which side of it."""
    every = [(at, when) for at in range(1, calls + 1) for when in ("before", "after")]
    return every if os.environ.get("KILL_ALL") else every[:: max(1, len(every) // 10) | 1]  # odd: both sides


class Killer:
    """Runs kvtool with a git that counts, and kills at a given call."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.counter = folder / "count"
        (folder / "git").write_text(SCRIPT.format(counter=self.counter, git=shutil.which("git")))
        (folder / "git").chmod(0o755)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def run(self, *args: str, at: int = 0, when: str = "before") -> int:
        self.counter.write_text("")
        env = {**os.environ, "PATH": self.path, "KILL_AT": str(at), "KILL_WHEN": when}
        return subprocess.run([sys.executable, "-m", "kvtool", *args], env=env, capture_output=True).returncode

    def calls(self, *args: str) -> int:
        """How many git calls the command makes."""
        assert self.run(*args) == 0
        return len(self.counter.read_text())


@pytest.fixture
def killer(tmp_path: Path) -> Killer:
    return Killer(tmp_path / "killer")


def restore(what: Path, saved: Path) -> None:
    shutil.rmtree(what, ignore_errors=True)
    if saved.exists():
        shutil.copytree(saved, what, symlinks=True)


@dataclass
class Scenario:
    """A command to kill. begin: puts everything back to the start; check: after the command ran again, all is there."""

    name: str
    args: tuple[str, ...]
    begin: Callable[[], None]
    check: Callable[[], None]


def fetching(project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    cache = tmp_path / "cache"

    def check() -> None:
        assert not list((cache / "tmp").iterdir())
        assert git(cache / "upstream.git", "fsck", "--no-dangling") == ""

    return Scenario("fetch", ("fetch",), lambda: shutil.rmtree(cache, ignore_errors=True), check)


def first_apply(project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    kvtool("apply")
    expected = git(project.tree, "rev-parse", "HEAD")

    def check() -> None:
        assert git(project.tree, "rev-parse", "HEAD") == expected
        assert git(project.tree, "status", "--porcelain") == ""
        assert [p.name for p in project.root.iterdir() if p.name.startswith(".")] == []

    return Scenario("first apply", ("apply",), lambda: shutil.rmtree(project.tree, ignore_errors=True), check)


def moving_apply(project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    kvtool("apply")
    (project.tree / "build").mkdir()
    (project.tree / "build/object").write_text("x")
    saved = tmp_path / "saved"
    shutil.copytree(project.tree, saved, symlinks=True)
    (project.root / "cpp/src/new.cpp").unlink()
    (project.root / "cpp/src/other.cpp").write_text("int other;\n")
    project.add_patch("more", ("src/a.cpp", "x + 7;", "x + 7 + 1;"))
    kvtool("apply")
    expected = git(project.tree, "rev-parse", "HEAD")

    def check() -> None:
        assert git(project.tree, "rev-parse", "HEAD") == expected
        assert git(project.tree, "status", "--porcelain") == ""
        assert kvtool("status", "--json").json["state"] == "clean"
        assert (project.tree / "build/object").read_text() == "x"

    return Scenario("moving apply", ("apply",), lambda: restore(project.tree, saved), check)


def exporting(project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    kvtool("apply")
    file = project.tree / "src/b.h"
    file.write_text(file.read_text().replace("bool dynamic;", "bool dyn;"))
    (project.tree / "src/more.cpp").write_text("int more;\n")
    git(project.tree, "add", "-A")
    git(project.tree, "commit", "-qm", "fixup! flag")
    tree, root = tmp_path / "saved-tree", tmp_path / "saved-root"
    shutil.copytree(project.tree, tree, symlinks=True)
    shutil.copytree(project.root, root, ignore=shutil.ignore_patterns("llama.cpp"))
    kvtool("export")
    expected = project.snapshot()

    def begin() -> None:
        for folder in ("patches", "cpp"):
            restore(project.root / folder, root / folder)
        restore(project.tree, tree)

    def check() -> None:
        assert project.snapshot() == expected
        assert kvtool("status", "--json").json["state"] == "clean"

    return Scenario("export", ("export",), begin, check)


SCENARIOS = (fetching, first_apply, moving_apply, exporting)


@pytest.fixture(params=SCENARIOS, ids=lambda make: make.__name__)
def scenario(request: pytest.FixtureRequest, project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    made: Scenario = request.param(project, kvtool, tmp_path)
    return made


def test_killed_at_a_git_call(scenario: Scenario, kvtool: Any, killer: Killer) -> None:
    scenario.begin()
    calls = killer.calls(*scenario.args)
    assert calls > 8
    for at, when in moments(calls):
        scenario.begin()
        assert killer.run(*scenario.args, at=at, when=when) == -signal.SIGKILL
        assert kvtool(*scenario.args).code == 0, (at, when)
        scenario.check()


@pytest.mark.timeout(0)
def test_killed_at_any_time(scenario: Scenario, kvtool: Any, start: Any) -> None:
    """At a random time: kvtool alone, so that a git it started goes on, or with everything that it started."""
    scenario.begin()
    began = time.monotonic()
    assert start(*scenario.args).wait() == 0
    usual = time.monotonic() - began
    dice = random.Random(SEED)
    killed = 0
    for number in range(KILLS):
        scenario.begin()
        process = start(*scenario.args)
        time.sleep(dice.uniform(0.3, 1.0) * usual)  # before that Python is still starting
        if number % 2:
            kill_family(process.pid)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        again = kvtool(*scenario.args)
        assert again.code == 0, (number, again)
        scenario.check()
    print(f"{scenario.name}: {killed} of {KILLS} rounds were killed on the way")


def half_written(project: Tiny) -> tuple[str, str]:
    """The tree as a kill in the middle of git's own checkout leaves it: journal, lock, one file cut off, one new."""
    before = git(project.tree, "rev-parse", "HEAD")
    (project.root / "cpp/src/new.cpp").write_text("int brand_newer = 1;\n")
    (project.root / "cpp/src/other.cpp").write_text("int other;\n")
    probe = project.root.parent / "probe"
    assert cli.run(["apply", "-q", "--tree", str(probe)]) == 0
    after = git(probe, "rev-parse", "HEAD")
    git(project.tree, "fetch", "-q", str(probe), "HEAD")
    state = (probe / ".git/kvtool/state.json").read_text()
    (project.state / "pending.json").write_text(f'{{"from": "{before}", "applied": {state}}}')
    (project.tree / ".git/index.lock").write_text("")
    (project.tree / "src/new.cpp").write_text("int brand_new")  # cut off
    (project.tree / "src/other.cpp").write_text("int other;\n")
    return before, after


def test_kill_in_the_middle_of_the_checkout(project: Tiny, kvtool) -> None:
    kvtool("apply")
    _, after = half_written(project)
    assert kvtool("apply").code == 0
    assert git(project.tree, "rev-parse", "HEAD") == after
    assert git(project.tree, "status", "--porcelain") == ""
    assert (project.tree / "src/new.cpp").read_text() == "int brand_newer = 1;\n"


@pytest.mark.parametrize("path", ["src/new.cpp", "src/b.h", "src/untracked.cpp"])
def test_edit_after_a_kill_is_kept(project: Tiny, kvtool, path: str) -> None:
    kvtool("apply")
    half_written(project)
    (project.tree / path).write_text("mine")
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and path in ran.json["error"]["why"]
    assert (project.tree / path).read_text() == "mine"


def test_terminated_apply_puts_the_tree_back_itself(project: Tiny, start: Any, tmp_path: Path, monkeypatch) -> None:
    """SIGTERM while git checks out: kvtool unwinds, and the tree is as it was."""
    assert cli.run(["apply", "-q"]) == 0
    head = git(project.tree, "rev-parse", "HEAD")
    (project.root / "cpp/src/new.cpp").write_text("int newer;\n")
    there = tmp_path / "there"
    folder = tmp_path / "slow"
    folder.mkdir()
    real = shutil.which("git")
    (folder / "git").write_text(
        f'#!/bin/sh\ncase "$*" in *" checkout "*) {real} "$@"; echo > {there}; sleep 60;; esac\nexec {real} "$@"\n'
    )
    (folder / "git").chmod(0o755)
    process = start("apply", env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
    while not there.exists():
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (project.state / "pending.json").exists()
    assert git(project.tree, "status", "--porcelain") == ""
    assert cli.run(["apply", "-q"]) == 0
    assert (project.tree / "src/new.cpp").read_text() == "int newer;\n"
    assert git(project.tree, "rev-parse", "HEAD") != head


def test_two_applies_at_once(project: Tiny, kvtool, start: Any) -> None:
    running = [start("apply", "--json") for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert sum('"outcome": "created"' in out for out, _ in outputs) == 1
    assert kvtool("status", "--json").json["state"] == "clean"


# --- rebase -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rebasing(project: Tiny, kvtool: Any, tmp_path: Path) -> Tiny:
    """A project whose rebase onto v3 changes a patch, series.toml, the lock and the tree, after one conflict."""
    project.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 4;\n    one();\n    mid();\n    last();\n"))
    text = (project.upstream / "src/a.cpp").read_text().replace("x + 4;\n", "x + 44;\n")
    (project.upstream / "src/a.cpp").write_text(text)
    (project.upstream / "src/fresh.h").write_text("int fresh;\n")
    header = (project.upstream / "src/b.h").read_text().replace("bool two;\n", "bool two;\n    bool dynamic;\n")
    (project.upstream / "src/b.h").write_text(header)
    git(project.upstream, "add", "-A")
    git(project.upstream, "commit", "-qm", "three")
    git(project.upstream, "tag", "v3")
    assert kvtool("apply").code == 0
    return project


def state_of(project: Tiny) -> dict[str, Any]:
    """The project's files, and the tree's files, HEAD and branches."""
    tree = {
        str(p.relative_to(project.tree)): p.read_bytes()
        for p in sorted(project.tree.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(project.tree).parts
    }
    heads = git(project.tree, "for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
    head = (project.tree / ".git/HEAD").read_text(), git(project.tree, "rev-parse", "HEAD")
    return {**project.snapshot(), **tree, "heads": heads, "head": head}


def restore_all(root: Path, saved: Path) -> None:
    """What is in a directory, the directory itself aside: it is the current one."""
    root.mkdir(exist_ok=True)
    for name in {p.name for p in (*root.iterdir(), *saved.iterdir())}:
        restore(root / name, saved / name)


def resolve_block(project: Tiny) -> None:
    upstream = git(project.tree, "show", "HEAD:src/a.cpp", strip=False)
    (project.tree / "src/a.cpp").write_text(
        upstream.replace("x + 44;\n", "x + 44;\n    one();\n    mid();\n    last();\n")
    )


def test_rebase(rebasing: Tiny, kvtool: Any, killer: Killer, tmp_path: Path) -> None:
    """Begin and continue, each killed on the way: --abort restores all, --continue goes on."""
    begin, go_on = ("rebase", "v3"), ("rebase", "--continue")
    saved, before = tmp_path / "saved", state_of(rebasing)
    shutil.copytree(rebasing.root, saved, symlinks=True)
    killer.run(*begin)  # fetches v3
    calls_begin = len(killer.counter.read_text())
    resolve_block(rebasing)
    stopped = tmp_path / "stopped"
    shutil.copytree(rebasing.root, stopped, symlinks=True)
    calls_go_on = killer.calls(*go_on)
    after = state_of(rebasing)
    for at, when in moments(calls_begin):
        restore_all(rebasing.root, saved)
        assert killer.run(*begin, at=at, when=when) == -signal.SIGKILL
        again = kvtool(*begin)
        if again.code == 4:
            assert "--continue" in again.err and "--abort" in again.err, (at, when, again)
            assert kvtool("status", "--json").json["state"] in ("interrupted", "in-progress")
            aborted = tmp_path / "aborted"
            restore_all(aborted, rebasing.root)
            assert kvtool("rebase", "--abort").code == 0, (at, when)
            assert state_of(rebasing) == before, (at, when)
            restore_all(rebasing.root, aborted)
            assert kvtool(*go_on).code == 3, (at, when)
        else:
            assert again.code == 3, (at, when, again)
        resolve_block(rebasing)
        assert kvtool(*go_on).code == 0, (at, when)
        assert state_of(rebasing) == after
    for at, when in moments(calls_go_on):
        for then in ("--continue", "--abort"):
            restore_all(rebasing.root, stopped)
            assert killer.run(*go_on, at=at, when=when) == -signal.SIGKILL
            ran = kvtool("rebase", then)
            if ran.code == 2:  # it was through
                assert at == calls_go_on and "no rebase is under way" in ran.err, (at, when)
            else:
                assert ran.code == 0, (at, when, ran)
            assert state_of(rebasing) == (after if then == "--continue" or ran.code == 2 else before), (at, when, then)
            assert kvtool("status", "--json").json["state"] == "clean"


def kill_family(pid: int) -> None:
    """Kill a process and all that it started, as a power cut does."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    pairs = list(zip(map(int, listed[::2]), map(int, listed[1::2]), strict=True))
    family = [pid]
    for member in family:
        family += [child for child, parent in pairs if parent == member]
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def obey(kvtool: Any, *args: str) -> Any:
    """Run kvtool; where it says that a git was killed and which lock to remove, do so and run it again."""
    ran = kvtool(*args)
    if ran.code == 4 and (found := re.search(r"rm (\S+\.lock)", ran.err)):
        Path(found[1]).unlink()
        ran = kvtool(*args)
    return ran


def test_rebase_at_random_moments(rebasing: Tiny, kvtool: Any, start: Any, tmp_path: Path) -> None:
    """Everything is killed at once, git in the middle of its work included."""
    dice = random.Random(SEED)
    begin, go_on = ("rebase", "v3"), ("rebase", "--continue")
    saved, stopped, before = tmp_path / "saved", tmp_path / "stopped", state_of(rebasing)
    shutil.copytree(rebasing.root, saved, symlinks=True)
    seconds = []
    for command in (begin, go_on):
        clock = time.monotonic()
        start(*command).wait()
        seconds.append(time.monotonic() - clock)
        if command == begin:
            resolve_block(rebasing)
            shutil.copytree(rebasing.root, stopped, symlinks=True)
    after = state_of(rebasing)
    for number in range(KILLS):
        command, place = ((begin, saved), (go_on, stopped))[number % 2]
        restore_all(rebasing.root, place)
        process = start(*command)
        time.sleep(dice.uniform(0.1, 1.0) * seconds[number % 2])
        kill_family(process.pid)
        process.communicate()
        if dice.random() < 0.5:
            ran = obey(kvtool, "rebase", "--abort")
            assert ran.code in (0, 2), (number, ran)
            assert state_of(rebasing) in ((before,) if ran.code == 0 else (before, after)), number
            continue
        ran = obey(kvtool, *go_on)
        if ran.code == 2 and state_of(rebasing) != after:  # it had not begun
            assert state_of(rebasing) == before, number
            ran = obey(kvtool, *begin)
        if ran.code == 3:
            resolve_block(rebasing)
            ran = obey(kvtool, *go_on)
        assert ran.code in (0, 2), (number, ran)
        assert state_of(rebasing) == after, number
        assert kvtool("status", "--json").json["state"] == "clean"

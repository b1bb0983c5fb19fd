"""Kill kvtool at any moment. Nothing may be lost, and the next call must work. Also run two commands on one tree."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli
from tests.conftest import Tiny, git, write_files
from tests.repo.kills import KILLS, SEED, Killer, kill_family, moments, needs_posix, restore

pytestmark = needs_posix


@dataclass
class Scenario:
    """Describe a command that is killed.

    begin: restores the project as it was before the command
    check: asserts the result after the command was run again
    """

    name: str
    args: tuple[str, ...]
    begin: Callable[[], None]
    check: Callable[[], None]


def fetching(project: Tiny, kvtool: Any, tmp_path: Path) -> Scenario:
    cache = tmp_path / "cache"

    def check() -> None:
        assert not list((cache / "kvtool-tmp").iterdir())
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


def test_kill_at_each_git_call(scenario: Scenario, kvtool: Any, killer: Killer) -> None:
    scenario.begin()
    calls = killer.calls(*scenario.args)
    assert calls > 8
    for at, when in moments(calls):
        scenario.begin()
        assert killer.run(*scenario.args, at=at, when=when) == -signal.SIGKILL
        assert kvtool(*scenario.args).code == 0, (at, when)
        scenario.check()


def test_edit_after_killed_export_is_reported(project: Tiny, kvtool: Any, killer: Killer, tmp_path: Path) -> None:
    scenario, stage = exporting(project, kvtool, tmp_path), project.tree / ".git/kvtool/export-stage.json"
    scenario.begin()
    before, at = project.snapshot(), killer.calls("export")
    scenario.begin()
    while killer.run("export", at=at) == 0 or not stage.exists():
        scenario.begin()
        at -= 1
    patch = project.root / "patches/flag.patch"
    written = patch.read_text()
    patch.write_text(written + "mine\n")
    ran = kvtool("export", "--json")
    assert ran.code == 4 and "patches/flag.patch was edited" in ran.json["error"]["what"], ran
    assert ran.json["error"]["next"].endswith("kvtool export")
    assert kvtool("apply", "--json").json["error"]["next"] == "kvtool export"
    assert patch.read_text() == written + "mine\n" and project.snapshot() != before
    patch.write_text(written)
    assert kvtool("export").code == 0
    scenario.check()


@pytest.mark.timeout(300 + 60 * KILLS)
def test_kill_at_random_times(scenario: Scenario, kvtool: Any, start: Any) -> None:
    """Kill kvtool at a random time: either kvtool alone, so that its git continues, or with all of its children."""
    scenario.begin()
    began = time.monotonic()
    assert start(*scenario.args).wait() == 0
    usual = time.monotonic() - began
    dice = random.Random(SEED)
    killed = 0
    for number in range(KILLS):
        scenario.begin()
        process = start(*scenario.args)
        time.sleep(dice.uniform(0.3, 1.0) * usual)  # not earlier, because Python would still be starting
        if number % 2:
            kill_family(process.pid)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        again = kvtool(*scenario.args)
        assert again.code == 0, (number, again)
        scenario.check()
    print(f"{scenario.name}: {killed} of {KILLS} rounds were killed on the way")


def test_leftover_of_running_git_is_removed(project: Tiny, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the git of a killed first apply continue to write, so that kvtool must remove its folder several times."""
    place = project.root / ".llama.cpp.kvtool-left"
    to_write, clear = ["one", "two", "three"], shutil.rmtree

    def write() -> None:
        (place / ".git/objects").mkdir(parents=True)
        (place / ".git/objects" / to_write.pop()).touch()

    def clear_while_it_writes(path: Path, **more: Any) -> None:
        clear(path, **more)
        if path == place and to_write:
            write()

    write()
    monkeypatch.setattr(shutil, "rmtree", clear_while_it_writes)
    assert kvtool("apply").code == 0
    assert [p.name for p in project.root.iterdir() if p.name.startswith(".")] == []
    assert to_write == []


def test_only_own_leftovers_are_removed(project: Tiny, kvtool: Any) -> None:
    """Use a tree whose name has glob characters. The other folder may belong to a running apply."""
    mine, other = (project.root / f".{name}.kvtool-left" for name in ("a[b]", "ab"))
    mine.mkdir()
    other.mkdir()
    assert kvtool("apply", "--tree", project.root / "a[b]").code == 0
    assert other.exists() and not mine.exists()


def half_written(project: Tiny) -> tuple[str, str]:
    """Leave the tree as after a kill in the middle of git's checkout.

    It has a journal, a lock, a truncated file and a new file.
    """
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
    (project.tree / "src/new.cpp").write_text("int brand_new")  # truncated
    (project.tree / "src/other.cpp").write_text("int other;\n")
    return before, after


def ignore_everywhere(pattern: str) -> None:
    write_files(Path.home(), {".config/git/ignore": f"{pattern}\n"})


@pytest.mark.parametrize("ignored", ["", "other*"])
def test_kill_during_checkout(project: Tiny, kvtool, ignored: str) -> None:
    ignore_everywhere(ignored)
    kvtool("apply")
    _, after = half_written(project)
    assert kvtool("apply").code == 0
    assert git(project.tree, "rev-parse", "HEAD") == after
    assert git(project.tree, "status", "--porcelain") == ""
    assert (project.tree / "src/new.cpp").read_text() == "int brand_newer = 1;\n"


@pytest.mark.parametrize("text", ["", '{"from": ', "{}", "[]"])
def test_unwritten_journal_is_ignored(project: Tiny, kvtool, text: str) -> None:
    kvtool("apply")
    (project.state / "pending.json").write_text(text)
    assert kvtool("apply").code == 0
    assert kvtool("status", "--json").json["state"] == "clean"


@pytest.mark.parametrize("path", ["src/new.cpp", "src/b.h", "src/untracked.cpp"])
def test_edit_after_kill_is_kept(project: Tiny, kvtool, path: str) -> None:
    kvtool("apply")
    half_written(project)
    (project.tree / path).write_text("mine")
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and path in ran.json["error"]["why"]
    assert (project.tree / path).read_text() == "mine"


@pytest.mark.parametrize("path", ["src/other.cpp", "src/new.cpp/other"])
def test_ignored_edit_after_kill_is_kept(project: Tiny, kvtool, path: str) -> None:
    """Change an ignored file that kvtool may have written.

    Also put a folder at the place of a file that must be restored.
    """
    ignore_everywhere("other*")
    kvtool("apply")
    half_written(project)
    if path.startswith("src/new.cpp/"):
        (project.tree / "src/new.cpp").unlink()
    write_files(project.tree, {path: "mine"})
    ran = kvtool("apply", "--json")
    assert ran.code == 4 and path in ran.json["error"]["why"], ran
    assert (project.tree / path).read_text() == "mine"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_terminated_apply_restores_tree(project: Tiny, start: Any, tmp_path: Path, name: str) -> None:
    """Send SIGTERM, or close the terminal, during git's checkout. kvtool must clean up and restore the tree."""
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
    end = getattr(signal, name)
    before = signal.signal(end, signal.SIG_DFL)  # under nohup, the signals would stay ignored in child processes
    process = start("apply", env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
    signal.signal(end, before)
    while not there.exists():
        assert process.poll() is None
    process.send_signal(end)
    process.send_signal(end)  # if a terminal is closed, both the shell and the kernel send the signal
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (project.state / "pending.json").exists()
    assert git(project.tree, "status", "--porcelain") == ""
    assert cli.run(["apply", "-q"]) == 0
    assert (project.tree / "src/new.cpp").read_text() == "int newer;\n"
    assert git(project.tree, "rev-parse", "HEAD") != head


def test_parallel_applies(project: Tiny, kvtool, start: Any) -> None:
    running = [start("apply", "--json") for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    assert sum('"outcome": "created"' in out for out, _ in outputs) == 1
    assert kvtool("status", "--json").json["state"] == "clean"

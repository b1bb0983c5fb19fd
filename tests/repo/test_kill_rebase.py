"""Kill a rebase at any moment. --continue must finish it, --abort must restore everything, and nothing may be lost."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git
from tests.repo.kills import KILLS, SEED, Killer, kill_family, moments, needs_posix, restore

pytestmark = needs_posix


@pytest.fixture
def rebasing(project: Tiny, kvtool: Any, tmp_path: Path) -> Tiny:
    """Prepare a rebase onto v3 with one conflict. It changes a patch file, series.toml, upstream.lock and the tree."""
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
    """Return the files of the project, and the files, HEAD and the branches of the tree."""
    tree = {
        str(p.relative_to(project.tree)): p.read_bytes()
        for p in sorted(project.tree.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(project.tree).parts
    }
    heads = git(project.tree, "for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
    head = (project.tree / ".git/HEAD").read_text(), git(project.tree, "rev-parse", "HEAD")
    return {**project.snapshot(), **tree, "heads": heads, "head": head}


def restore_all(root: Path, saved: Path) -> None:
    """Restore the content of the folder `root`. The folder itself stays, because it is the current one."""
    root.mkdir(exist_ok=True)
    for name in {p.name for p in (*root.iterdir(), *saved.iterdir())}:
        restore(root / name, saved / name)


def resolve_block(project: Tiny) -> None:
    upstream = git(project.tree, "show", "HEAD:src/a.cpp", strip=False)
    (project.tree / "src/a.cpp").write_text(
        upstream.replace("x + 44;\n", "x + 44;\n    one();\n    mid();\n    last();\n")
    )


BEGIN, GO_ON = ("rebase", "v3"), ("rebase", "--continue")


@dataclass(frozen=True)
class Stages:
    """Hold the project at the stages of a rebase.

    saved: the folder with the project before the rebase
    stopped: the folder with the project after the rebase stopped and the conflict was resolved
    before: the contents of the project before the rebase
    after: the contents of the project after the rebase
    begin: the number of calls of git by the command that begins the rebase
    go_on: the number of calls of git by --continue
    """

    saved: Path
    stopped: Path
    before: dict[str, Any]
    after: dict[str, Any]
    begin: int
    go_on: int


@pytest.fixture
def stages(rebasing: Tiny, killer: Killer, tmp_path: Path) -> Stages:
    saved, stopped, before = tmp_path / "saved", tmp_path / "stopped", state_of(rebasing)
    shutil.copytree(rebasing.root, saved, symlinks=True)
    killer.run(*BEGIN)  # this also fetches v3
    begin = len(killer.counter.read_text())
    resolve_block(rebasing)
    shutil.copytree(rebasing.root, stopped, symlinks=True)
    go_on = killer.calls(*GO_ON)
    return Stages(saved, stopped, before, state_of(rebasing), begin, go_on)


def test_kill_before_conflict(rebasing: Tiny, kvtool: Any, killer: Killer, tmp_path: Path, stages: Stages) -> None:
    """Kill before the conflict. --abort must restore everything, and --continue must finish the rebase."""
    for at, when in moments(stages.begin):
        restore_all(rebasing.root, stages.saved)
        assert killer.run(*BEGIN, at=at, when=when) == -signal.SIGKILL
        again = kvtool(*BEGIN)
        if again.code == 4:
            assert "--continue" in again.err and "--abort" in again.err, (at, when, again)
            assert kvtool("status", "--json").json["state"] in ("interrupted", "in-progress")
            aborted = tmp_path / "aborted"
            restore_all(aborted, rebasing.root)
            assert kvtool("rebase", "--abort").code == 0, (at, when)
            assert state_of(rebasing) == stages.before, (at, when)
            restore_all(rebasing.root, aborted)
            assert kvtool(*GO_ON).code == 3, (at, when)
        else:
            assert again.code == 3, (at, when, again)
        resolve_block(rebasing)
        assert kvtool(*GO_ON).code == 0, (at, when)
        assert state_of(rebasing) == stages.after


@pytest.mark.parametrize("then", ["--continue", "--abort"])
def test_kill_after_resolution(rebasing: Tiny, kvtool: Any, killer: Killer, stages: Stages, then: str) -> None:
    """Kill after the conflict was resolved. --continue must finish the rebase, and --abort must restore everything."""
    for at, when in moments(stages.go_on):
        restore_all(rebasing.root, stages.stopped)
        assert killer.run(*GO_ON, at=at, when=when) == -signal.SIGKILL
        ran = kvtool("rebase", then)
        if ran.code == 2:  # the rebase was complete
            assert at == stages.go_on and "no rebase is under way" in ran.err, (at, when)
        else:
            assert ran.code == 0, (at, when, ran)
        assert state_of(rebasing) == (stages.after if then == "--continue" or ran.code == 2 else stages.before)
        assert kvtool("status", "--json").json["state"] == "clean"


def test_abort_with_leftover_git_lock(
    rebasing: Tiny, kvtool: Any, killer: Killer, tmp_path: Path, stages: Stages
) -> None:
    """Kill a rebase while it writes the files, and kill --abort while it restores them. git's index.lock stays."""
    restore_all(rebasing.root, stages.stopped)
    assert killer.run(*GO_ON, at=stages.go_on) == -signal.SIGKILL
    assert json.loads((rebasing.state / "rebase.json").read_text())["phase"] == "writing"
    restore_all(tmp_path / "writing", rebasing.root)
    calls = killer.calls("rebase", "--abort")
    for at in (calls, calls - 1, calls - 2):
        restore_all(rebasing.root, tmp_path / "writing")
        assert killer.run("rebase", "--abort", at=at) == -signal.SIGKILL
        (rebasing.tree / ".git" / "index.lock").write_text("")
        assert kvtool("rebase", "--abort").code == 0
        assert state_of(rebasing) == stages.before


def obey(kvtool: Any, *args: str) -> Any:
    """Run kvtool.

    If it reports that git was killed and which lock file to remove, remove the file and run kvtool again.
    """
    ran = kvtool(*args)
    if ran.code == 4 and (found := re.search(r"rm (\S+\.lock)", ran.err)):
        Path(found[1]).unlink()
        ran = kvtool(*args)
    return ran


def test_kill_rebase_at_random_times(rebasing: Tiny, kvtool: Any, start: Any, tmp_path: Path) -> None:
    """Kill all processes at the same time, including a running git."""
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
        if ran.code == 2 and state_of(rebasing) != after:  # the rebase had not begun
            assert state_of(rebasing) == before, number
            ran = obey(kvtool, *begin)
        if ran.code == 3:
            resolve_block(rebasing)
            ran = obey(kvtool, *go_on)
        assert ran.code in (0, 2), (number, ran)
        assert state_of(rebasing) == after, number
        assert kvtool("status", "--json").json["state"] == "clean"

"""Test conflicts of kvtool rebase until their end: resolved, skipped, dropped or aborted."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import ALL, BLOCK, everything, finished, outcomes, release, resolve

# --- a conflict until its end -------------------------------------------------------------------------------------


def test_conflict_stops_and_reports_all(stopped: Tiny, kvtool: Any) -> None:
    before = stopped.snapshot()
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["outcome"], ran.json["stopped_at"]) == (3, "stopped", "block")
    assert outcomes(ran) == {**ALL, "block": "conflict", "more": "blocked"}
    assert ran.json["patches"][3]["blocked_by"] == "block"
    text = (stopped.tree / "src/a.cpp").read_text()
    assert "<<<<<<< HEAD\n    int y = x + 44;\n||||||| " in text and "last();\n>>>>>>> " in text
    assert stopped.snapshot() == before
    assert "kvtool rebase --continue" in ran.json["error"]["next"]
    status = kvtool("status", "--json").json
    assert status["patches"] == status["reasons"] == [], "the tree no longer contains the applied series"
    assert status["state"] == "in-progress" and "--continue" in status["next"] and "'block'" in kvtool("status").out
    for args in (("apply",), ("export",), ("rebase", "v3"), ("apply", "v1")):
        refused = kvtool(*args, "--json")
        assert refused.code == 4 and "rebase" in refused.json["error"]["next"], args
    assert (stopped.tree / "src/a.cpp").read_text() == text


@pytest.mark.parametrize("how", ["edit", "add", "commit"])
def test_resolve_and_continue(stopped: Tiny, kvtool: Any, how: str) -> None:
    assert kvtool("rebase", "v3").code == 3
    marked = kvtool("rebase", "--continue", "--json")
    assert marked.code == 3 and "src/a.cpp" in marked.json["error"]["why"]
    resolve(stopped, *BLOCK)
    if how != "edit":
        git(stopped.tree, "add", "src/a.cpp")
    if how == "commit":
        git(stopped.tree, "commit", "-qm", "by reflex")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "rebased"), ran
    assert outcomes(ran) == ALL
    assert {f["path"] for f in ran.json["files"]} == {"patches/block.patch", "patches/upstream.lock"}
    text = (stopped.root / "patches/block.patch").read_text()
    assert text.startswith("From 0000") and "Subject: block: a patch\n" in text and " x + 44;\n+" in text
    assert "by reflex" not in git(stopped.tree, "log", "--format=%s")
    finished(stopped, kvtool)


def test_second_conflict_stops_again(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "bool two;", "bool twenty;"), ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp x)"))
    assert kvtool("rebase", "v3", "--json").json["stopped_at"] == "flag"
    resolve(applied, "src/b.h", "bool twenty;", "bool twenty;\n    bool dynamic;")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "use")
    assert outcomes(ran) == {"flag": "applied", "use": "conflict"}
    text = (applied.tree / "CMakeLists.txt").read_text()
    assert "<<<<<<< HEAD" in text
    (applied.tree / "CMakeLists.txt").write_text("project(tiny)\nadd_library(a src/a.cpp x src/new.cpp)\n")
    assert kvtool("rebase", "--continue").code == 0
    finished(applied, kvtool)


@pytest.mark.parametrize("path", ["build-x/file", "build-x"])
def test_ignored_file_at_next_conflict(applied: Tiny, kvtool: Any, path: str) -> None:
    """Expect that an ignored file of the user is kept, although git cherry-pick overwrites it without an error."""
    work = applied.root.parent / "patch-work"
    write_files(work, {"build-x/file": "the patch's"})
    git(work, "add", "-f", "build-x/file")
    applied.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 4;\n    one();\n"))
    assert kvtool("apply").code == 0
    release(applied, "v3", ("src/b.h", "bool two;", "bool twenty;"), ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("rebase", "v3", "--json").json["stopped_at"] == "flag"
    resolve(applied, "src/b.h", "bool twenty;", "bool twenty;\n    bool dynamic;")
    write_files(applied.tree, {path: "mine"})
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and path in ran.json["error"]["output"].split("\n"), ran
    assert (applied.tree / path).read_text() == "mine"
    (applied.tree / path).unlink()
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"
    assert (applied.tree / "build-x/file").read_text() == "the patch's"


def test_ignored_file_at_removed_path(applied: Tiny, kvtool: Any) -> None:
    """Let the next patch change a file that upstream removed.

    git cherry-pick would overwrite an ignored file at the path of this file.
    """
    write_files(Path.home(), {".config/git/ignore": "run.sh\n"})
    applied.add_patch("block", ("scripts/run.sh", "exit 0", "exit 1"))
    assert kvtool("apply").code == 0
    (applied.upstream / "scripts/run.sh").unlink()
    release(applied, "v3", ("src/b.h", "bool two;", "bool twenty;"))
    assert kvtool("rebase", "v3", "--json").json["stopped_at"] == "flag"
    resolve(applied, "src/b.h", "bool twenty;", "bool twenty;\n    bool dynamic;")
    write_files(applied.tree, {"scripts/run.sh": "mine"})
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and ran.json["error"]["output"] == "scripts/run.sh", ran
    assert (applied.tree / "scripts/run.sh").read_text() == "mine"


def test_abort_restores_everything(stopped: Tiny, kvtool: Any) -> None:
    before = everything(stopped)
    assert kvtool("rebase", "v3").code == 3
    (stopped.tree / "src/a.cpp").write_text("half a resolution")
    git(stopped.tree, "add", "-A")
    ran = kvtool("rebase", "--abort", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "aborted"), ran
    assert everything(stopped) == before
    assert kvtool("status", "--json").json["state"] == "clean"
    # the edits of the first rebase must still be kept
    assert kvtool("rebase", "v3").code == 3
    (stopped.tree / "src/a.cpp").write_text("another one")
    assert kvtool("rebase", "--abort").code == 0
    kept = git(stopped.tree, "for-each-ref", "--format=%(refname)", "refs/kvtool/kept").split()
    assert {git(stopped.tree, "show", f"{ref}:src/a.cpp") for ref in kept} >= {"half a resolution", "another one"}
    assert git(stopped.tree, "show", f"{ran.json['kept']}:src/a.cpp") == "half a resolution"


@pytest.mark.parametrize("how", ["--abort", "--skip block"])
def test_kept_work_is_reported(stopped: Tiny, kvtool: Any, how: str) -> None:
    kvtool("rebase", "v3")
    (stopped.tree / "src/a.cpp").write_text("half a resolution")
    ran = kvtool("rebase", *how.split())
    (said,) = (line for line in ran.out.splitlines() if line.startswith("the tree's edits are kept: "))
    assert "half a resolution" in git(stopped.tree, *said.split()[-2:]), ran


@pytest.fixture
def twice(stopped: Tiny) -> Tiny:
    """Prepare a rebase onto v4 that also stops at the patch `use`."""
    release(stopped, "v4", ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp x)"))
    return stopped


USE = ("CMakeLists.txt", "src/a.cpp x)", "src/a.cpp x src/new.cpp)")


def resolve_use(project: Tiny) -> None:
    resolve(project, *USE)
    resolve(project, "src/a.cpp", "int y = x + 2;", "int y = x + 2 + grown();")


def test_abort_fails_with_other_worktree(stopped: Tiny, kvtool: Any, tmp_path: Path) -> None:
    """Check out the branch of the old series in a second worktree.

    --abort must then fail, because git does not check out one branch in two worktrees.
    """
    before = everything(stopped)
    kvtool("rebase", "v3")
    git(stopped.tree, "worktree", "add", "-q", str(tmp_path / "old"), "kvtool/v1")
    ran = kvtool("rebase", "--abort", "--json")
    assert ran.code == 4 and str(tmp_path / "old") in ran.json["error"]["output"]
    assert "problem that git reports" in ran.json["error"]["next"]
    git(stopped.tree, "worktree", "remove", str(tmp_path / "old"))
    assert kvtool("rebase", "--abort").code == 0
    assert everything(stopped) == before


def test_abort_after_a_resolution(twice: Tiny, kvtool: Any) -> None:
    before = everything(twice)
    assert kvtool("rebase", "v4", "--json").json["stopped_at"] == "use"
    resolve_use(twice)
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"
    assert kvtool("rebase", "--abort").code == 0
    assert everything(twice) == before


def test_rerere_reuses_earlier_resolution(twice: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v4")
    resolve_use(twice)
    resolved = (twice.tree / "CMakeLists.txt").read_text()
    kvtool("rebase", "--continue")
    kvtool("rebase", "--abort")
    ran = kvtool("rebase", "v4", "--json")
    assert (ran.json["stopped_at"], ran.json["filled_in"]) == ("use", ["CMakeLists.txt"])
    assert "git resolved these as before, check them: CMakeLists.txt" in ran.json["error"]["next"]
    assert (twice.tree / "CMakeLists.txt").read_text() == resolved
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"


def test_rerere_reuses_refused_resolution(twice: Tiny, kvtool: Any) -> None:
    """Change patches/ while the rebase is stopped.

    --continue must refuse, suggest a new start, and keep the resolution.
    """
    kvtool("rebase", "v4")
    resolve_use(twice)
    resolved = (twice.tree / "CMakeLists.txt").read_text()
    added = twice.root / "cpp/src/more.cpp"
    added.write_text("int more;\n")
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and "rerere" in ran.json["error"]["next"], ran
    added.unlink()
    kvtool("rebase", "--abort")
    assert kvtool("rebase", "v4", "--json").json["filled_in"] == ["CMakeLists.txt"]
    assert (twice.tree / "CMakeLists.txt").read_text() == resolved


@pytest.mark.parametrize("when", ["at once", "at the stop"])
def test_skip_sets_until(stopped: Tiny, kvtool: Any, when: str) -> None:
    if when == "at once":
        ran = kvtool("rebase", "v3", "--skip", "block", "--json")
    else:
        kvtool("rebase", "v3")
        ran = kvtool("rebase", "--skip", "block", "--json")
    # the patch `more` needs the patch `block`, so it has a conflict now
    assert (ran.code, ran.json["stopped_at"]) == (3, "more"), ran
    ran = kvtool("rebase", "--skip", "more", "--json")
    assert outcomes(ran) == {**ALL, "block": "skipped", "more": "skipped"}
    series = tomllib.loads((stopped.root / "patches/series.toml").read_text())["patch"]
    assert [patch.get("until") for patch in series] == [None, None, "v3", "v3", None]
    finished(stopped, kvtool)


def test_drop_removes_patch_at_end(stopped: Tiny, kvtool: Any) -> None:
    before = stopped.snapshot()
    kvtool("rebase", "v3")
    assert kvtool("rebase", "--drop", "block").code == 3
    assert stopped.snapshot() == before
    ran = kvtool("rebase", "--drop", "more", "--json")
    assert (ran.code, outcomes(ran)) == (0, {**ALL, "block": "dropped", "more": "dropped"})
    text = (stopped.root / "patches/series.toml").read_text()
    assert "block" not in text and "because of tail" in text and text.startswith("# the series\n")
    assert not (stopped.root / "patches/block.patch").exists()
    finished(stopped, kvtool)


def test_drop_of_other_patch_is_refused(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    ran = kvtool("rebase", "--drop", "use", "--json")
    assert ran.code == 2 and "'block'" in ran.json["error"]["what"]


def test_resolution_of_other_tree_is_ignored(twice: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v4", "--json").json["stopped_at"] == "use"
    resolve_use(twice)
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"
    journal = twice.state / "rebase.json"
    state = json.loads(journal.read_text())
    state["choices"]["resolved"][0]["parent"] = state["head"]  # as if the earlier patches had been moved in another way
    journal.write_text(json.dumps(state))
    resolve(twice, *BLOCK)
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and "'use'" in ran.json["error"]["what"] and "--abort" in ran.json["error"]["next"], ran


# --- killed and aborted --------------------------------------------------------------------------------------------


def killed(project: Tiny, kvtool: Any, *, at: str, dirty: dict[str, str]) -> str:
    """Leave a rebase onto v3 as after a kill during the checkout before the conflict.

    HEAD is at `at`, and the files in `dirty` differ from HEAD. Return the commit to which HEAD was being moved.
    """
    old = git(project.tree, "rev-parse", "HEAD")
    assert kvtool("rebase", "v3").code == 3
    to = git(project.tree, "rev-parse", "HEAD")
    journal = project.state / "rebase.json"
    state = json.loads(journal.read_text())
    journal.write_text(json.dumps({**state, "phase": "stopping", "at": old, "to": to}))
    git(project.tree, "checkout", "-q", "--force", "--detach", {"old": old, "new": to}.get(at, at))
    write_files(project.tree, dirty)
    return to


def test_abort_after_kill_before_head(stopped: Tiny, kvtool: Any) -> None:
    before = everything(stopped)
    to = killed(stopped, kvtool, at="old", dirty={})
    (stopped.tree / "src/a.cpp").write_text(git(stopped.tree, "show", f"{to}:src/a.cpp", strip=False)[:20])
    ran = kvtool("rebase", "--abort", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "aborted"), ran
    assert everything(stopped) == before
    assert not git(stopped.tree, "for-each-ref", "refs/kvtool/kept"), "the user had no work to keep"


def test_abort_after_kill_keeps_conflict(stopped: Tiny, kvtool: Any) -> None:
    before = everything(stopped)
    killed(stopped, kvtool, at="new", dirty={"src/a.cpp": "half of a conflict"})
    assert kvtool("rebase", "--abort").code == 0
    assert everything(stopped) == before
    (ref,) = git(stopped.tree, "for-each-ref", "--format=%(refname)", "refs/kvtool/kept").split()
    assert git(stopped.tree, "show", f"{ref}:src/a.cpp") == "half of a conflict"


def test_abort_after_kill_before_write(stopped: Tiny, kvtool: Any) -> None:
    before = everything(stopped)
    killed(stopped, kvtool, at="new", dirty={})
    assert kvtool("rebase", "--abort").code == 0
    assert everything(stopped) == before
    assert not git(stopped.tree, "for-each-ref", "refs/kvtool/kept")


def test_abort_after_kill_and_own_commit(stopped: Tiny, kvtool: Any) -> None:
    old = git(stopped.tree, "rev-parse", "HEAD")
    killed(stopped, kvtool, at="HEAD^", dirty={})
    git(stopped.tree, "commit", "-q", "--allow-empty", "-m", "somebody's own")
    ran = kvtool("rebase", "--abort", "--json")
    assert ran.code == 4 and old[:10] in ran.json["error"]["why"], ran
    assert git(stopped.tree, "log", "-1", "--format=%s") == "somebody's own"

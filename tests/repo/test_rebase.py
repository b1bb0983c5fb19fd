"""kvtool rebase: every outcome of a patch, conflicts to the end, and nothing changed unless all of it is."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git


def release(project: Tiny, tag: str, *edits: tuple[str, str, str], lock: bool = True) -> str:
    """A new upstream tag on top of the last one, (path, old, new) replaced; into the lock unless told otherwise."""
    for path, old, new in edits:
        file = project.upstream / path
        text = file.read_text()
        assert text.count(old) == 1, (path, old)
        file.write_text(text.replace(old, new))
    git(project.upstream, "commit", "-q", "--allow-empty", "-am", f"upstream: {tag}")
    git(project.upstream, "tag", tag)
    tree = git(project.upstream, "rev-parse", f"{tag}^{{tree}}")
    if lock:
        with (project.root / "patches/upstream.lock").open("a") as file:
            file.write(
                f'\n# about {tag}\n[[upstream]]\ntag = "{tag}"\ndate = "2026-02-01"\ntree = "{tree}"\nsources = []\n'
            )
    return tree


def current(project: Tiny) -> str:
    return str(tomllib.loads((project.root / "patches/upstream.lock").read_text())["current"])


def outcomes(ran: Any) -> dict[str, str]:
    return {patch["id"]: patch["outcome"] for patch in ran.json["patches"]}


def everything(project: Tiny) -> dict[str, bytes]:
    """All files of the project, the tree's own git repository aside, and where its branches are."""
    found = {
        str(p.relative_to(project.root)): p.read_bytes()
        for p in sorted(project.root.rglob("*"))
        if p.is_file() and ".git" not in p.relative_to(project.root).parts
    }
    heads = git(project.tree, "for-each-ref", "--format=%(refname) %(objectname)", "refs/heads")
    found["HEAD"] = f"{heads}\n{(project.tree / '.git/HEAD').read_text()}".encode()
    found["state"] = (project.state / "state.json").read_bytes()
    assert git(project.tree, "status", "--porcelain") == ""
    return found


@pytest.fixture
def applied(project: Tiny, kvtool: Any) -> Tiny:
    assert kvtool("apply").code == 0
    return project


# --- outcomes -----------------------------------------------------------------------------------------------------


def test_success_moves_tree_lock_and_only_what_must_change(applied: Tiny, kvtool: Any) -> None:
    before = applied.snapshot()
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    assert (ran.json["outcome"], ran.json["previous"], ran.json["files"]) == (
        "rebased",
        "v1",
        [{"path": "patches/upstream.lock", "action": "change"}],
    )
    changed = {name for name, content in applied.snapshot().items() if before[name] != content}
    assert changed == {"patches/upstream.lock"} and current(applied) == "v2"
    assert kvtool("status", "--json").json["state"] == "clean"
    assert git(applied.tree, "branch", "--show-current") == "kvtool/v2"
    assert "x + 88" in (applied.tree / "src/a.cpp").read_text()
    assert Path(ran.json["range_diff"]).read_text().count(" = ") == 3
    # the same ids as from scratch
    assert kvtool("apply", "--tree", applied.root / "again", "--json").json["head"] == ran.json["head"]


def test_rebase_makes_the_tree_when_there_is_none(project: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v2").code == 0
    assert kvtool("status", "--json").json["tag"] == "v2"


def test_already_there(applied: Tiny, kvtool: Any) -> None:
    before = everything(applied)
    ran = kvtool("rebase", "v1", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "unchanged")
    assert everything(applied) == before


def test_there_and_back(applied: Tiny, kvtool: Any) -> None:
    before = applied.snapshot()
    assert kvtool("rebase", "v2").code == 0
    assert kvtool("rebase", "v1").code == 0
    assert applied.snapshot() == before


def test_merged_upstream_gets_until(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n"))
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert outcomes(ran) == {"flag": "merged", "use": "applied"}
    series = tomllib.loads((applied.root / "patches/series.toml").read_text())
    assert [patch.get("until") for patch in series["patch"]] == ["v3", None]
    assert (applied.root / "patches/series.toml").read_text().startswith("# the series\n")
    assert kvtool("apply", "v1", "--json").json["patches"][0]["outcome"] == "applied"  # still there for older ones


def test_file_that_upstream_renamed_is_followed(applied: Tiny, kvtool: Any) -> None:
    git(applied.upstream, "mv", "src/a.cpp", "src/core.cpp")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert "+++ b/src/core.cpp" in (applied.root / "patches/use.patch").read_text()
    assert "grown" in (applied.tree / "src/core.cpp").read_text()


def test_twin_before_the_right_place(applied: Tiny, kvtool: Any) -> None:
    """One line of context fits the twin, and it is nearer; the merge knows better, and says so."""
    text = (applied.upstream / "src/a.cpp").read_text()
    at = text.index("int function_2")
    twin = "int twin(int x) {\n    int y = x + 2;\n    return y;\n}\n\n"
    head = "".join(f"// line {n}\n" for n in range(3))
    (applied.upstream / "src/a.cpp").write_text(head + text[:at] + twin + text[at:])
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert "int twin(int x) {\n    int y = x + 2;\n" in (applied.tree / "src/a.cpp").read_text()
    assert "int function_2(int x) {\n    int y = x + 2 + grown();\n" in (applied.tree / "src/a.cpp").read_text()


def wrong_place(project: Tiny) -> None:
    """A patch in function_5 whose lines upstream took away there, and which one line of context finds elsewhere."""
    old = "int function_5(int x) {\n    int y = x + 5;\n    return y;\n"
    project.add_patch("astray", ("src/a.cpp", old, old.replace("    return", "    use(y);\n    return")))
    release(
        project,
        "v3",
        ("src/a.cpp", old, "int function_5(int x) {\n    return x + 5;\n"),
        ("src/a.cpp", "int function_6(int x) {\n    int y = x + 6;\n", "int function_6(int x) {\n    int y = x + 5;\n"),
    )


def test_wrong_function_is_a_conflict_that_says_where(project: Tiny, kvtool: Any) -> None:
    wrong_place(project)
    ran = kvtool("rebase", "v3", "--dry-run", "--keep-going", "--json")
    assert ran.code == 3
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "astray": "conflict"}
    (hunk,) = ran.json["patches"][2]["failed"]
    assert "it landed in line" in hunk["reason"] and "in 'int function_6(int x) {'" in hunk["reason"]
    assert "function_5" in hunk["reason"].split("it belongs")[1]


def test_apply_to_another_upstream_refuses_a_wrong_place(project: Tiny, kvtool: Any) -> None:
    wrong_place(project)
    assert kvtool("apply").code == 0
    before = everything(project)
    ran = kvtool("apply", "v3", "--json")
    assert (ran.code, ran.json["outcome"]) == (3, "conflict"), ran
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "astray": "conflict"}
    assert "it belongs" in ran.json["error"]["why"] and "kvtool rebase v3" in ran.json["error"]["next"]
    assert everything(project) == before


def test_lines_that_are_gone_show_up_in_the_report(applied: Tiny, kvtool: Any) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool twenty;\n"))
    ran = kvtool("rebase", "v3", "--dry-run", "--json", "--mirror", applied.upstream)
    (hunk,) = ran.json["patches"][0]["failed"]
    assert (hunk["path"], hunk["number"], hunk["total"]) == ("src/b.h", 1, 1)
    assert hunk["expected"] == ["    bool two;", "    bool three;"]
    assert hunk["wanted"] == ["    bool two;", "    bool dynamic;", "    bool three;"]
    assert hunk["found"] == ["    bool twenty;", "    bool three;"]
    assert hunk["behind"].endswith("upstream: v3")
    human = kvtool("rebase", "v3", "--dry-run", "--mirror", applied.upstream)
    assert "| " + "    bool twenty;" in human.out and "upstream: v3" in human.out


def squashed(project: Tiny, tag: str, folder: Path) -> Path:
    """A repository with one tag of upstream and no history."""
    shutil.copytree(project.upstream, folder, ignore=shutil.ignore_patterns(".git"))
    git(folder, "init", "-q")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-qm", "squashed")
    git(folder, "tag", tag)
    return folder


def test_unknown_tag_by_a_mirror_without_history(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    tree = release(applied, "b12345", ("src/a.cpp", "x + 7", "x + 77"), lock=False)
    mirror = squashed(applied, "b12345", tmp_path / "mirror")
    git(applied.upstream, "tag", "-d", "b12345")
    before = everything(applied)
    ran = kvtool("rebase", "b12345", "--mirror", mirror, "--dry-run", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "rehearsed")
    assert everything(applied) == before
    ran = kvtool("rebase", "b12345", "--mirror", mirror, "--json")
    assert ran.code == 0, ran
    lock = tomllib.loads((applied.root / "patches/upstream.lock").read_text())
    assert lock["current"] == "b12345"
    assert lock["upstream"][-1] == {"tag": "b12345", "date": "2026-01-02", "tree": tree, "sources": []}
    assert kvtool("status", "--json").json["state"] == "clean"


def test_conflict_in_a_mirror_without_history_says_so(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool twenty;\n"), lock=False)
    mirror = squashed(applied, "v3", tmp_path / "mirror")
    ran = kvtool("rebase", "v3", "--dry-run", "--json", "--mirror", mirror)
    assert "no history" in ran.json["patches"][0]["failed"][0]["behind"]


@pytest.mark.parametrize("tag", ["v9", "../x", "-x", "a..b"])
def test_unknown_tag_that_nobody_has(applied: Tiny, kvtool: Any, tag: str) -> None:
    before = everything(applied)
    ran = kvtool("rebase", "--json", "--", tag)
    assert ran.code == 2, ran
    assert everything(applied) == before


def test_from_and_until_decide_on_the_new_upstream(project: Tiny, kvtool: Any) -> None:
    project.add_patch("late", ("src/b.h", "bool one;", "bool one; // new"), extra='from = "v2"\n')
    project.add_patch("early", ("src/b.h", "bool three;", "bool three; // old"), extra='until = "v2"\n')
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    assert outcomes(ran) == {"flag": "applied", "use": "applied", "late": "applied", "early": "skipped"}
    assert "bool one; // new" in (project.tree / "src/b.h").read_text()


def test_commit_of_the_users_on_the_target_branch_is_kept(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "branch", "kvtool/v2", "HEAD~1")
    git(applied.tree, "checkout", "-q", "kvtool/v2")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "mine")
    git(applied.tree, "checkout", "-q", "kvtool/v1")
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 4 and "kvtool/v2" in ran.json["error"]["what"]
    assert git(applied.tree, "log", "-1", "--format=%s", "kvtool/v2") == "mine" and current(applied) == "v1"


# --- refusals -----------------------------------------------------------------------------------------------------


def dirty(project: Tiny) -> None:
    (project.tree / "src/b.h").write_text("mine")


def untracked(project: Tiny) -> None:
    (project.tree / "mine.txt").write_text("mine")


def commit(project: Tiny) -> None:
    dirty(project)
    git(project.tree, "commit", "-qam", "mine")


def killed_export(project: Tiny) -> None:
    (project.state / "export.json").write_text("{}")


def users_rebase(project: Tiny) -> None:
    (project.tree / ".git/rebase-merge").mkdir()


@pytest.mark.parametrize("trouble", [dirty, untracked, commit, killed_export, users_rebase])
def test_work_in_the_tree_is_refused(applied: Tiny, kvtool: Any, trouble: Any) -> None:
    trouble(applied)
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 4 and ran.json["error"]["next"], ran
    assert current(applied) == "v1" and not (applied.state / "rebase.json").exists()


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--all",),
        ("--all", "--dry-run", "v2"),
        ("v2", "--keep-going"),
        ("v2", "--abort"),
        ("v2", "--continue"),
        ("--continue", "--abort"),
        ("--abort", "--skip", "use"),
        ("--dry-run",),
        ("v2", "--markdown", "x.md"),
        ("v2", "--skip", "nonsense"),
        ("--continue",),
        ("--abort",),
        ("--skip", "use"),
    ],
)
def test_combinations_that_mean_nothing(applied: Tiny, kvtool: Any, args: tuple[str, ...]) -> None:
    ran = kvtool("rebase", *args, "--json")
    assert ran.code == 2 and ran.json["error"]["next"], ran


# --- a conflict, to the end ---------------------------------------------------------------------------------------


@pytest.fixture
def stopped(applied: Tiny, kvtool: Any) -> Tiny:
    """Where a rebase onto v3 stops at `block`; `more` changes what block brings, `tail` has its place."""
    applied.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 4;\n    one();\n    mid();\n    last();\n"))
    applied.add_patch("more", ("src/a.cpp", "mid();", "mid(1);"))
    applied.add_patch("tail", ("src/a.cpp", "x + 6;", "x + 6 + 1;"))
    release(applied, "v3", ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("apply").code == 0
    return applied


ALL = {"flag": "applied", "use": "applied", "block": "applied", "more": "applied", "tail": "applied"}


def test_conflict_stops_in_the_tree_and_tells_of_all(stopped: Tiny, kvtool: Any) -> None:
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
    assert status["state"] == "in-progress" and "--continue" in status["next"] and "'block'" in kvtool("status").out
    for args in (("apply",), ("export",), ("rebase", "v3"), ("apply", "v1")):
        refused = kvtool(*args, "--json")
        assert refused.code == 4 and "rebase" in refused.json["error"]["next"], args
    assert (stopped.tree / "src/a.cpp").read_text() == text


BLOCK = ("src/a.cpp", "x + 44;\n", "x + 44;\n    one();\n    mid();\n    last();\n")


def resolve(project: Tiny, path: str, old: str, new: str) -> None:
    """What a person makes of a conflict: upstream's file with `old` replaced."""
    upstream = git(project.tree, "show", f"HEAD:{path}", strip=False)
    assert upstream.count(old) == 1
    (project.tree / path).write_text(upstream.replace(old, new))


def finished(project: Tiny, kvtool: Any) -> None:
    """The rebase is through: all says v3, and again gives the same."""
    assert current(project) == "v3"
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    again = kvtool("apply", "--tree", project.root / "again", "--json")
    assert again.json["head"] == git(project.tree, "rev-parse", "HEAD")
    left = {p.name for p in project.state.iterdir()} - {"state.json", "range-diff"}
    assert not left and not (project.tree / ".git/MERGE_MSG").exists()


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


def test_abort_restores_everything(stopped: Tiny, kvtool: Any) -> None:
    before = everything(stopped)
    assert kvtool("rebase", "v3").code == 3
    (stopped.tree / "src/a.cpp").write_text("half a resolution")
    git(stopped.tree, "add", "-A")
    ran = kvtool("rebase", "--abort", "--json")
    assert (ran.code, ran.json["outcome"]) == (0, "aborted"), ran
    assert everything(stopped) == before
    assert kvtool("status", "--json").json["state"] == "clean"
    assert git(stopped.tree, "show", "refs/kvtool/rebase/kept:src/a.cpp") == "half a resolution"


@pytest.fixture
def twice(stopped: Tiny) -> Tiny:
    """Where a rebase onto v4 stops at `use` as well."""
    release(stopped, "v4", ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp x)"))
    return stopped


USE = ("CMakeLists.txt", "src/a.cpp x)", "src/a.cpp x src/new.cpp)")


def resolve_use(project: Tiny) -> None:
    resolve(project, *USE)
    resolve(project, "src/a.cpp", "int y = x + 2;", "int y = x + 2 + grown();")


def test_abort_after_a_resolution(twice: Tiny, kvtool: Any) -> None:
    before = everything(twice)
    assert kvtool("rebase", "v4", "--json").json["stopped_at"] == "use"
    resolve_use(twice)
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"
    assert kvtool("rebase", "--abort").code == 0
    assert everything(twice) == before


def test_rerere_fills_in_an_earlier_resolution(twice: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v4")
    resolve_use(twice)
    resolved = (twice.tree / "CMakeLists.txt").read_text()
    kvtool("rebase", "--continue")
    kvtool("rebase", "--abort")
    ran = kvtool("rebase", "v4", "--json")
    assert (ran.json["stopped_at"], ran.json["filled_in"]) == ("use", ["CMakeLists.txt"])
    assert "look at it: CMakeLists.txt" in ran.json["error"]["next"]
    assert (twice.tree / "CMakeLists.txt").read_text() == resolved
    assert kvtool("rebase", "--continue", "--json").json["stopped_at"] == "block"


@pytest.mark.parametrize("when", ["at once", "at the stop"])
def test_skip_sets_until(stopped: Tiny, kvtool: Any, when: str) -> None:
    if when == "at once":
        ran = kvtool("rebase", "v3", "--skip", "block", "--json")
    else:
        kvtool("rebase", "v3")
        ran = kvtool("rebase", "--skip", "block", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "more"), ran  # it needs block, so it is in the way now
    ran = kvtool("rebase", "--skip", "more", "--json")
    assert outcomes(ran) == {**ALL, "block": "skipped", "more": "skipped"}
    series = tomllib.loads((stopped.root / "patches/series.toml").read_text())["patch"]
    assert [patch.get("until") for patch in series] == [None, None, "v3", "v3", None]
    finished(stopped, kvtool)


def test_drop_takes_the_patch_out_when_all_is_through(stopped: Tiny, kvtool: Any) -> None:
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


def test_another_patch_than_the_one_it_stopped_at(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    ran = kvtool("rebase", "--drop", "use", "--json")
    assert ran.code == 2 and "'block'" in ran.json["error"]["what"]


# --- lost lines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def shrunk(applied: Tiny) -> Tiny:
    """Upstream has one of the two hunks of `use`."""
    release(applied, "v3", ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp src/new.cpp)"))
    return applied


def test_lost_hunk_is_an_error_until_accepted(shrunk: Tiny, kvtool: Any) -> None:
    before = shrunk.snapshot()
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "use"), ran
    assert ran.json["patches"][1]["lost"] == "1 of 2 hunks, 2 of 4 lines"
    assert "--accept-shrink use" in ran.json["error"]["next"] and shrunk.snapshot() == before
    assert kvtool("rebase", "--continue").code == 3  # nothing was put back
    ran = kvtool("rebase", "--accept-shrink", "use", "--json")
    assert ran.code == 0, ran
    assert "CMakeLists" not in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


def test_shrink_accepted_from_the_beginning(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3", "--dry-run").code == 3
    assert kvtool("rebase", "v3", "--accept-shrink", "use", "--dry-run").code == 0
    assert kvtool("rebase", "v3", "--accept-shrink", "use").code == 0
    finished(shrunk, kvtool)


def test_lost_hunk_put_back(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3").code == 3
    (shrunk.tree / "CMakeLists.txt").write_text("project(small)\nadd_library(a src/a.cpp src/new.cpp)\n")
    assert kvtool("rebase", "--continue").code == 0
    assert "+project(small)" in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


def test_resolution_that_takes_upstreams_side_loses_the_patch(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    git(stopped.tree, "checkout", "-q", "HEAD", "--", "src/a.cpp")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "block") and "1 of 1 hunks" in ran.json["error"]["what"]
    ran = kvtool("rebase", "--abort")
    assert ran.code == 0


# --- nothing is changed unless all of it is -----------------------------------------------------------------------


def test_dry_run_writes_nothing(stopped: Tiny, kvtool: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache/upstream.git"
    for tag in ("v2", "v3"):
        kvtool("fetch", tag)
    objects = sorted(str(p) for p in (*cache.rglob("*"), *(stopped.tree / ".git").rglob("*")))
    before = everything(stopped)
    ran = kvtool("rebase", "v3", "--dry-run", "--json")
    assert ran.code == 3 and list(outcomes(ran)) == ["flag", "use", "block"]  # ends there without --keep-going
    assert kvtool("rebase", "v2", "--dry-run", "--keep-going").code == 0
    assert everything(stopped) == before
    assert sorted(str(p) for p in (*cache.rglob("*"), *(stopped.tree / ".git").rglob("*"))) == objects


def test_ignored_file_in_the_way_changes_nothing(applied: Tiny, kvtool: Any) -> None:
    (applied.upstream / "build-x").mkdir()
    (applied.upstream / "build-x/file").write_text("theirs")
    git(applied.upstream, "add", "-f", "build-x/file")
    release(applied, "v3")
    (applied.tree / "build-x").mkdir()
    (applied.tree / "build-x/file").write_text("mine")
    before = everything(applied)
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 4 and "build-x/file" in ran.json["error"]["output"], ran
    assert everything(applied) == before and kvtool("status", "--json").json["state"] == "clean"
    (applied.tree / "build-x/file").unlink()
    assert kvtool("rebase", "v3").code == 0
    finished(applied, kvtool)


def test_project_that_cannot_be_written_changes_nothing(applied: Tiny, kvtool: Any, monkeypatch: Any) -> None:
    from kvtool.errors import DiskError
    from kvtool.tree import relock

    release(applied, "v3", ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n"))
    before = everything(applied)
    real = relock.put_file

    def full(path: Path, change: Any) -> None:
        if change.path.endswith(".lock") and change.action == "new":
            raise OSError(28, "No space left on device")
        real(path, change)

    monkeypatch.setattr(relock, "put_file", full)
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["error"]["code"]) == (1, DiskError.code)
    assert everything(applied) == before and not (applied.state / "rebase.json").exists()


def test_patches_that_change_during_a_rebase(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    resolve(stopped, *BLOCK)
    later = stopped.root / "patches/tail.patch"
    later.write_text(later.read_text().replace("x + 6 + 1", "x + 6 + 2"))
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 4 and "changed since the rebase began" in ran.json["error"]["what"], ran
    later.write_text(later.read_text().replace("x + 6 + 2", "x + 6 + 1"))
    assert kvtool("rebase", "--continue").code == 0


def test_users_settings_do_not_show(stopped: Tiny, kvtool: Any) -> None:
    settings = {
        "diff.noprefix": "true",
        "diff.context": "9",
        "diff.external": "false",
        "core.autocrlf": "true",
        "commit.gpgsign": "true",
        "merge.conflictStyle": "merge",
        "merge.ff": "only",
        "rerere.enabled": "false",
        "rerere.autoUpdate": "true",
        "merge.default": "mine",
        "merge.mine.driver": "false",
        "core.hooksPath": str(stopped.root / "hooks"),
        "advice.detachedHead": "true",
        "checkout.defaultRemote": "x",
        "format.attach": "true",
    }
    for file in (Path(os.environ["HOME"]) / ".gitconfig", stopped.tree / ".git/config"):
        for key, value in settings.items():
            git(stopped.root, "config", "--file", str(file), key, value)
    (stopped.root / "hooks").mkdir()
    for hook in ("post-checkout", "pre-commit", "reference-transaction"):
        (stopped.root / "hooks" / hook).write_text("#!/bin/sh\nexit 1\n")
        (stopped.root / "hooks" / hook).chmod(0o755)
    assert kvtool("rebase", "v3").code == 3
    text = (stopped.tree / "src/a.cpp").read_text()
    assert "||||||| " in text and "\r" not in text
    resolve(stopped, *BLOCK)
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 0, ran
    assert "--- a/src/a.cpp" in (stopped.root / "patches/block.patch").read_text()
    finished(stopped, kvtool)


# --- the span -----------------------------------------------------------------------------------------------------


def test_table_over_every_upstream(stopped: Tiny, kvtool: Any, tmp_path: Path) -> None:
    text = (stopped.root / "patches/upstream.lock").read_text()
    gone = '\n[[upstream]]\ntag = "v0"\ndate = "2025-01-01"\ntree = "{}"\nsources = []\n'
    (stopped.root / "patches/upstream.lock").write_text(text + gone.format("a" * 40))
    before = everything(stopped)
    table = tmp_path / "span.md"
    ran = kvtool("rebase", "--dry-run", "--keep-going", "--all", "--markdown", table, "--json")
    assert ran.code == 3, ran
    assert {row["tag"]: row["outcome"] for row in ran.json["rows"]} == {
        "v1": "complete",
        "v2": "complete",
        "v3": "conflict",
        "v0": "failed",
    }
    assert {p["id"]: p["outcome"] for p in ran.json["rows"][2]["patches"]} == {
        **ALL,
        "block": "conflict",
        "more": "blocked",
    }
    assert "| v3 | 2026-02-01 | 1 | 2 | conflict (1 of 1) | blocked by block | 1 |" in table.read_text()
    assert everything(stopped) == before
    human = kvtool("rebase", "--dry-run", "--keep-going", "--all").out
    assert "conflict" in human and "v3 block: src/a.cpp hunk 1 of 1" in human


def test_json_documents(stopped: Tiny, kvtool: Any) -> None:
    dry = kvtool("rebase", "v2", "--dry-run", "--keep-going", "--json").json
    assert list(dry) == [
        "command",
        "ok",
        "tag",
        "previous",
        "tree",
        "outcome",
        "head",
        "stopped_at",
        "range_diff",
        "files",
        "patches",
        "seconds",
        "filled_in",
    ]
    assert sorted(dry["patches"][0]) == sorted(
        ["id", "outcome", "commit", "hunks", "added", "removed", "failed", "blocked_by", "moved", "lost", "seconds"]
    )
    assert json.dumps(dry)

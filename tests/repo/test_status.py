"""Test kvtool status with real git and a tiny upstream, and the state file that it reads."""

from __future__ import annotations

import json

from tests.conftest import Tiny, git
from tests.repo.edits import change_series


def test_status_of_each_state(project: Tiny, kvtool) -> None:
    def state() -> str:
        ran = kvtool("status", "--json")
        assert ran.code == 0
        return str(ran.json["state"])

    assert state() == "not-applied"
    kvtool("apply")
    assert state() == "clean"
    change_series(project)
    assert state() == "stale"
    kvtool("apply")
    (project.tree / "src/b.h").write_text("mine\n")
    assert state() == "dirty"
    git(project.tree, "commit", "-qam", "my work")
    assert state() == "commits"
    (project.tree / ".git/MERGE_HEAD").write_text("x")
    assert state() == "in-progress"
    (project.state / "pending.json").write_text("{}")
    assert state() == "interrupted"


def test_foreign_directory_is_reported(project: Tiny, kvtool) -> None:
    (project.tree / "theirs").mkdir(parents=True)
    for command in (("status",), ("apply",), ("build",)):
        ran = kvtool(*command, "--json")
        said = ran.json if ran.code == 0 else {"why": ran.json["error"]["why"], "next": ran.json["error"]["next"]}
        assert "unknown files" in said["why"] and "move it away" in said["next"], ran


def test_next_step_names_tree(project: Tiny, kvtool, tmp_path) -> None:
    assert kvtool("status", "--json").json["next"] == "kvtool apply"
    elsewhere = ("--tree", tmp_path / "a tree")
    assert kvtool("status", "--json", *elsewhere).json["next"] == f"kvtool apply --tree '{tmp_path}/a tree'"
    kvtool("apply", *elsewhere)
    change_series(project)
    assert kvtool("status", "--json", *elsewhere).json["next"] == f"kvtool apply --tree '{tmp_path}/a tree'"
    (tmp_path / "a tree/src/a.cpp").write_text("mine\n")
    assert f", then kvtool export --tree '{tmp_path}/a tree'; or" in kvtool("export", *elsewhere).err
    named = kvtool("build", "--json", *elsewhere, "--project", project.root).json["error"]["next"]
    assert f", then kvtool export --tree '{tmp_path}/a tree' --project {project.root}; or" in named


def test_changed_lock_is_stale(project: Tiny, kvtool) -> None:
    kvtool("apply")
    project.write_lock(current="v2")
    status = kvtool("status", "--json").json
    assert status["state"] == "stale" and "v2" in status["why"]
    assert kvtool("apply", "--json").json["tag"] == "v2"


def test_lines_and_unlisted_patches(project: Tiny, kvtool) -> None:
    kvtool("apply")
    (project.root / "patches/forgotten.patch").write_text("x")
    status = kvtool("status", "--json").json
    assert status["upstream_lines"] == 1 + 2 + 2
    assert status["unlisted"] == ["forgotten.patch"]
    assert "5 changed lines in upstream's files, 2 files" in kvtool("status").out
    series = project.root / "patches/series.toml"
    series.write_text("goal_lines = 25\n" + series.read_text())
    assert "goal < 25 a group: without a group 5" in kvtool("status").out


def test_changed_reason_is_not_stale(project: Tiny, kvtool) -> None:
    kvtool("apply")
    path = project.root / "patches/series.toml"
    path.write_text(path.read_text().replace("because of flag", "another reason"))
    assert kvtool("status", "--json").json["state"] == "clean"


def test_state_on_disk_is_json(project: Tiny, kvtool) -> None:
    kvtool("apply")
    data = json.loads((project.state / "state.json").read_text())
    assert set(data) == {"tag", "tree", "digest", "base", "head", "pinned", "patches", "groups"}


def test_stopped_rebase_shows_no_table(stopped: Tiny, kvtool) -> None:
    assert "flag" in kvtool("status").out
    assert kvtool("rebase", "v3").code == 3
    doc = kvtool("status", "--json").json
    assert (doc["state"], doc["tag"], doc["patches"], doc["reasons"]) == ("in-progress", "", [], [])
    assert "v3" in doc["why"] and "--continue" in doc["next"]


def test_status_explains_each_patch(project: Tiny, kvtool) -> None:
    def states() -> dict[str, str]:
        return {reason["id"]: reason["state"] for reason in kvtool("status", "--json").json["reasons"]}

    project.add_patch("late", ("src/a.cpp", "x + 7;", "x + 7 + 7;"), extra='from = "v2"\n')
    kvtool("apply")
    assert states() == {"flag": "applied", "use": "applied", "late": "left-out"}
    assert "late: left-out: series.toml includes it from v2, and the tree is on v1" in kvtool("status").out
    assert "flag: applied" not in kvtool("status").out, "patches without a problem are not listed"
    project.add_patch("more", ("src/a.cpp", "x + 6;", "x + 6 + 6;"))
    patch = project.root / "patches/flag.patch"
    patch.write_text(patch.read_text().replace("bool dynamic;", "bool dyn;"))
    series = project.root / "patches/series.toml"
    text = series.read_text()
    series.write_text(text.replace('\n[[patch]]\nid = "use"\nwhy = "because of use"\n', ""))
    assert states() == {"flag": "changed", "late": "left-out", "more": "new", "use": "gone"}
    series.write_text(text)
    kvtool("apply")
    assert states() == {"flag": "applied", "use": "applied", "late": "left-out", "more": "applied"}

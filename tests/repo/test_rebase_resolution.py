"""Test when a conflict counts as resolved. Also test --abort, --skip, --drop and --continue at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import everything, outcomes, release

EXITS = [("--abort",), ("--skip", "block"), ("--drop", "block"), ("--continue",)]


def with_attributes(project: Tiny, kvtool: Any, text: str) -> None:
    """Move the series to an upstream with a .gitattributes. Then stop a rebase onto v4 at the patch `block`."""
    write_files(project.upstream, {".gitattributes": text})
    git(project.upstream, "add", "-A")
    project.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 40;\n"))
    release(project, "v3")
    assert kvtool("rebase", "v3").code == 0
    release(project, "v4", ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("rebase", "v4", "--json").json["stopped_at"] == "block"


@pytest.mark.parametrize("size", [3, 7, 9, 32, 200])
@pytest.mark.parametrize("left", ["all", "start", "middle", "end"])
def test_conflict_markers_of_any_size(applied: Tiny, kvtool: Any, size: int, left: str) -> None:
    with_attributes(applied, kvtool, f"*.cpp conflict-marker-size={size}\n")
    file = applied.tree / "src/a.cpp"
    text = file.read_text()
    assert f"\n{'<' * size} HEAD\n" in text
    kept = {"start": "<", "middle": "=", "end": ">", "all": "<|=>"}[left]
    rows = text.split("\n")
    file.write_text("\n".join(r for r in rows if r[:size] not in [c * size for c in "<|=>"] or r[0] in kept))
    ran = kvtool("rebase", "--continue", "--json")
    assert ran.code == 3 and ran.json["error"]["why"] == "conflict markers are left in src/a.cpp"
    assert kvtool("status", "--json").json["state"] == "in-progress"
    assert "<<<" not in (applied.root / "patches/block.patch").read_text()
    rows = [r for r in rows if r[:size] not in [c * size for c in "<|=>"] and "x + 4;" not in r and "x + 44;" not in r]
    file.write_text("\n".join(rows))
    assert kvtool("rebase", "--continue").code == 0
    assert "x + 40;" in (applied.root / "patches/block.patch").read_text()


@pytest.mark.parametrize("attribute", ["merge=union", "merge=nonsense", "-merge", "merge=binary", "-text -diff"])
def test_attributes_do_not_hide_conflict(applied: Tiny, kvtool: Any, attribute: str) -> None:
    with_attributes(applied, kvtool, f"*.cpp {attribute}\n")
    assert git(applied.tree, "status", "--porcelain", strip=False).startswith("UU src/a.cpp")
    text = (applied.tree / "src/a.cpp").read_text()
    assert "x + 40;" not in text or "<<<<<<< HEAD\n" in text
    assert kvtool("rebase", "--continue", "--json").code == 3
    (applied.tree / "src/a.cpp").write_text(text.split("<<<<<<<")[0].rstrip() + "\nint end;\n")
    assert kvtool("rebase", "--continue").code == 0


def test_marker_like_lines_are_kept(applied: Tiny, kvtool: Any) -> None:
    lines = "one\n<<<<<<< HEAD\n=======\n>>>>>>> x\nend\n"
    write_files(applied.upstream, {"docs/merge.txt": lines})
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    file = applied.tree / "docs/merge.txt"
    file.write_text(lines.replace("one", "two") + lines)
    git(applied.tree, "commit", "-qam", "docs")
    assert kvtool("export").code == 0
    release(applied, "v4", ("docs/merge.txt", "one", "three"))
    assert kvtool("rebase", "v4", "--json").json["stopped_at"] == "docs"
    assert kvtool("rebase", "--continue").code == 3
    file.write_text(lines.replace("one", "two three") + lines)
    assert kvtool("rebase", "--continue").code == 0


@pytest.mark.parametrize("way", EXITS)
@pytest.mark.parametrize("cone", ["--no-cone", "--cone"])
def test_conflict_outside_sparse_checkout(applied: Tiny, kvtool: Any, way: tuple[str, ...], cone: str) -> None:
    applied.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 40;\n"))
    release(applied, "v3", ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("apply").code == 0
    git(applied.tree, "sparse-checkout", "set", cone, *(("/docs/", "/CMakeLists.txt") if "no" in cone else ("docs",)))
    assert not (applied.tree / "src/a.cpp").exists()
    head = git(applied.tree, "rev-parse", "HEAD")
    assert kvtool("rebase", "v3", "--json").json["stopped_at"] == "block"
    if way == ("--continue",):
        assert kvtool("rebase", *way).code == 3
        file = applied.tree / "src/a.cpp"
        before, rest = file.read_text().split("<<<<<<<")
        file.write_text(before + "    int y = x + 40;\n" + rest.split(">>>>>>>")[1].partition("\n")[2])
    ran = kvtool("rebase", *way, "--json")
    assert ran.code == 0, ran
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    assert (git(applied.tree, "rev-parse", "HEAD") == head) == (way == ("--abort",))
    assert (applied.root / "patches/block.patch").exists() == (way != ("--drop", "block"))


@pytest.fixture
def submodule(applied: Tiny, kvtool: Any, tmp_path: Path) -> tuple[Tiny, list[str]]:
    """Stop a rebase at a patch that changes a submodule which upstream changes, too.

    Return the project and the commits of the submodule.
    """
    module = tmp_path / "module"
    module.mkdir()
    git(module, "init", "-q")
    for name in "abc":
        git(module, "commit", "-q", "--allow-empty", "-m", name)
    commits = git(module, "rev-list", "--reverse", "HEAD").split()

    def point(repo: Path, commit: str, message: str) -> None:
        (repo / "ext/module").mkdir(parents=True, exist_ok=True)
        git(repo, "update-index", "--add", "--cacheinfo", f"160000,{commit},ext/module")
        git(repo, "commit", "-qm", message)

    point(applied.upstream, commits[0], "submodule")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    point(applied.tree, commits[1], "block")
    assert kvtool("export").code == 0
    point(applied.upstream, commits[2], "newer")
    release(applied, "v4")
    return applied, commits


@pytest.mark.parametrize("way", EXITS)
def test_conflict_in_a_submodule(submodule: tuple[Tiny, list[str]], kvtool: Any, way: tuple[str, ...]) -> None:
    project, commits = submodule
    before = everything(project)
    ran = kvtool("rebase", "v4", "--json")
    assert (ran.code, outcomes(ran)["block"]) == (3, "conflict")
    (hunk,) = ran.json["patches"][2]["failed"]
    assert hunk["cause"] == "submodule" and commits[2] in hunk["found"][0]
    if way == ("--continue",):
        said = kvtool("rebase", *way, "--json")
        assert said.code == 3 and "ext/module" in said.json["error"]["why"]
        git(project.tree, *said.json["error"]["next"].split("\n")[0].replace("COMMIT", commits[1]).split()[7:])
    ran = kvtool("rebase", *way, "--json")
    assert ran.code == 0, ran
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    pointed = git(project.tree, "rev-parse", "HEAD:ext/module")
    assert pointed == (commits[1] if way in (("--continue",), ("--abort",)) else commits[2])
    assert way != ("--abort",) or everything(project) == before


def test_same_submodule_change_is_merged(submodule: tuple[Tiny, list[str]], kvtool: Any) -> None:
    project, commits = submodule
    git(project.upstream, "update-index", "--cacheinfo", f"160000,{commits[1]},ext/module")
    git(project.upstream, "commit", "-qm", "as the patch")
    release(project, "v5")
    ran = kvtool("rebase", "v5", "--json")
    assert (ran.code, outcomes(ran)["block"]) == (0, "merged")

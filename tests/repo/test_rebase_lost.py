"""Test that kvtool rebase reports each lost change, by upstream, a binary conflict or a resolution."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import finished, outcomes, release


@pytest.fixture
def shrunk(applied: Tiny) -> Tiny:
    """Give upstream one of the two hunks of `use`."""
    release(applied, "v3", ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp src/new.cpp)"))
    return applied


def test_lost_hunk_stops_until_accepted(shrunk: Tiny, kvtool: Any) -> None:
    before = shrunk.snapshot()
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "use"), ran
    assert ran.json["patches"][1]["lost"] == "1 of 2 hunks, 2 of 4 lines"
    assert "--accept-shrink use" in ran.json["error"]["next"] and shrunk.snapshot() == before
    assert kvtool("rebase", "--continue").code == 3  # nothing was restored
    ran = kvtool("rebase", "--accept-shrink", "use", "--json")
    assert ran.code == 0, ran
    assert "CMakeLists" not in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


def test_shrink_accepted_at_start(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3", "--dry-run").code == 3
    assert kvtool("rebase", "v3", "--accept-shrink", "use", "--dry-run").code == 0
    assert kvtool("rebase", "v3", "--accept-shrink", "use").code == 0
    finished(shrunk, kvtool)


def test_lost_hunk_is_restored_by_hand(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3").code == 3
    (shrunk.tree / "CMakeLists.txt").write_text("project(small)\nadd_library(a src/a.cpp src/new.cpp)\n")
    assert kvtool("rebase", "--continue").code == 0
    assert "+project(small)" in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


@pytest.mark.parametrize("side", ["base", "patch", "attributes"])
def test_binary_conflict_with_text_upstream(applied: Tiny, kvtool: Any, side: str) -> None:
    """Prevent a former bug. Only upstream's bytes were examined, so --continue accepted them and lost the patch."""
    base, mine = {"base": (b"\0one", b"two"), "patch": (b"one", b"\0two"), "attributes": (b"one\n", b"two\n")}[side]
    file = applied.upstream / "docs/picture"
    file.write_bytes(base)
    write_files(applied.upstream, {".gitattributes": "docs/picture binary\n"} if side == "attributes" else {})
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    (applied.tree / "docs/picture").write_bytes(mine)
    git(applied.tree, "commit", "-qam", "picture")
    assert kvtool("export").code == 0
    file.write_bytes(b"theirs\n")
    release(applied, "v4")
    ran = kvtool("rebase", "v4", "--json")
    assert (ran.code, ran.json["filled_in"]) == (3, [])
    said = kvtool("rebase", "--continue", "--json")
    assert said.code == 3 and "docs/picture" in said.json["error"]["why"], said
    git(applied.tree, "add", "docs/picture")  # choose upstream's bytes: nothing of the patch is left
    said = kvtool("rebase", "--continue", "--json")
    assert said.code == 3 and "'picture' loses " in said.json["error"]["what"], said
    assert kvtool("rebase", "--accept-shrink", "picture").code == 0
    assert 'until = "v4"' in (applied.root / "patches/series.toml").read_text()
    assert kvtool("export", "--check").code == 0


@pytest.mark.parametrize("kind", ["removed", "binary"])
def test_conflict_without_markers_needs_decision(applied: Tiny, kvtool: Any, kind: str) -> None:
    """Prevent a former bug. --continue accepted git's file: a removed file returned, a binary change was lost."""
    name = "src/b.h" if kind == "removed" else "docs/empty"
    if kind == "removed":
        git(applied.upstream, "rm", "-q", name)
    else:
        (applied.tree / name).write_bytes(b"\0mine\r\n")
        git(applied.tree, "commit", "-qam", "picture")
        assert kvtool("export").code == 0
        (applied.upstream / name).write_bytes(b"\0theirs")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["filled_in"]) == (3, [])
    assert "resolved as before" not in ran.json["error"]["next"]
    for _ in range(2):
        said = kvtool("rebase", "--continue", "--json").json["error"]
        assert said["exit_code"] == 3 and name in said["why"] and "add FILE, or remove it with" in said["next"]
    if kind == "removed":
        git(applied.tree, "rm", "-q", name)
        ran = kvtool("rebase", "--skip", "flag")
    else:
        (applied.tree / name).write_bytes(b"\0both")
        ran = kvtool("rebase", "--continue")
        assert (applied.tree / name).read_bytes() == b"\0both"
    assert ran.code == 0, ran
    finished(applied, kvtool)


def test_resolution_to_upstream_loses_patch(stopped: Tiny, kvtool: Any) -> None:
    kvtool("rebase", "v3")
    git(stopped.tree, "checkout", "-q", "HEAD", "--", "src/a.cpp")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "block") and "1 of 1 hunks" in ran.json["error"]["what"]
    assert git(stopped.tree, "status", "--porcelain") == ""  # no conflict is left to resolve
    ran = kvtool("rebase", "--accept-shrink", "block", "--json")
    assert (outcomes(ran)["block"], ran.json["stopped_at"]) == ("empty", "more")
    ran = kvtool("rebase", "--abort")
    assert ran.code == 0

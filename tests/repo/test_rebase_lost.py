"""Test that kvtool rebase reports each change that was lost.

A change can be lost by a change of upstream, in a conflict of a binary file, or by a resolution.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import finished, outcomes, release

ADOPTED = ("CMakeLists.txt", "src/a.cpp)", "src/a.cpp src/new.cpp)")


@pytest.mark.parametrize("more", [[], [("src/a.cpp", "// a comment", "// the comment")]], ids=["alone", "with changes"])
def test_hunk_in_upstream_is_no_loss(applied: Tiny, kvtool: Any, more: list[tuple[str, str, str]]) -> None:
    """Let upstream have one of the two hunks of the patch `use`."""
    release(applied, "v3", ADOPTED, *more)
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, outcomes(ran)["use"]) == (0, "applied"), ran
    assert ran.json["patches"][1]["moved"] == ["CMakeLists.txt hunk 1: upstream already has it"]
    assert "CMakeLists" not in (applied.root / "patches/use.patch").read_text()
    finished(applied, kvtool)


def test_file_removed_on_both_sides_is_no_loss(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "rm", "-q", "scripts/run.sh")
    (applied.tree / "docs/empty").write_text("x\n")
    git(applied.tree, "commit", "-qam", "clean up")
    assert kvtool("export").code == 0
    git(applied.upstream, "rm", "-q", "scripts/run.sh")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, outcomes(ran)["clean-up"]) == (0, "applied"), ran
    assert "run.sh" not in (applied.root / "patches/clean-up.patch").read_text()
    finished(applied, kvtool)


def test_reverted_patch_is_reported(applied: Tiny, kvtool: Any) -> None:
    """Use a patch that upstream first applied, then reverted, and then applied again."""
    taken = ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n")
    release(applied, "v3", taken)
    assert kvtool("rebase", "v3").code == 0
    release(applied, "v4", (taken[0], taken[2], taken[1]))
    ran = kvtool("rebase", "v4", "--json")
    assert (ran.code, outcomes(ran)["flag"]) == (0, "skipped")
    assert "upstream had this patch from v3 on, but has reverted it" in ran.json["patches"][0]["moved"][0]
    release(applied, "v5", taken)
    ran = kvtool("rebase", "v5", "--json")
    assert ran.code == 0 and ran.json["patches"][0]["moved"] == []


@pytest.mark.parametrize("change", ["skipped by the user", "changed by upstream"])
def test_ended_patch_is_not_called_reverted(applied: Tiny, kvtool: Any, change: str) -> None:
    taken = ("src/b.h", "    bool two;\n", "    bool two;\n    bool dynamic;\n")
    if change == "skipped by the user":
        release(applied, "v3")
        assert kvtool("rebase", "v3", "--skip", "flag").code == 0
        release(applied, "v4")
    else:
        release(applied, "v3", taken)
        assert kvtool("rebase", "v3").code == 0
        release(applied, "v4", ("src/b.h", "    bool dynamic;\n", "    int dynamic;\n"))
    ran = kvtool("rebase", "v4", "--json")
    assert ran.code == 0 and ran.json["patches"][0]["moved"] == []


@pytest.fixture
def shrunk(applied: Tiny) -> Tiny:
    """Let one of the two hunks of the patch `use` have a conflict."""
    release(applied, "v3", ("CMakeLists.txt", "(a src/a.cpp)", "(a src/a.cpp src/c.cpp)"))
    return applied


def test_lost_hunk_stops_until_accepted(shrunk: Tiny, kvtool: Any) -> None:
    before = shrunk.snapshot()
    assert kvtool("rebase", "v3").code == 3
    git(shrunk.tree, "checkout", "-q", "HEAD", "--", "CMakeLists.txt")
    ran = kvtool("rebase", "--continue", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "use"), ran
    assert ran.json["patches"][1]["lost"] == "1 of 2 hunks, 2 of 4 lines"
    assert "--accept-shrink use" in ran.json["error"]["next"] and shrunk.snapshot() == before
    assert kvtool("rebase", "--continue").code == 3  # the lost lines were not restored
    ran = kvtool("rebase", "--accept-shrink", "use", "--json")
    assert ran.code == 0, ran
    assert "CMakeLists" not in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


def test_shrink_accepted_at_start(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3", "--accept-shrink", "use").code == 3
    git(shrunk.tree, "checkout", "-q", "HEAD", "--", "CMakeLists.txt")
    assert kvtool("rebase", "--continue").code == 0
    finished(shrunk, kvtool)


def test_lost_hunk_is_restored_by_hand(shrunk: Tiny, kvtool: Any) -> None:
    assert kvtool("rebase", "v3").code == 3
    git(shrunk.tree, "checkout", "-q", "HEAD", "--", "CMakeLists.txt")
    assert kvtool("rebase", "--continue").code == 3
    (shrunk.tree / "CMakeLists.txt").write_text("project(small)\nadd_library(a src/a.cpp src/c.cpp)\n")
    assert kvtool("rebase", "--continue").code == 0
    assert "+project(small)" in (shrunk.root / "patches/use.patch").read_text()
    finished(shrunk, kvtool)


@pytest.mark.parametrize("side", ["base", "patch", "attributes"])
def test_binary_conflict_with_text_upstream(applied: Tiny, kvtool: Any, side: str) -> None:
    """Prevent a bug that happened before: --continue accepted upstream's bytes, and the patch was lost.

    The reason was that only upstream's bytes were searched for zeros, which mark a binary file.
    """
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
    git(applied.tree, "add", "docs/picture")  # if the user chooses upstream's bytes, nothing of the patch is left
    said = kvtool("rebase", "--continue", "--json")
    assert said.code == 3 and "'picture' loses " in said.json["error"]["what"], said
    assert kvtool("rebase", "--accept-shrink", "picture").code == 0
    assert 'until = "v4"' in (applied.root / "patches/series.toml").read_text()
    assert kvtool("export", "--check").code == 0


@pytest.mark.parametrize("kind", ["removed", "binary"])
def test_conflict_without_markers_needs_decision(applied: Tiny, kvtool: Any, kind: str) -> None:
    """Prevent a bug that happened before: --continue accepted the file as git left it.

    Then a removed file returned, or the change of a binary file was lost.
    """
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
    assert "git resolved these as before" not in ran.json["error"]["next"]
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
    assert git(stopped.tree, "status", "--porcelain") == ""  # there is no conflict to resolve any more
    ran = kvtool("rebase", "--accept-shrink", "block", "--json")
    assert (outcomes(ran)["block"], ran.json["stopped_at"]) == ("empty", "more")
    ran = kvtool("rebase", "--abort")
    assert ran.code == 0


@pytest.mark.parametrize("place", ["src/a.cpp", "src/far.cpp"])
def test_removed_lines_that_upstream_moved(applied: Tiny, kvtool: Any, place: str) -> None:
    """Prevent a bug that happened before: the report said that upstream has the patch.

    The reason was that the lines were not at their old place any more.
    """
    lines = "int function_3(int x) {\n    int y = x + 3;\n    return y;\n}\n\n"
    file = applied.tree / "src/a.cpp"
    file.write_text(file.read_text().replace(lines, ""))
    git(applied.tree, "commit", "-qam", "drop three")
    assert kvtool("export").code == 0
    theirs = applied.upstream / "src/a.cpp"
    theirs.write_text(theirs.read_text().replace(lines, ""))
    there = applied.upstream / place
    there.write_text((there.read_text() if there.exists() else "// far\n\n") + lines)
    git(applied.upstream, "add", "-A")
    release(applied, "v3")
    ran = kvtool("rebase", "v3", "--json")
    assert (ran.code, ran.json["stopped_at"]) == (3, "drop-three"), ran
    (hunk,) = ran.json["patches"][2]["failed"]
    assert hunk["reason"].startswith(f"upstream moved the lines that the patch removes to {place}:"), hunk
    said = kvtool("rebase", "--continue", "--json")
    assert said.code == 3 and "'drop-three' loses " in said.json["error"]["what"], said
    moved = applied.tree / place
    moved.write_text(moved.read_text().replace(lines, ""))
    assert kvtool("rebase", "--continue").code == 0
    assert "-int function_3" in (applied.root / "patches/drop-three.patch").read_text()
    finished(applied, kvtool)

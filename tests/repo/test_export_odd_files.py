"""Test files that cpp/ cannot hold: hidden files, links and submodules. They must stay in patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.edits import files
from tests.repo.rebases import release
from tests.repo.test_export import round_trip


def commit(project: Tiny, message: str) -> None:
    git(project.tree, "add", "-fA")
    git(project.tree, "commit", "-qm", message)


@pytest.mark.parametrize("path", [".hidden", ".github/workflows/mine.yml", "src/x~", "README.md"])
def test_ignored_name_becomes_a_patch(applied: Tiny, kvtool: Any, tmp_path: Path, path: str) -> None:
    file = applied.tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x\n")
    commit(applied, "odd: add a file")
    assert files(kvtool("export", "--json"))["patches/odd-add-a-file.patch"] == "add"
    assert not (applied.root / "cpp" / path).is_file() or path == "README.md"
    round_trip(applied, kvtool, tmp_path)
    assert not [finding for finding in kvtool("lint", "--json").json["findings"] if finding["rule"] == "new-file"]
    file.write_text("y\n")
    commit(applied, "fixup! odd: add a file")
    assert files(kvtool("export", "--json")) == {"patches/odd-add-a-file.patch": "change"}
    assert kvtool("rebase", "v2").code == 0
    assert file.read_text() == "y\n"
    git(applied.tree, "rm", "-q", path)
    commit(applied, "fixup! odd: add a file")
    assert files(kvtool("export", "--json"))["patches/odd-add-a-file.patch"] == "remove"
    assert kvtool("export", "--check").code == 0 and not file.exists()


def test_link_becomes_a_patch(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    (applied.tree / "src/link").symlink_to("a.cpp")
    (applied.tree / "src/plain.cpp").write_text("int plain;\n")
    commit(applied, "link: add one")
    added = files(kvtool("export", "--json"))
    assert (added["patches/link-add-one.patch"], added["cpp/src/plain.cpp"]) == ("add", "add")
    assert b"new file mode 120000" in (applied.root / "patches/link-add-one.patch").read_bytes()
    round_trip(applied, kvtool, tmp_path)
    assert kvtool("rebase", "v2").code == 0
    assert (applied.tree / "src/link").readlink() == Path("a.cpp")


def test_link_replaced_by_file(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    (applied.tree / "src/link").symlink_to("a.cpp")
    commit(applied, "link: add one")
    assert kvtool("export").code == 0
    (applied.tree / "src/link").unlink()
    (applied.tree / "src/link").write_text("int link;\n")
    commit(applied, "link: make it a file")
    assert files(kvtool("export", "--json")) == {
        "cpp/src/link": "add",
        "patches/link-add-one.patch": "remove",
        "patches/series.toml": "change",
    }
    round_trip(applied, kvtool, tmp_path)


def test_submodule_becomes_a_patch(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    (applied.tree / ".gitmodules").write_text('[submodule "x"]\n\tpath = vendor/x\n\turl = https://example.org/x\n')
    git(applied.tree, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendor/x")
    (applied.tree / "vendor/x").mkdir(parents=True)
    git(applied.tree, "add", ".gitmodules")
    git(applied.tree, "commit", "-qm", "vendor: add x")
    assert kvtool("export").code == 0
    assert b"+Subproject commit 1111" in (applied.root / "patches/vendor-add-x.patch").read_bytes()
    round_trip(applied, kvtool, tmp_path)
    assert kvtool("rebase", "v2").code == 0
    assert git(applied.tree, "ls-tree", "HEAD", "vendor/x").split()[0] == "160000"


def take(project: Tiny, text: str) -> None:
    """Let upstream add src/new.cpp in v3."""
    (project.upstream / "src/new.cpp").write_text(text)
    git(project.upstream, "add", "src/new.cpp")
    release(project, "v3")


def test_same_file_in_upstream_is_named(applied: Tiny, kvtool: Any) -> None:
    """Let upstream have the same src/new.cpp, byte for byte.

    The error must say that the user can remove it from cpp/.
    """
    take(applied, "int brand_new;\n")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 2 and "the same content" in ran.json["error"]["what"]
    assert "remove cpp/src/new.cpp" in ran.json["error"]["next"]
    (applied.root / "cpp/src/new.cpp").unlink()
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 0, ran
    assert (applied.tree / "src/new.cpp").read_text() == "int brand_new;\n"


def test_other_file_at_cpp_path_is_refused(applied: Tiny, kvtool: Any) -> None:
    take(applied, "int other;\n")
    ran = kvtool("rebase", "v3", "--json")
    error = ran.json["error"]
    assert ran.code == 2 and "to keep both: rename yours" in error["next"], error
    name = error["what"].split()[2]
    for command in (f"git rm cpp/{name},", f"git show HEAD:cpp/{name} > {name} in the patched tree"):
        assert command in error["next"], error


@pytest.mark.parametrize("side", ["file", "folder"])
def test_folder_and_file_at_one_path_are_refused(applied: Tiny, kvtool: Any, side: str) -> None:
    """Let upstream have a file and cpp/ a folder with the same name, or the other way round."""
    ours, theirs = ("ext/z.cpp", "ext") if side == "file" else ("ext", "ext/z.cpp")
    write_files(applied.root / "cpp", {ours: "int z;\n"})
    assert kvtool("apply").code == 0
    write_files(applied.upstream, {theirs: "x\n"})
    git(applied.upstream, "add", "ext")
    release(applied, "v3")
    error = kvtool("rebase", "v3", "--json").json["error"]
    assert error["what"].startswith(f"upstream has a {side} ext, but cpp/ has a ") and "rename" in error["next"]


def test_long_list_of_taken_files(applied: Tiny, kvtool: Any) -> None:
    for number in range(8):
        for place in (applied.root / "cpp/many", applied.upstream / "many"):
            place.mkdir(exist_ok=True)
            (place / f"{number}.txt").write_text("x\n")
    assert kvtool("apply").code == 0
    git(applied.upstream, "add", "many")
    release(applied, "v3")
    error = kvtool("rebase", "v3", "--json").json["error"]
    assert "many/4.txt and 3 more now" in error["what"] and "remove cpp/many/0.txt" in error["next"], error

"""Test kvtool diff between two states of the series, named by a tag or a revision. It must not change anything."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import Tiny, git


@pytest.fixture
def kept(project: Tiny, kvtool: Any) -> Tiny:
    """Put the project into a git repository of its own, two folders below its root, and apply the series."""
    (project.root / ".gitignore").write_text("/llama.cpp/\n")
    git(project.root.parent, "init", "-q", "--separate-git-dir", str(project.root.parent / "history"), ".")
    commit(project, "first")
    assert kvtool("apply").code == 0
    return project


def commit(project: Tiny, message: str) -> None:
    git(project.root.parent, "add", "-A", "project")
    git(project.root.parent, "commit", "-qm", message)


def fixup(project: Tiny, kvtool: Any, path: str, old: str, new: str, message: str) -> None:
    file = project.tree / path
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    git(project.tree, "commit", "-qam", message)


def changes(ran: Any) -> dict[str, str]:
    assert ran.code == 0, ran
    return {patch["id"]: patch["change"] for patch in ran.json["patches"]}


def test_default_is_diff_since_last_commit(kept: Tiny, kvtool: Any) -> None:
    ran = kvtool("diff", "--json")
    assert changes(ran) == {"": "same", "flag": "same", "use": "same"}
    assert ran.json["same"] is True and ran.json["diff"] == ""
    assert "no difference" in kvtool("diff").out
    fixup(kept, kvtool, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    assert kvtool("export").code == 0
    ran = kvtool("diff", "--json")
    assert changes(ran) == {"": "same", "flag": "changed", "use": "same"} and ran.json["same"] is False
    shown = kvtool("diff").out
    assert "    -+    bool dynamic;\n    ++    bool dyn;\n" in shown
    assert re.search(r"^[0-9a-f]{10} ! [0-9a-f]{10} flag", shown, re.MULTILINE)
    assert re.search(r"^[0-9a-f]{10} = [0-9a-f]{10} use", shown, re.MULTILINE)
    commit(kept, "second")
    assert changes(kvtool("diff", "HEAD~1", "HEAD", "--json"))["flag"] == "changed"
    assert kvtool("diff", "--json").json["same"] is True


def test_same_patches_on_two_upstreams(kept: Tiny, kvtool: Any) -> None:
    ran = kvtool("diff", "v1", "v2", "--json")
    assert changes(ran) == {"": "same", "flag": "same", "use": "same"}
    assert (ran.json["before"]["tag"], ran.json["after"]["tag"]) == ("v1", "v2")
    kept.add_patch("eight", ("src/a.cpp", "x + 8;", "x + 8 + 8;"))
    ran = kvtool("diff", "v1", "v2", "--json")
    assert changes(ran)["eight"] == "removed" and ran.json["after"]["missing"] == ["eight: conflict"]
    assert "v2: eight: conflict" in kvtool("diff", "v1", "v2").out


def test_revision_against_other_upstream(kept: Tiny, kvtool: Any) -> None:
    kept.add_patch("more", ("src/a.cpp", "x + 6;", "x + 6 + 6;"))
    kept.write_lock("v2")
    assert changes(kvtool("diff", "HEAD:v2", ".", "--json")) == {
        "": "same",
        "flag": "same",
        "use": "same",
        "more": "added",
    }
    ran = kvtool("diff", "HEAD", ".:v1", "--json")
    assert changes(ran)["more"] == "added"
    assert (ran.json["before"]["tag"], ran.json["after"]["tag"]) == ("v1", "v1")
    assert ran.json["before"]["revision"] == git(kept.root.parent, "rev-parse", "HEAD")


def test_diff_includes_cpp_files(kept: Tiny, kvtool: Any) -> None:
    (kept.root / "cpp/src/new.cpp").write_text("int brand_newer;\n")
    assert changes(kvtool("diff", "--json")) == {"": "changed", "flag": "same", "use": "same"}


def test_diff_with_patched_tree(kept: Tiny, kvtool: Any) -> None:
    assert kvtool("diff", ".", "tree", "--json").json["same"] is True
    fixup(kept, kvtool, "src/b.h", "bool dynamic;", "bool dyn;", "something of mine")
    ran = kvtool("diff", ".", "tree", "--json")
    assert [p["change"] for p in ran.json["patches"]] == ["same", "same", "same", "added"]
    assert ran.json["patches"][-1]["subject"] == "something of mine"


def test_code_of_touched_files(kept: Tiny, kvtool: Any) -> None:
    kept.add_patch("more", ("src/a.cpp", "x + 6;", "x + 6 + 6;"))
    text = kvtool("diff", "--code").out
    assert text.startswith("diff --git a/src/a.cpp b/src/a.cpp\n") and "+    int y = x + 6 + 6;" in text
    assert "b.h" not in text
    assert "no difference" in kvtool("diff", ".", ".", "--code").out
    assert "+// a comment on top" in kvtool("diff", "v1", "v2", "--code").out, "upstream's changes in those files"


def test_unusual_line_ends_are_text(kept: Tiny, kvtool: Any) -> None:
    """Expect that a form feed, a CR and U+2028 do not end a line of a patch."""
    odd = "    bool odd; // \f a \u2028 b\r\n"
    patch = kept.root / "patches/flag.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+    bool dynamic;\n", f"+{odd}".encode()))
    assert f"+{odd}" in kvtool("diff", "--code").out
    assert f"+{odd}" in kvtool("diff").out and f"+{odd}" in kvtool("diff", "--json").json["diff"]


def test_diff_changes_nothing(kept: Tiny, kvtool: Any) -> None:
    kvtool("fetch", "v2")
    cache = kept.root.parent / "cache/upstream.git"

    def everything() -> list[object]:
        refs = [git(repo, "for-each-ref") for repo in (cache, kept.tree, kept.root.parent)]
        objects = sorted(str(path) for repo in (cache, kept.tree / ".git") for path in (repo / "objects").rglob("*"))
        return [kept.snapshot(), refs, objects, git(kept.root.parent, "status", "--porcelain", "project")]

    before = everything()
    for args in (("HEAD", "."), ("v1", "v2"), (".", "tree"), ("HEAD:v2", "v2", "--code")):
        assert kvtool("diff", *args).code == 0
    assert everything() == before


@pytest.mark.parametrize(
    ("name", "says"), [("nope", "neither an upstream nor"), ("HEAD:v9", "v9"), ("start", "no patches")]
)
def test_unknown_names_are_refused(kept: Tiny, kvtool: Any, name: str, says: str) -> None:
    empty = git(kept.root.parent, "commit-tree", "4b825dc642cb6eb9a060e54bf8d69288fbee4904", "-m", "x")
    git(kept.root.parent, "tag", "start", empty)
    ran = kvtool("diff", name, ".", "--json")
    assert ran.code == 2 and says in " ".join(str(value) for value in ran.json["error"].values())


def test_tags_work_outside_repository(project: Tiny, kvtool: Any) -> None:
    assert kvtool("diff", "v1", "v2", "--json").json["same"] is True
    ran = kvtool("diff", "--json")
    assert ran.code == 2 and "is not a git repository" in ran.json["error"]["why"]


def test_git_settings_do_not_matter(kept: Tiny, kvtool: Any, monkeypatch: Any) -> None:
    kept.add_patch("more", ("src/a.cpp", "x + 6;", "x + 6 + 6;"))
    plain = [kvtool("diff").out, kvtool("diff", "--code").out]
    for key, value in (
        ("diff.noprefix", "true"),
        ("color.ui", "always"),
        ("diff.context", "9"),
        ("diff.external", "false"),
    ):
        git(kept.root.parent, "config", key, value)
        git(kept.root.parent, "config", "--global", key, value)
    assert [kvtool("diff").out, kvtool("diff", "--code").out] == plain

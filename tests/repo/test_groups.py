"""Test trees with some groups of the series: their patches and files, and the export into the whole series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git, write_files
from tests.repo.rebases import release

GROUPS = """
[[group]]
id = "base"
files = ["src/new.cpp", "tests/*"]

[[group]]
id = "more"
depends = ["base"]
files = ["src/more-*", "tools/check/*"]

[[group]]
id = "fixes"
files = []
"""


def change_toml(tiny: Tiny, old: str, new: str) -> None:
    file = tiny.root / "patches/series.toml"
    text = file.read_text()
    assert text.count(old) == 1, (old, text)
    file.write_text(text.replace(old, new))


@pytest.fixture
def layered(project: Tiny) -> Tiny:
    """Make a series with three groups: base (flag, use), more (extra, which depends on use) and fixes (typo)."""
    write_files(project.root, {"cpp/src/more-1.cpp": "int more;\n", "cpp/tests/test-kv-base.cpp": "int main() {}\n"})
    project.add_patch("extra", ("src/a.cpp", "+ grown();", "+ grown() + more;"), extra='group = "more"\n')
    project.add_patch("typo", ("src/a.cpp", "int y = x + 7;", "int y = x + 77;"), extra='group = "fixes"\n')
    change_toml(project, "# the series\n", f"# the series\n{GROUPS}")
    for name in ("flag", "use"):
        change_toml(project, f'id = "{name}"\n', f'id = "{name}"\ngroup = "base"\n')
    return project


def subjects(tiny: Tiny) -> list[str]:
    """Return the subjects of the patches' commits in the tree. The commits of upstream and of cpp/ are left out."""
    return git(tiny.tree, "log", "--format=%s", "--reverse").splitlines()[2:]


def commit(tiny: Tiny, old: str, new: str, message: str, path: str = "src/a.cpp") -> None:
    file = tiny.tree / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    git(tiny.tree, "commit", "-qam", message)


def test_apply_has_only_the_group(layered: Tiny, kvtool: Any) -> None:
    ran = kvtool("apply", "--group", "base", "--json")
    assert ran.code == 0 and ran.json["groups"] == ["base"], ran
    assert subjects(layered) == ["flag: a patch", "use: a patch"]
    assert (layered.tree / "src/new.cpp").exists() and (layered.tree / "tests/test-kv-base.cpp").exists()
    assert not (layered.tree / "src/more-1.cpp").exists() and not (layered.tree / "tools").exists()
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0


def test_apply_adds_dependencies(layered: Tiny, kvtool: Any) -> None:
    ran = kvtool("apply", "--group", "more", "--json")
    assert ran.json["groups"] == ["base", "more"], ran
    assert "adding base: more depends on it" in ran.err
    assert subjects(layered) == ["flag: a patch", "use: a patch", "extra: a patch"]


def test_fixes_apply_to_bare_upstream(layered: Tiny, kvtool: Any) -> None:
    assert kvtool("apply", "--group", "fixes").code == 0
    assert git(layered.tree, "log", "--format=%s", "--reverse").splitlines()[1:] == ["typo: a patch"]
    assert not (layered.tree / "src/new.cpp").exists()


def test_all_groups_are_whole_series(layered: Tiny, kvtool: Any) -> None:
    whole = kvtool("apply", "--json").json
    named = kvtool("apply", "--group", "fixes", "--group", "more", "--json").json
    assert named["outcome"] == "unchanged" and named["groups"] == [] and named["head"] == whole["head"]


def test_apply_without_group_restores_series(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    assert kvtool("status", "--json").json["only"] == ["base"]
    assert kvtool("apply", "--json").json["groups"] == []
    assert len(subjects(layered)) == 4 and (layered.tree / "src/more-1.cpp").exists()


def test_unknown_group_is_refused(layered: Tiny, kvtool: Any) -> None:
    ran = kvtool("apply", "--group", "most", "--json")
    assert ran.code == 2 and "base, more, fixes" in ran.json["error"]["next"], ran


def test_other_group_change_leaves_clean(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    (layered.root / "cpp/src/more-1.cpp").write_text("long more;\n")
    assert kvtool("status", "--json").json["state"] == "clean"
    (layered.root / "cpp/src/new.cpp").write_text("long brand_new;\n")
    status = kvtool("status", "--json").json
    assert status["state"] == "stale" and status["next"] == "kvtool apply --group base"


def test_removed_group_makes_tree_stale(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "fixes")
    change_toml(layered, '[[group]]\nid = "fixes"\nfiles = []\n', "")
    status = kvtool("status", "--json").json
    assert status["state"] == "stale" and "'fixes'" in status["why"]


def test_export_keeps_other_groups(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    before = layered.snapshot()
    commit(layered, "bool dynamic;", "bool dynamic; // on", "fixup! flag", "src/b.h")
    (layered.tree / "tests/test-kv-two.cpp").write_text("int main() {}\n")
    git(layered.tree, "add", "-A")
    git(layered.tree, "commit", "-qm", "fixup! flag")
    ran = kvtool("export", "--json")
    assert ran.code == 0, ran
    assert {f["path"] for f in ran.json["files"]} == {"patches/flag.patch", "cpp/tests/test-kv-two.cpp"}
    after = layered.snapshot()
    assert all(after[name] == text for name, text in before.items() if name != "patches/flag.patch")
    assert kvtool("status", "--json").json["only"] == ["base"]
    assert kvtool("apply").code == 0 and kvtool("export", "--check").code == 0


def test_export_sets_group_of_patch(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "more")
    commit(layered, "int y = x + 5;", "int y = x + 55;", "five : be larger")
    assert kvtool("export").code == 0
    text = (layered.root / "patches/series.toml").read_text()
    assert 'id = "five-be-larger"\ngroup = "more"' in text
    assert text.index("five-be-larger") < text.index('id = "typo"')
    assert kvtool("apply").code == 0 and len(subjects(layered)) == 5


def test_export_refuses_other_groups_file(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    write_files(layered.tree, {"src/more-2.cpp": "int two;\n"})
    git(layered.tree, "add", "-A")
    git(layered.tree, "commit", "-qm", "add a file")
    ran = kvtool("export", "--json")
    assert ran.code == 4 and "a file of more" in ran.json["error"]["why"], ran


def test_export_refuses_breaking_other_group(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    before = layered.snapshot()
    commit(layered, "+ grown();", "+ much_grown();", "fixup! use")
    ran = kvtool("export", "--json")
    assert ran.code == 3 and "'extra'" in ran.json["error"]["what"], ran
    assert layered.snapshot() == before


def test_mailbox_has_only_the_group(layered: Tiny, kvtool: Any, tmp_path: Path) -> None:
    kvtool("apply")
    write_files(layered.root, {"patches/base.md": "# The base\n\nIt lets things grow.\n\n## Numbers\n\nNone.\n"})
    box = tmp_path / "box"
    assert kvtool("export", "--mailbox", box, "--group", "base").code == 0
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(layered.upstream), str(clone))
    git(clone, "checkout", "-q", "v1")
    git(clone, "am", "-q", "--keep-cr", *map(str, sorted(box.iterdir())))
    assert git(clone, "log", "--format=%s", "v1..", "--reverse").splitlines() == [
        "base: add the new files",
        "flag: a patch",
        "use: a patch",
    ]
    assert git(clone, "log", "--format=%b", "HEAD~2", "-1") == "It lets things grow."
    kvtool("apply", "--group", "base")
    assert git(clone, "rev-parse", "HEAD^{tree}") == git(layered.tree, "rev-parse", "HEAD^{tree}")


def test_mailbox_refuses_missing_group(layered: Tiny, kvtool: Any, tmp_path: Path) -> None:
    kvtool("apply", "--group", "base")
    ran = kvtool("export", "--mailbox", tmp_path / "box", "--group", "fixes", "--json")
    assert ran.code == 2 and ran.json["error"]["next"] == "kvtool apply --group base --group fixes", ran
    assert kvtool("export", "--group", "base").code == 2


def test_rebase_moves_every_group(layered: Tiny, kvtool: Any) -> None:
    kvtool("apply", "--group", "base")
    ran = kvtool("rebase", "v2", "--json")
    assert ran.code == 0, ran
    assert subjects(layered) == ["flag: a patch", "use: a patch"]
    assert "a comment on top" in (layered.tree / "src/a.cpp").read_text()
    assert kvtool("status", "--json").json["only"] == ["base"]
    assert kvtool("export", "--check").code == 0
    assert kvtool("apply").code == 0 and len(subjects(layered)) == 4


def test_rebase_stops_at_another_group(layered: Tiny, kvtool: Any) -> None:
    release(layered, "v3", ("src/a.cpp", "x + 7;", "x + 700;"))
    kvtool("apply", "--group", "base")
    ran = kvtool("rebase", "v3", "--json")
    assert ran.code == 3 and ran.json["stopped_at"] == "typo", ran
    (layered.tree / "src/a.cpp").write_text(
        git(layered.tree, "show", "HEAD:src/a.cpp", strip=False).replace("x + 700", "x + 77")
    )
    assert kvtool("rebase", "--continue").code == 0
    assert subjects(layered) == ["flag: a patch", "use: a patch"]
    assert "x + 700" in (layered.tree / "src/a.cpp").read_text()
    kvtool("apply")
    assert "x + 77;" in (layered.tree / "src/a.cpp").read_text()


def test_lint_finds_ungrouped_parts(layered: Tiny, kvtool: Any) -> None:
    assert kvtool("lint").code == 0
    change_toml(layered, 'group = "fixes"\n', "")
    change_toml(layered, '"tools/check/*"', '"src/new.cpp", "src/none-*"')
    found = [(f["file"], f["what"]) for f in kvtool("lint", "--json").json["findings"] if f["rule"] == "group"]
    assert found == [
        ("cpp/src/new.cpp", "it belongs to base and more"),
        ("cpp/tools/check/run.sh", "it belongs to no group"),
        ("patches/series.toml", "group more: no file of cpp/ matches 'src/none-*'"),
        ("patches/series.toml", "typo belongs to no group"),
    ]

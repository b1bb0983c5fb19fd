"""Test kvtool lint on a project: series.toml, upstream.lock, the files, and the upstream tags in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, write_files


@pytest.fixture
def good(project: Tiny) -> Tiny:
    """Return the tiny project without any mistake that lint finds."""
    write_files(project.root, {"cpp/tests/test-kv-x.cpp": "int main() {}\n"})
    edit(project, 'why = "because of flag"', 'why = "because of flag"\ntests = ["kv-check", "test-kv-x"]')
    return project


def edit(project: Tiny, old: str, new: str, file: str = "series.toml") -> None:
    path = project.root / "patches" / file
    text = path.read_text()
    assert old in text, text
    path.write_text(text.replace(old, new, 1))


def findings(kvtool: Any) -> list[tuple[str, int, str]]:
    before = kvtool("lint")
    ran = kvtool("lint", "--json")
    assert ran.code == before.code == (6 if ran.json["findings"] else 0)
    for found in ran.json["findings"]:
        assert found["what"] in before.out and found["next"] in before.out
    return [(f["file"], f["line"], f["rule"]) for f in ran.json["findings"]]


def test_good_project_has_no_findings(good: Tiny, kvtool: Any) -> None:
    before = good.snapshot()
    ran = kvtool("lint", "--json")
    assert (ran.code, ran.json) == (0, {"command": "lint", "ok": True, "patches": 2, "findings": []})
    assert good.snapshot() == before and not good.tree.exists()


@pytest.mark.parametrize(
    ("old", "new", "line", "rule"),
    [
        ('why = "because of use"', "", 8, "entry"),
        ('why = "because of use"', "why = 3", 10, "entry"),
        ('why = "because of use"', 'why = "use: a patch"', 10, "why"),
        ('why = "because of use"', 'why = "w"\nupstream = { status = "sent" }', 11, "entry"),
        ('why = "because of use"', 'why = "w"\nupstream = { status = "submitted" }', 11, "pr"),
        ('why = "because of use"', 'why = "w"\nupstream.status = "merged"', 11, "pr"),
        ('why = "because of use"', 'why = "w"\nfrom = "v9"', 11, "span"),
        ('why = "because of use"', 'why = "w"\nfrom = "v2"\nuntil = "v1"', 12, "span"),
        ('why = "because of use"', 'why = "w"\ntests = ["kv-chekc"]', 11, "test"),
        ('why = "because of use"', 'why = "w"\nwhen = "now"', 11, "entry"),
        ('"test-kv-x"', '"test-kv-y"', 6, "test"),
    ],
)
def test_series_mistakes_have_line(good: Tiny, kvtool: Any, old: str, new: str, line: int, rule: str) -> None:
    edit(good, old, new)
    assert findings(kvtool) == [("patches/series.toml", line, rule)]


def test_all_mistakes_are_reported(good: Tiny, kvtool: Any) -> None:
    edit(good, 'why = "because of use"', 'why = ""\nform = "v1"\ntests = "x"')
    edit(good, 'why = "because of flag"', 'why = "w"\nuntil = "v7"')
    assert sorted(rule for _, _, rule in findings(kvtool)) == ["entry", "entry", "entry", "span"]


def test_invalid_toml_is_reported(good: Tiny, kvtool: Any) -> None:
    edit(good, '[[patch]]\nid = "use"', '[[patch\nid = "use"')
    assert findings(kvtool) == [("patches/series.toml", 0, "toml")]


def test_missing_and_unlisted_files(good: Tiny, kvtool: Any) -> None:
    (good.root / "patches/use.patch").rename(good.root / "patches/used.patch")
    (good.root / "patches/use.patch.orig").write_text("left")
    assert findings(kvtool) == [
        ("patches/series.toml", 8, "missing"),
        ("patches/use.patch.orig", 0, "unlisted"),
        ("patches/used.patch", 0, "unlisted"),
    ]


def test_duplicate_patch_id(good: Tiny, kvtool: Any) -> None:
    good.add_patch("third", ("src/a.cpp", "x + 7;", "x + 77;"), message="use: a patch")
    assert findings(kvtool) == []
    edit(good, 'id = "third"', 'id = "use"\nfile = "third.patch"')
    assert {rule for _, _, rule in findings(kvtool)} == {"twice"}


def test_patch_that_moves_added_lines(good: Tiny, kvtool: Any) -> None:
    brings, three = "    bool brought = true;\n", "    bool three;\n"
    good.add_patch("brings", ("src/b.h", three, brings + three))
    good.add_patch("moves", ("src/b.h", brings + three, three + brings))
    assert [(file, rule) for file, _, rule in findings(kvtool)] == [("patches/moves.patch", "moves")]
    for name in ("brings", "moves"):  # a line need not be valid UTF-8
        file = good.root / f"patches/{name}.patch"
        file.write_bytes(file.read_bytes().replace(b"brought", b"br\xfcught"))
    assert [(file, rule) for file, _, rule in findings(kvtool)] == [("patches/moves.patch", "moves")]


def test_lock_mistake_is_reported(good: Tiny, kvtool: Any) -> None:
    edit(good, 'current = "v1"', 'current = "v7"', "upstream.lock")
    assert findings(kvtool) == [("patches/upstream.lock", 0, "lock")]


def test_extra_context_is_reported(good: Tiny, kvtool: Any) -> None:
    good.add_patch("wide", ("src/a.cpp", "x + 4;", "x + 4 + 4;"), u=3)
    assert [(file, rule) for file, _, rule in findings(kvtool)] == [("patches/wide.patch", "context")]


def test_goal_lines_limit(good: Tiny, kvtool: Any) -> None:
    many = "".join(f"    bool b{n};\n" for n in range(300))
    good.add_patch("many", ("src/b.h", "    bool three;\n", f"    bool three;\n{many}"))
    assert findings(kvtool) == [], "there is no limit by default"
    edit(good, "# the series\n", "goal_lines = 300\n")
    assert findings(kvtool) == [("patches/series.toml", 0, "size")]
    edit(good, 'why = "because of many"', 'why = "because of many"\nfrom = "v2"')
    assert findings(kvtool) == [("patches/series.toml", 0, "size")], "v2 still exceeds the limit"
    edit(good, "goal_lines = 300\n", "goal_lines = 400\n")
    assert findings(kvtool) == []
    edit(good, "goal_lines = 400\n", 'goal_lines = "few"\n')
    assert findings(kvtool) == [("patches/series.toml", 0, "entry")]


def test_patched_path_of_cached_upstream(good: Tiny, kvtool: Any) -> None:
    write_files(good.root, {"cpp/src/b.h": "int b;\n"})
    expected = [("patches/flag.patch", 10, "new-file")]
    assert findings(kvtool) == expected, "nothing is cached yet, and nothing is fetched"
    (good.root / "cpp/src/b.h").rename(good.root / "cpp/src/b.moved")
    assert kvtool("fetch", "v2").code == 0
    (good.root / "cpp/src/b.moved").rename(good.root / "cpp/src/b.h")
    assert findings(kvtool) == [("cpp/src/b.h", 0, "in-upstream"), *expected]


def test_link_in_cpp_is_reported(good: Tiny, kvtool: Any) -> None:
    (good.root / "cpp/src/link").symlink_to("new.cpp")
    assert findings(kvtool) == [("cpp", 0, "new-file")]


def test_this_repository_is_clean(kvtool: Any) -> None:
    ran = kvtool("lint", "--json", "--project", Path(__file__).parents[2])
    assert ran.json["findings"] == []

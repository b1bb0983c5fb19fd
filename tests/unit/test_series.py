"""Test series.toml and cpp/ with valid files, and with errors that must name the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.errors import UsageError
from kvtool.series.series import Patch, is_ignored_path, new_files, new_id, parse_series
from kvtool.series.series_toml import edit_series, set_limits
from kvtool.upstream.lock import parse_lock

GOOD = """
# about the series
[[patch]]
id = "one"
why = "because"

# about two
[[patch]]
id = "two"
file = "second.patch"
why = "because, too"
upstream = { status = "submitted", pr = "#1" }
from = "v1"
until = "v3"
tests = ["a", "b"]
"""


def test_parse_valid_series() -> None:
    one, two = parse_series(GOOD)
    assert one == Patch("one", "one.patch", "because")
    assert two == Patch("two", "second.patch", "because, too", "submitted", "#1", "v1", "v3", ("a", "b"))


def test_empty_series_is_valid() -> None:
    assert parse_series("# nothing yet\n") == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('id = "two"', 'id = "one"', "'one'"),
        ('id = "two"', 'id = "Two!"', "lower-case"),
        ('id = "two"', "", "lower-case"),
        ('"second.patch"', '"one.patch"', "two patches have the file"),
        ('"second.patch"', '"../x.patch"', "name in patches/"),
        ('"second.patch"', '"second.diff"', "name in patches/"),
        ('why = "because"', 'why = " "', "why is empty"),
        ('why = "because"', "", "why is empty"),
        ('why = "because"', "why = 3", "must be a string"),
        ('"submitted"', '"lost"', "upstream.status"),
        ('tests = ["a", "b"]', 'tests = "a"', "list of strings"),
        ('from = "v1"', 'form = "v1"', "'form'"),
        ('[[patch]]\nid = "one"', '[patch]\nid = "one"', "TOML"),
        ('id = "one"', 'id = "one', "not valid TOML"),
    ],
)
def test_series_mistakes_are_named(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        parse_series(GOOD.replace(old, new, 1), "s.toml")
    assert says in str(caught.value), str(caught.value)


def test_limits_follow_lock_order() -> None:
    entries = "".join(
        f'[[upstream]]\ntag = "{t}"\ndate = "2026"\ntree = "{"0" * 40}"\n' for t in ("b9", "b10", "v1", "b11")
    )
    lock = parse_lock(f'current = "v1"\n{entries}')

    def tags(since: str = "", until: str = "") -> list[str]:
        patch = Patch("x", "x.patch", "w", since=since, until=until)
        return [tag for tag, upstream in lock.upstreams.items() if patch.wanted(lock, upstream)]

    assert tags() == ["b9", "b10", "v1", "b11"]
    assert tags(since="b10") == ["b10", "v1", "b11"]
    assert tags(until="v1") == ["b9", "b10"]
    assert tags(since="v1", until="b11") == ["v1"]
    with pytest.raises(UsageError, match="v7"):
        tags(since="v7")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("README.md", True), ("a/README.md", False), (".x", True), ("a/.x/b", True), ("a/b~", True), ("a/b", False)],
)
def test_ignored_paths_of_cpp(path: str, expected: bool) -> None:
    assert is_ignored_path(path) is expected


def test_new_files(tmp_path: Path) -> None:
    for name in ("README.md", ".clang-format", "src/b.cpp", "src/a.cpp", "src/a.cpp~", ".git/x"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "src/b.cpp").chmod(0o755)
    assert [(f.path, f.executable) for f in new_files(tmp_path)] == [("src/a.cpp", False), ("src/b.cpp", True)]
    assert new_files(tmp_path / "none") == ()
    for target in ("a.cpp", "."):
        link = tmp_path / "src/link"
        link.symlink_to(target)
        with pytest.raises(UsageError, match="not a plain file"):
            new_files(tmp_path)
        link.unlink()


# --- editing series.toml ------------------------------------------------------------------------------------------


def ids(text: str) -> list[str]:
    return [patch.id for patch in parse_series(text)]


def test_edit_without_changes_keeps_text() -> None:
    assert edit_series(GOOD, ["one", "two"], {}, set()) == GOOD


def test_edit_appends_patch() -> None:
    text = edit_series(GOOD, ["one", "two", "three"], {"three": 'say "so"'}, set())
    assert text.startswith(GOOD.strip("\n")) and ids(text) == ["one", "two", "three"]
    assert parse_series(text)[2].why == 'say "so"'


def test_edit_inserts_removes_and_reorders() -> None:
    assert ids(edit_series(GOOD, ["one", "mid", "two"], {"mid": "m"}, set())) == ["one", "mid", "two"]
    assert ids(edit_series(GOOD, ["two", "one"], {}, set())) == ["two", "one"]
    text = edit_series(GOOD, ["two"], {}, {"one"})
    assert ids(text) == ["two"] and parse_series(text) == parse_series(GOOD)[1:]
    assert ids(edit_series(GOOD, [], {}, {"one", "two"})) == []


def test_edit_entries_in_array() -> None:
    merged = 'upstream = { status = "merged", pr = "p" }'
    text = f'patch = [\n  {{ id = "a", why = "w", {merged} }},\n  {{ id = "b", why = "w" }},\n]\n'
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        edited = edit_series(text, order, {"c": "new"}, set())
        assert ids(edited) == order and set(parse_series(text)) < set(parse_series(edited))
    assert edit_series("patch = []\n", ["c"], {"c": "new"}, set()).startswith("[[patch]]\n")


def test_edit_keeps_skipped_patches_in_place() -> None:
    assert ids(edit_series(GOOD, ["one", "new"], {"new": "n"}, set())) == ["one", "two", "new"]
    assert ids(edit_series(GOOD, ["two", "new"], {"new": "n"}, set())) == ["one", "two", "new"]


def test_new_id() -> None:
    assert new_id("KV-cache : Grow, on demand!", set()) == "kv-cache-grow-on-demand"
    assert new_id("x", {"x", "x-2"}) == "x-3"
    assert new_id("ü", set()) == "patch"
    assert len(new_id("word " * 30, set())) <= 40


COMMENTED = (
    """# about the file

goal_lines = 3

# about one
[[patch]]
id = "one"
why = "because"  # a reason
# still about one

# apart, about two

# two: do not drop before v5
[[patch]]
id = "two"
why = """
    + '"""\n[[patch]]\nnot a table\n"""'
    + """
[patch.upstream]
status = "local"

[[patch]]
id = "three"
why = "w"
# the end of three
"""
)


def test_comments_move_with_entries() -> None:
    text = edit_series(COMMENTED, ["three", "two", "one"], {}, set())
    assert ids(text) == ["three", "two", "one"] and text.startswith("# about the file\n\ngoal_lines = 3\n\n[[patch]]")
    three, two, one = text.index('"three"'), text.index('"two"'), text.index('"one"')
    places = [three, text.index("# the end of three"), text.index("# apart, about two"), text.index("# two: do"), two]
    assert [*places, text.index("# about one"), one, text.index("# still about one")] == sorted(
        [*places, text.index("# about one"), one, text.index("# still about one")]
    )


def test_dropped_patch_drops_comments() -> None:
    for text in (set_limits(COMMENTED, ["two"], {}), edit_series(COMMENTED, ["one", "three"], {}, {"two"})):
        assert ids(text) == ["one", "three"] and "two" not in text
        assert all(words in text for words in ("# about one", "# still about one", "# the end of three"))


def test_limit_is_set_before_comments() -> None:
    text = set_limits(COMMENTED, [], {"one": ("until", "v3"), "two": ("from", "v2"), "three": ("until", "v4")})
    assert [(patch.since, patch.until) for patch in parse_series(text)] == [("", "v3"), ("v2", ""), ("", "v4")]
    assert 'a reason\nuntil = "v3"\n# still about one\n' in text
    assert 'why = "w"\nuntil = "v4"\n# the end of three\n' in text
    again = set_limits(text, [], {"one": ("until", "v9")})
    assert again == text.replace('"v3"', '"v9"')


def test_other_tables_are_kept() -> None:
    text = COMMENTED + '\n# about layers\n[layers]\ncore = "first"\n'
    for edited in (
        edit_series(text, ["two", "one", "three"], {}, set()),
        set_limits(text, ["one"], {"two": ("until", "v2")}),
    ):
        assert edited.count('# about layers\n[layers]\ncore = "first"\n') == 1 and len(ids(edited)) >= 2

"""Test the parser of upstream.lock with valid locks, and with errors that must name the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.errors import UsageError
from kvtool.upstream.lock import Source, load_lock, parse_lock

TREE = "0123456789abcdef" * 2 + "01234567"
GOOD = f"""
current = "v1"
remote = "https://example.invalid/x"
[[upstream]]
tag = "v0"
date = "2026-01-01"
tree = "{TREE}"
[[upstream]]
tag = "v1"
date = "2026-01-02"
tree = "{TREE}"
sources = [
    {{ kind = "npm", name = "n", version = "1", path = "p", size = 5, integrity = "sha512-x" }},
    {{ kind = "sdist", name = "s", version = "2", path = "q" }},
]
"""


def test_parse_valid_lock() -> None:
    lock = parse_lock(GOOD)
    assert list(lock.upstreams) == ["v0", "v1"]
    assert lock.upstream().tag == "v1"
    assert lock.upstream("v0").order < lock.upstream("v1").order
    npm, sdist = lock.upstream("v1").sources
    assert npm == Source("npm", "n", "1", "p", "sha512-x", 5)
    assert (sdist.integrity, sdist.size, str(sdist)) == ("", 0, "sdist package s 2")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('current = "v1"', "", "current"),
        ('current = "v1"', 'current = "v9"', "v9"),
        ('current = "v1"', "current = 1", "current"),
        ('tag = "v0"', 'tag = "v1"', "twice"),
        ('tag = "v0"', 'tag = "../x"', "not a usable tag"),
        ('tag = "v0"', "", "tag"),
        (f'tree = "{TREE}"\nsources', 'tree = "abc"\nsources', "40 hex digits"),
        (f'tree = "{TREE}"\nsources', "sources", "tree"),
        ('date = "2026-01-01"', "", "date"),
        ('kind = "npm"', 'kind = "ftp"', "ftp"),
        ('name = "n", ', "", "name"),
        ("size = 5", 'size = "5"', "size"),
        ("current", "current = ", "not valid TOML"),
    ],
)
def test_lock_mistakes_are_named(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        parse_lock(GOOD.replace(old, new, 1), "my.lock")
    assert says in str(caught.value) and "my.lock" in str(caught.value)
    assert caught.value.exit_code == 2


def test_missing_file_and_wrong_bytes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_lock(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        load_lock(tmp_path / "bytes")


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Accept the byte order mark that Notepad writes."""
    (tmp_path / "upstream.lock").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_lock(tmp_path / "upstream.lock") == parse_lock(GOOD)


def test_unknown_tag_lists_known_tags() -> None:
    with pytest.raises(UsageError) as caught:
        parse_lock(GOOD).upstream("v7")
    assert "v0, v1" in caught.value.next_step


def test_lock_of_this_project() -> None:
    lock = load_lock(Path(__file__).parents[2] / "patches/upstream.lock")
    assert {"v0.5.0", "v0.4.0", "b11063", "b10361"} <= set(lock.upstreams)
    dates = [upstream.date for upstream in lock.upstreams.values()]
    assert dates == sorted(dates)
    assert all(upstream.sources for upstream in lock.upstreams.values())
    assert all(source.integrity for upstream in lock.upstreams.values() for source in upstream.sources)

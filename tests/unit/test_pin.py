"""Test how an upstream tag is added to the lock: at the right position, with all other lines unchanged."""

from __future__ import annotations

import pytest

from kvtool.upstream.lock import Lock, parse_lock, pin, place_of, with_upstream

ENTRY = '[[upstream]]\ntag = "{0}"\ndate = "{1}"\ntree = "{2}"\nsources = []  # none\n'
TEXT = (
    '# the lock\n\ncurrent = "b200"  # now\nremote = ""\n\n'
    + ENTRY.format("b100", "2026-01-10", "a" * 40)
    + "\n# the one that matters\n"
    + ENTRY.format("b200", "2026-02-10", "b" * 40)
    + "\n"
    + ENTRY.format("v1.0", "2026-03-10", "c" * 40)
    + "# the end\n"
)


def lock() -> Lock:
    return parse_lock(TEXT)


@pytest.mark.parametrize(
    ("tag", "date", "place"),
    [
        ("b300", "2026-04-01", 3),  # newer than all others
        ("v2.0", "2026-04-01", 3),
        ("b150", "2026-01-20", 1),
        ("b150", "2026-11-20", 1),  # the mirror made the commit today, so the number decides
        ("b50", "2026-11-20", 0),
        ("b250", "2026-02-20", 2),  # before v1.0, because of its date
        ("b250", "2025-01-01", 2),  # but never before a lower number
        ("v0.9", "2026-02-01", 1),
    ],
)
def test_position_in_lock_order(tag: str, date: str, place: int) -> None:
    assert place_of(lock(), tag, date) == place
    grown = with_upstream(lock(), tag, "d" * 40, date)
    assert list(grown.upstreams)[place] == tag and grown.upstream(tag).order == place
    assert [upstream.order for upstream in grown.upstreams.values()] == [0, 1, 2, 3]


def test_known_tag_changes_one_line() -> None:
    assert pin(TEXT, lock(), "v1.0") == TEXT.replace('current = "b200"', 'current = "v1.0"')
    assert pin(TEXT, lock(), "b200") == TEXT


@pytest.mark.parametrize(("tag", "date"), [("b300", "2026-04-01"), ("b150", "2026-01-20"), ("b50", "2026-01-01")])
def test_new_tag_keeps_comments(tag: str, date: str) -> None:
    grown = with_upstream(lock(), tag, "d" * 40, date)
    text = pin(TEXT, grown, tag)
    assert parse_lock(text) == Lock(tag, "", grown.upstreams)
    left = [line for line in text.splitlines() if line]
    entry = ["[[upstream]]", f'tag = "{tag}"', f'date = "{date}"', f'tree = "{"d" * 40}"', "sources = []"]
    at = left.index(entry[1]) - 1
    assert left[at : at + 5] == entry
    del left[at : at + 5]
    assert left == [line for line in TEXT.replace('"b200"  #', f'"{tag}"  #').splitlines() if line]
    assert '# the one that matters\n[[upstream]]\ntag = "b200"' in text

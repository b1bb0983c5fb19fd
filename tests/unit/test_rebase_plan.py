"""Test the message about a patch that has fewer changes on the new upstream."""

from __future__ import annotations

import pytest

from kvtool.replay import rebase_plan

HEAD = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n"
TWO_LINES = HEAD + b"@@ -1,2 +1,4 @@\n a\n+b\n+c\n d\n"
TWO_HUNKS = HEAD + b"@@ -1 +1,2 @@\n a\n+b\n@@ -8 +9,2 @@\n h\n+i\n"
ONE_LINE = HEAD + b"@@ -1 +1,2 @@\n a\n+b\n"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (TWO_LINES, TWO_LINES, ""),
        (ONE_LINE, TWO_LINES, ""),
        (TWO_LINES, ONE_LINE, "0 of 1 hunks, 1 of 2 lines"),
        (TWO_HUNKS, TWO_LINES, "1 of 2 hunks, 0 of 2 lines"),
        (TWO_HUNKS, ONE_LINE, "1 of 2 hunks, 1 of 2 lines"),
    ],
)
def test_lost_changes_message(was: bytes, now: bytes, said: str) -> None:
    assert rebase_plan.lost_changes(was, now) == said

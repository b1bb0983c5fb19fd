"""Provide a tree with the patches applied, a rebase that stops at a conflict, and a git that kills kvtool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny
from tests.repo.kills import Killer
from tests.repo.rebases import release


@pytest.fixture
def applied(project: Tiny, kvtool: Any) -> Tiny:
    assert kvtool("apply").code == 0
    return project


@pytest.fixture
def stopped(applied: Tiny, kvtool: Any) -> Tiny:
    """Return a project whose rebase onto v3 stops at the patch `block`.

    The patch `more` changes lines of `block`, and the patch `tail` applies.
    """
    applied.add_patch("block", ("src/a.cpp", "x + 4;\n", "x + 4;\n    one();\n    mid();\n    last();\n"))
    applied.add_patch("more", ("src/a.cpp", "mid();", "mid(1);"))
    applied.add_patch("tail", ("src/a.cpp", "x + 6;", "x + 6 + 1;"))
    release(applied, "v3", ("src/a.cpp", "x + 4;\n", "x + 44;\n"))
    assert kvtool("apply").code == 0
    return applied


@pytest.fixture
def killer(tmp_path: Path) -> Killer:
    return Killer(tmp_path / "killer")

"""The names by which series.toml says what proves a patch: verify's kinds of check, and C++ unit tests. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from kvtool.verify.checks import Kind

CHECK_KINDS: tuple[str, ...] = get_args(Kind)


def unit_tests(cpp: Path) -> tuple[str, ...]:
    """The C++ unit tests that cpp/ brings, by the name that ctest has for them."""
    return tuple(sorted(path.stem for path in (cpp / "tests").glob("test-*.cpp")))


def known_tests(cpp: Path) -> tuple[str, ...]:
    """Every name that an entry of series.toml may give in `tests`."""
    return (*CHECK_KINDS, *unit_tests(cpp))

"""Test that docs/reference/ agrees with the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kvtool.series import groups, series

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))

_spec = importlib.util.spec_from_file_location("ci_reference", ROOT / "ci/reference.py")
assert _spec and _spec.loader
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


def read(page: str) -> str:
    return (ROOT / "docs/reference" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_match_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert reference.corrected(text) == text, "python ci/reference.py --write"


def test_all_parts_are_on_a_page() -> None:
    assert {name for page in PAGES for _, name, _, _ in reference.PART.findall(read(page.name))} == set(reference.PARTS)


def test_generated_tables_have_rows() -> None:
    assert "`--kv-dynamic`" in reference.flags() and "`POST /mmproj`" in reference.endpoints()
    assert "`used_bytes`" in reference.context_metrics() and "`cells_shared`" in reference.slot_metrics()
    assert "| 3 | `conflict` |" in reference.exit_codes() and "### kvtool rebase" in reference.commands()
    assert "llama_get_memory_usage(" in reference.c_header("llama-kv.h")


def test_missing_row_is_noticed() -> None:
    text = read("metrics.md")
    shorter = re.sub(r"\| `used_bytes` .*\n", "", text)
    assert shorter != text and reference.corrected(shorter) == text


def table_keys(heading: str) -> set[str]:
    section = read("series.md").split(heading, 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_series_keys_match_parser() -> None:
    assert table_keys("## A patch") == series._KEYS
    assert table_keys("## A layer") == groups._KEYS
    assert all(f'"{status}"' in read("series.md") for status in series.UPSTREAM_STATUS)


def test_variables_of_the_library_are_listed() -> None:
    sources = [*(ROOT / "cpp/src").glob("*.cpp"), *(ROOT / "patches").glob("*.patch")]
    used = {
        name for file in sources for name in re.findall(r'getenv\("(LLAMA_\w+)"\)', file.read_text(encoding="utf-8"))
    }
    assert used and sorted(name for name in used if name not in read("flags.md")) == []

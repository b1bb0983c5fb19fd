"""Test docs/: each claim names a test that exists, tables are complete, and links are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtool import cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/explanation/comparison.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEAD, FEATURES = ROWS[0], ROWS[2:]


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0][:40])
def test_features_name_existing_tests(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[1])
    assert named, "kvtool's cell names a test"
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


def test_claims_about_others_name_sources() -> None:
    notes = set(re.findall(r"^(\d+)\. ", TEXT, re.MULTILINE))
    others = [one for row in FEATURES for one in row[2].split(", ") if one]
    assert others and all(re.fullmatch(r"[\w -]+: (yes|no) \(\d+\)", one) for one in others)
    assert {number for one in others for number in re.findall(r"\((\d+)\)", one)} == notes


def test_readme_is_two_screens() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    commands = re.findall(r"^ {4}(?:\.venv/bin/)?kvtool (\w+)", text, re.MULTILINE)
    assert commands and set(commands) <= set(cli.COMMANDS)


def test_glossary_has_at_most_forty_words() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    words = [row for row in re.findall(r"^\| ([^|-]+) \| ", text, re.MULTILINE) if row != "word"]
    assert 30 < len(words) <= 40 and len(set(words)) == len(words)


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("patches/*.md")),
]


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_are_valid(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [slug(heading) for heading in headings]

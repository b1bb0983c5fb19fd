"""docs/: what it claims is backed by a test that exists, and each table is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtool import cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/features.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]
HEAD, FEATURES = ROWS[0], ROWS[2:]


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0][:40])
def test_each_feature_names_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == len(HEAD)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[1])
    assert named, "kvtool's cell names a test"
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


def test_what_is_said_of_others_names_its_source() -> None:
    notes = set(re.findall(r"^(\d+)\. ", TEXT, re.MULTILINE))
    others = [one for row in FEATURES for one in row[2].split(", ") if one]
    assert others and all(re.fullmatch(r"[\w -]+: (yes|no) \(\d+\)", one) for one in others)
    assert {number for one in others for number in re.findall(r"\((\d+)\)", one)} == notes


def test_the_readme_is_three_screens_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1100
    table = text[text.index("## Commands") :]
    assert re.findall(r"^\| `kvtool (\w+)", table, re.MULTILINE) == list(cli.COMMANDS)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings]

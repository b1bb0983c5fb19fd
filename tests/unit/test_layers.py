"""Test the layers (groups of patches) in series.toml: their pages, and the includes between the files of cpp/."""

from __future__ import annotations

import posixpath
import re
import runpy
import sys
from pathlib import Path

import pytest

from kvtool.project import find_project
from kvtool.series.groups import close_groups, owners_of
from kvtool.series.series import load_groups, new_files
from kvtool.verify.named import NEEDED_GROUP

ROOT = Path(__file__).resolve().parents[2]
PROJECT = find_project(ROOT)
GROUPS = load_groups(PROJECT)
FILES = {file.path: file.source.read_text(encoding="utf-8") for file in new_files(PROJECT.cpp)}
# An optional include is directly below `#ifdef NAME` or `#if __has_include("x.h")`.
INCLUDE = re.compile(r'(?<!__has_include\(")^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
OPTIONAL = re.compile(r'#if(?:def \w+| __has_include\("[^"]+"\))\n[ \t]*#[ \t]*include[ \t]+"([^"]+)"')
FOLDERS = ("src", "include", "common", "ggml/include", "ggml/src", "tools/kv-check", "tools/server")


def resolved(file: str, name: str) -> str:
    """Return the file of cpp/ that an include names; "" if it is a file of upstream or of the system."""
    here = posixpath.dirname(file)
    places = (posixpath.normpath(f"{folder}/{name}") for folder in (here, *FOLDERS))
    return next((place for place in places if place in FILES), "")


def includes_of(group: str) -> set[tuple[str, str]]:
    """Return the includes of a group's files that are missing in a tree with this group, as (file, included file)."""
    chosen = close_groups(GROUPS, [group]) or tuple(each.id for each in GROUPS)
    found = set()
    for file, text in FILES.items():
        if group in owners_of(GROUPS, file):
            optional = set(OPTIONAL.findall(text))
            names = {resolved(file, name) for name in INCLUDE.findall(text) if name not in optional}
            found |= {(file, name) for name in names if name and not {*owners_of(GROUPS, name)} & {*chosen}}
    return found


@pytest.mark.parametrize("group", [group.id for group in GROUPS])
def test_group_includes_only_its_dependencies(group: str) -> None:
    assert includes_of(group) == set()


def test_include_of_another_group_is_found() -> None:
    assert resolved("tests/test-kv-storage.cpp", "../src/llama-kv-storage.h") == "src/llama-kv-storage.h"
    assert resolved("src/llama-kv-storage.h", "ggml.h") == ""
    assert INCLUDE.findall('#include "a.h"\n  # include "b.h"\n#include <c>\n// #include "d.h"\n') == ["a.h", "b.h"]


def test_pages_have_the_right_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["layers.py"])
    main = runpy.run_path(str(ROOT / "ci/layers.py"))["main"]
    assert main() == 0, capsys.readouterr().err


def test_pages_explain_how_to_submit() -> None:
    for group in GROUPS:
        page = (ROOT / "patches" / f"{group.id}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# Layer {group.id}\n") and "## Submit it upstream" in page


def test_verify_needs_groups_that_exist() -> None:
    assert {*NEEDED_GROUP.values(), "core"} <= {group.id for group in GROUPS}

"""Test that the functions and files named in docs/explanation/tour.md and in the tables of design.md exist."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from kvtool.series.patchfile import parse_diff, parse_mail

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/tour.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs/explanation/design.md").read_text(encoding="utf-8")

# A step of the tour: 1. `class::function()` in `folder/file.cpp`, hooked by `patches/name.patch`
STOP = re.compile(r"(\d+)\. `([\w.:]+)\(\)` in `([\w./-]+)`(?:, hooked by `patches/([\w-]+\.patch)`)?")
NUMBERED = [" ".join(block.split()) for block in re.split(r"\n{2,}", PAGE) if re.match(r" *\d+\. ", block)]
FLAT = " ".join(PAGE.split())


@cache
def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def hooked_files(patch: str) -> dict[str, str]:
    """Return the hunks of a patch by the file of upstream that they change."""
    mail = parse_mail((ROOT / "patches" / patch).read_bytes(), patch)
    return {file.path: b"".join(hunk.text for hunk in file.hunks).decode() for file in parse_diff(mail.diff)}


def defines_python(text: str, name: str) -> bool:
    owner, _, function = name.rpartition(".")
    if f"def {function}(" not in text:
        return False
    body: list[ast.stmt] = ast.parse(text).body
    if owner:
        body = [stmt for node in body if isinstance(node, ast.ClassDef) and node.name == owner for stmt in node.body]
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


def defines_cpp(text: str, name: str) -> bool:
    """Return True if the text defines the function, as `class::function(` or inside of `class name {`."""
    owner, _, function = name.rpartition("::")
    if owner and re.search(rf"\b{re.escape(name)}\(", text):
        return True
    start = re.search(rf"^(?:class|struct) {owner}\b[^;{{]*{{", text, re.MULTILINE) if owner else None
    inside = text[start.end() :] if start else "" if owner else text
    return re.search(rf"^(?!\s*return\b)[^/=(\n]*[\w*&>] {re.escape(function)}\(", inside, re.MULTILINE) is not None


def defines(text: str, file: str, name: str) -> bool:
    return defines_python(text, name) if file.endswith(".py") else defines_cpp(text, name)


@cache
def sources() -> tuple[tuple[str, str], ...]:
    """Return every file of kvtool/ and cpp/ with its text, and the hunks of every patch."""
    files = [*(ROOT / "kvtool").rglob("*.py"), *(ROOT / "cpp").rglob("*.cpp"), *(ROOT / "cpp").rglob("*.h")]
    hooks = (hooked_files(patch.name).items() for patch in (ROOT / "patches").glob("*.patch"))
    return (*((file.name, read(str(file.relative_to(ROOT)))) for file in files), *itertools.chain(*hooks))


def is_known(name: str) -> bool:
    """Return True if a file of kvtool/ or cpp/, or a patch, contains `name` followed by a parenthesis.

    If `name` includes a class, the file or patch must define the function in this class.
    """
    owner, function = re.fullmatch(r"(?:(\w+)(?:::|\.))?(\w+)", name).groups()  # type: ignore[union-attr]
    return any(defines(text, file, name) if owner else re.search(rf"\b{function}\(", text) for file, text in sources())


@pytest.mark.parametrize("text", NUMBERED, ids=lambda text: text[:60])
def test_stop_exists_in_its_file(text: str) -> None:
    stop = STOP.fullmatch(text)
    assert stop, f"not in the form of a stop: {text}"
    _, name, file, patch = stop.groups()
    hunks = hooked_files(patch)[file] if patch else read(file)
    assert f"{name}(" in hunks if patch else defines(hunks, file, name), f"{file} has no {name}()"


def test_tours_have_at_most_ten_stops() -> None:
    tours = "".join(":" if text.startswith("1.") else "." for text in NUMBERED).split(":")[1:]
    assert len(tours) == 3 and all(len(stops) < 10 for stops in tours)


def test_named_functions_exist() -> None:
    names = sorted(set(re.findall(r"`([\w.:]+)\(\)`", FLAT)))
    assert names and [name for name in names if not is_known(name)] == []


def test_named_files_exist() -> None:
    files = sorted(set(re.findall(r"`([\w-]+/[\w./-]+\.\w+)`", FLAT)))
    upstream = {path for path, _ in sources()}
    assert files and [file for file in files if not (ROOT / file).exists() and file not in upstream] == []


def test_missing_function_is_noticed() -> None:
    assert defines_cpp("bool a::grow(int n) {\n", "a::grow") and not defines_cpp("bool a::grow(int n) {\n", "b::grow")
    assert defines_cpp("class a : public b {\n    bool grow(int n) override {", "a::grow")
    assert not defines_cpp("class a {\n    bool shrink();\n", "a::grow")
    assert defines_python("class A:\n    def find(self): ...\n", "A.find")
    assert not defines_python("class A:\n    def find(self): ...\n", "find")
    assert not is_known("grow_batch_of_nothing") and not is_known("llama_kv_growth::grow_batch")


def design_files() -> list[tuple[str, str]]:
    """Return the rows of "Places of changes" as folder and name. The heading above a table names the folder."""
    section = DESIGN[DESIGN.index("## Places of changes") :]
    found, folder = [], ""
    for line in section.splitlines():
        if heading := re.match(r"#+ .*?(?:`([\w/]+)`)?$", line):
            folder = heading[1] or ""
        elif line.startswith("| `"):
            found += [(folder, name) for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    return found


def test_design_names_files_that_exist() -> None:
    rows = design_files()
    assert rows and [(folder, name) for folder, name in rows if not [*(ROOT / folder).glob(f"{name}*")]] == []


@pytest.mark.parametrize("folder", ["cpp/src", "cpp/tools/server"])
def test_design_names_every_source_file(folder: str) -> None:
    named = {name.partition(".")[0] for place, name in design_files() if place == folder}
    assert sorted({file.name.partition(".")[0] for file in (ROOT / folder).iterdir()} - named) == []

"""Test that texts are plain (ci/prose.py), and that docstrings of public functions start with a verb."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtool

ROOT = Path(__file__).parents[2]
PROSE = runpy.run_path(str(ROOT / "ci/prose.py"))
LIMIT = 4.0  # markers per 1000 words; model codebases have 0.9 to 2.7
# fmt: off
NOT_A_VERB = {
    "a", "after", "all", "an", "and", "as", "at", "before", "between", "by", "each", "every", "for", "from",
    "how", "if", "in", "it", "its", "like", "no", "not", "of", "on", "one", "or", "so", "that", "the", "this",
    "those", "to", "two", "what", "when", "where", "whether", "which", "who", "whose", "why", "with", "without",
}
# fmt: on


@pytest.mark.parametrize("group", PROSE["GROUPS"])
def test_group_is_plain(group: str) -> None:
    found = PROSE["measure"](group)
    assert found and PROSE["rate"](found) <= LIMIT


def test_riddle_is_counted() -> None:
    text = '"""What somebody told, and one that goes."""\n'
    assert [piece.markers for piece in PROSE["pieces"]("x.py", text)] == [4]


def functions() -> Iterator[tuple[str, Any]]:
    """Yield the public functions and methods of kvtool, with their names."""
    for info in pkgutil.walk_packages(kvtool.__path__, "kvtool."):
        if ".stub" in info.name or ".templates" in info.name or info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or name.isupper() or getattr(value, "__module__", "") != info.name:
                continue
            if inspect.isfunction(value):
                yield f"{info.name}.{name}", value
            elif inspect.isclass(value):
                source = ast.parse(inspect.getsource(value).lstrip())
                body = source.body[0]
                assert isinstance(body, ast.ClassDef)
                for node in body.body:
                    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                        yield f"{info.name}.{name}.{node.name}", vars(value)[node.name]


def test_public_functions_start_with_verb() -> None:
    bad = []
    for name, function in functions():
        owner, _, method = name.rpartition(".")
        doc = inspect.getdoc(function)
        if not doc:  # an override has the docstring of its base class
            module, _, cls = owner.rpartition(".")
            doc = inspect.getdoc(getattr(getattr(importlib.import_module(module), cls, None), method, None))
        first = (doc or "the").split()[0].strip(",.:;`")
        if not first[0].isupper() or first.lower() in NOT_A_VERB:
            bad.append(name)
    assert not bad

"""Test that texts are plain (ci/prose.py), and that docstrings of public functions start with a verb."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import kvtool

ROOT = Path(__file__).parents[2]
PROSE = runpy.run_path(str(ROOT / "ci/prose.py"))
LIMIT = 4.0  # phrases to avoid, per 1000 words; good projects have 0.9 to 2.7
METHODS = (FunctionType, property, functools.cached_property, classmethod, staticmethod)
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


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each public function and method of kvtool. The docstring may be inherited."""
    for info in pkgutil.walk_packages(kvtool.__path__, "kvtool."):
        if ".stub" in info.name or ".templates" in info.name or info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or name.isupper() or getattr(value, "__module__", "") != info.name:
                continue
            if inspect.isfunction(value):
                yield f"{info.name}.{name}", inspect.getdoc(value) or ""
            elif inspect.isclass(value):
                for method, member in vars(value).items():
                    if isinstance(member, METHODS) and not method.startswith("_"):
                        yield (
                            f"{info.name}.{name}.{method}",
                            inspect.getdoc(inspect.getattr_static(value, method)) or "",
                        )


def test_public_functions_start_with_verb() -> None:
    first = {name: (doc or "the").split()[0].strip(",.:;`") for name, doc in docstrings()}
    assert len(first) > 500
    assert not [name for name, word in first.items() if not word[0].isupper() or word.lower() in NOT_A_VERB]

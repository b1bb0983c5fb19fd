"""Test the imports between the modules of kvtool: there is no cycle, and layers import only earlier layers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# a module imports only modules of its own layer and of earlier layers
LAYERS = ("kvtool.series", "kvtool.replay", "kvtool.worktree")


def imports_of(file: Path, modules: set[str]) -> set[str]:
    """Return the modules of kvtool that a file imports, including imports in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules
            found |= {node.module} if names - modules else set()
    return found & modules


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the imports of each module of the package kvtool in the folder `root`."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (root / "kvtool").rglob("*.py")
    }
    return {name: imports_of(file, set(files)) - {name} for name, file in files.items()}


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that are on a cycle of imports.

    Modules that import none of the others, or that none of the others imports, are removed until nothing changes.
    """
    left = set(graph)
    while True:
        imported = set().union(*(graph[name] for name in left))
        kept = {name for name in left & imported if graph[name] & left}
        if kept == left:
            return sorted(left)
        left = kept


def find_upward_imports(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports from a layer to a later layer, and the imports of git in the first layer."""
    found = []
    for name, imports in graph.items():
        layer = next((n for n, prefix in enumerate(LAYERS) if name.startswith(prefix)), None)
        if layer is None:
            continue
        forbidden = (*LAYERS[layer + 1 :], *(("kvtool.gitcmd",) if layer == 0 else ()))
        found += [f"{name} imports {other}" for other in sorted(imports) if other.startswith(forbidden)]
    return found


def test_modules_have_no_import_cycle() -> None:
    assert find_cycle(import_graph(ROOT)) == []


def test_layers_import_one_way() -> None:
    assert find_upward_imports(import_graph(ROOT)) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("series", "replay"):
        (tmp_path / "kvtool" / name).mkdir(parents=True)
    (tmp_path / "kvtool/gitcmd.py").write_text("")
    (tmp_path / "kvtool/series/text.py").write_text("from kvtool.gitcmd import Git\n")
    (tmp_path / "kvtool/replay/apply.py").write_text("from kvtool.series import text\n")
    return tmp_path


def test_git_import_by_series_is_found(package: Path) -> None:
    assert find_upward_imports(import_graph(package)) == ["kvtool.series.text imports kvtool.gitcmd"]


def test_late_import_cycle_is_found(package: Path) -> None:
    (package / "kvtool/series/text.py").write_text("def late():\n    from kvtool.replay.apply import f\n")
    graph = import_graph(package)
    assert find_cycle(graph) == ["kvtool.replay.apply", "kvtool.series.text"]
    assert find_upward_imports(graph) == ["kvtool.series.text imports kvtool.replay.apply"]

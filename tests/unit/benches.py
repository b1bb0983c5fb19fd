"""Run `kvtool bench` with the imitated programs of a test."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from kvtool.bench.report import Report
from kvtool.commands import bench
from kvtool.console import Console
from kvtool.options import Env
from kvtool.project import Project

_R = TypeVar("_R", bound=Report)


def project(place: Path) -> Project:
    return Project(place, place / "llama.cpp", place / "cache")


def run_bench(place: Path, kind: type[_R], **options: object) -> _R:
    """Run the programs in place/bin with the given options of `kvtool bench`, and return the report."""
    given = bench.Options(**{"bin_dir": place / "bin", **options})  # type: ignore[arg-type]
    result = bench.run_benchmark(Env(Console(quiet=True), lambda: project(place)), given)
    assert isinstance(result, kind)
    return result

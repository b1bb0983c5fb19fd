"""Apply each combination of layers (groups of patches) to the real upstream. Every hunk must be in its function."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtool.console import Console
from kvtool.gitcmd import scratch_repository
from kvtool.project import find_project
from kvtool.replay.rebase_plan import SeriesContext
from kvtool.series.groups import close_groups
from kvtool.series.series import load_groups

ROOT = Path(__file__).resolve().parents[2]
GROUPS = load_groups(find_project(ROOT))


def combinations() -> list[tuple[str, ...]]:
    """Return each set of layers that includes the layers it depends on; () stands for all layers."""
    names = [group.id for group in GROUPS]
    chosen = (some for size in range(1, len(names) + 1) for some in itertools.combinations(names, size))
    return sorted({close_groups(GROUPS, some) for some in chosen})


@pytest.mark.parametrize("chosen", combinations(), ids=lambda chosen: "-".join(chosen) or "all")
def test_layers_apply_alone(chosen: tuple[str, ...]) -> None:
    context = SeriesContext(find_project(ROOT), Console(quiet=True), groups=chosen)
    context.base(context.lock.upstream())
    with scratch_repository(context.cache.repo) as scratch:
        made = context.build(scratch, context.lock.upstream())
    assert made.complete, [str(hunk) for report in made.reports for hunk in report.failed]
    assert [moved for report in made.reports for moved in report.moved] == []

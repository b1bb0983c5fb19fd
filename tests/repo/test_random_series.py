"""A few seeds of random_series.py; ci/nightly.sh runs a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo.random_series import check


# 19: upstream took one of two lines, and put it elsewhere
@pytest.mark.parametrize("seed", [0, 7, 19])
def test_random_series_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    outcomes, violations = check(seed, tmp_path)
    assert not violations and outcomes

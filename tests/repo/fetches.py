"""Inspect the cache and replace programs, for the tests of kvtool fetch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import git

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake program is a shell script")


def cache_of(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached_refs(tmp_path: Path) -> list[str]:
    repo = cache_of(tmp_path) / "upstream.git"
    return git(repo, "for-each-ref", "--format=%(refname)").split() if repo.exists() else []


def assert_clean(tmp_path: Path) -> None:
    """Assert that no temporary file and no ref is left."""
    assert cached_refs(tmp_path) == []
    left = cache_of(tmp_path) / "kvtool-tmp"
    assert not left.exists() or not list(left.iterdir())


def fake(tmp_path: Path, monkeypatch, name: str, script: str) -> None:
    """Put an imitated program in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

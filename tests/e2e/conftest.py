"""What the end-to-end tests share: the patched tree, built. `make test` and `kvtool build` leave one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtool.build import cmake
from kvtool.verify import models

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@dataclass(frozen=True)
class Real:
    """The tree and its build directory."""

    tree: Path
    build: Path

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def toys(self) -> Path:
        """The directory of the toy models; made here when no verify has run yet."""
        return models.toys(self.bin / "test-llama-archs", self.tree / "build" / "verify")[0].parent


def kvtool(*args: str) -> tuple[int, dict[str, Any]]:
    """A command line of kvtool in a process of its own: its exit code and its JSON document."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", *args, "--json", "--project", str(ROOT)], stdout=subprocess.PIPE, text=True
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


@pytest.fixture(scope="session")
def real() -> Real:
    """The patched tree as `kvtool build` left it, with everything that verify needs."""
    programs = ("kv-bench", "llama-cli", "llama-completion", "llama-bench", "llama-server")
    code, built = kvtool("build", *(f"--target={t}" for t in (*cmake.VERIFY_TARGETS, *programs)))
    if code != 0:
        pytest.fail(f"these tests need the patched tree: kvtool fetch, apply, build ({built['error']['what']})")
    return Real(Path(built["tree"]), Path(built["build_dir"]))


@pytest.fixture(scope="session")
def kv_checks(real: Real) -> dict[str, Any]:
    """The document of kv-check over all toy models, run once: `kvtool verify --quick --models '*'`."""
    saved = os.environ.get("KVTOOL_TEST_VERIFY_JSON")  # while writing tests: a document from before
    if saved:
        document: dict[str, Any] = json.loads(Path(saved).read_text("utf-8"))
        return document
    return kvtool("verify", "--quick", "--models", "*", "--junit", str(ROOT / "report" / "kv-check.xml"))[1]

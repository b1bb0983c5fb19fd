"""What the end-to-end tests share: the patched tree, built. `make test` and `kvtool build` leave one.

KVTOOL_TEST_PRESET names another build (`kvtool build --preset`). With a sanitizer's, a test has failed when a program
that it started has had something to report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtool.compile import cmake
from kvtool.console import Console
from kvtool.locks import lock_file
from kvtool.verify import models
from kvtool.verify.projector import projector

ROOT = Path(__file__).resolve().parents[2]
PRESET = os.environ.get("KVTOOL_TEST_PRESET", "release")
SANITIZED = PRESET in ("asan", "tsan")
PROGRAMS = (
    *("llama-server", cmake.RPC_SERVER),
    *(() if SANITIZED else ("kv-bench", "llama-cli", "llama-completion", "llama-bench")),
)
MARKER = "<image>"  # for LLAMA_MEDIA_MARKER
SUPPRESSED = ROOT / "ci" / "tsan.supp"
REPORTS = ROOT / "report" / PRESET
BUSY = "another kvtool is building"


def pytest_configure() -> None:
    """Every program writes its reports to files of its own: output is read by tests, and kept by nobody.

    Undefined behaviour is told on stderr whatever is asked for, so it ends the program.
    """
    if SANITIZED:
        shutil.rmtree(REPORTS, ignore_errors=True)
        REPORTS.mkdir(parents=True)
        more = {"UBSAN": "print_stacktrace=1:halt_on_error=1", "TSAN": f"suppressions={SUPPRESSED}"}
        for name in ("ASAN", "UBSAN", "TSAN"):
            options = (os.environ.get(f"{name}_OPTIONS"), more.get(name), f"log_path={REPORTS / name.lower()}")
            os.environ[f"{name}_OPTIONS"] = ":".join(filter(None, options))


@pytest.fixture(autouse=True)
def nothing_to_report() -> Iterator[None]:
    """Programs of a fixture of a module count for the test that runs when they end."""
    before = set(REPORTS.glob("*"))
    yield
    found = sorted(set(REPORTS.glob("*")) - before)
    if found:
        pytest.fail("\n".join(path.read_text("utf-8", "replace")[:4000] for path in found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """verify's tests first: they take a third of the time, and all cores at the end would leave one of them idle."""
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
    first = Path(__file__).with_name("test_verify.py")
    items.sort(key=lambda item: item.path != first)


@dataclass(frozen=True)
class Real:
    """The tree and its build directory; toys_by: the program that writes the toys."""

    tree: Path
    build: Path
    toys_by: Path

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def work(self) -> Path:
        """Where verify, and these tests, write models."""
        return self.tree / "build" / "verify"

    @property
    def toys(self) -> Path:
        """The directory of the toy models; made here when no verify has run yet."""
        return models.toys(self.toys_by, self.work)[0].parent

    def spoken(self, toy: str) -> Path:
        """The toy with a vocabulary, so that it reads and writes text."""
        return self.speaking(self.toys / f"{toy}.gguf")

    def speaking(self, model: Path) -> Path:
        return models.text_model(model, self.tree / "models" / models.VOCABULARY, self.work)


def kvtool(*args: str) -> tuple[int, dict[str, Any]]:
    """A command line of kvtool in a process of its own: its exit code and its JSON document.

    It is refused while another process of pytest builds, and then tried again until the test's time is over.
    """
    argv = [sys.executable, "-m", "kvtool", *args, "--json", "--project", str(ROOT)]
    while True:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
        document: dict[str, Any] = json.loads(done.stdout)
        if done.returncode == 0 or BUSY not in str(document.get("error")):
            return done.returncode, document
        time.sleep(1)


@pytest.fixture(scope="session")
def real() -> Real:
    """The patched tree as `kvtool build` left it, with everything that verify needs.

    One process of pytest after the other: a second build at once is refused, and all use the same toys.
    """
    with lock_file(ROOT / "report" / "e2e.lock", Console(quiet=True), "the build of these tests"):
        toys_by = _built("release", "test-llama-archs")  # whatever the preset: it writes the same files, faster
        here = _built(PRESET, *cmake.VERIFY_TARGETS, *PROGRAMS)
        made = Real(Path(here["tree"]), Path(here["build_dir"]), Path(toys_by["bin_dir"]) / "test-llama-archs")
        assert made.toys.is_dir()
    return made


def _built(preset: str, *targets: str) -> dict[str, Any]:
    code, built = kvtool("build", f"--preset={preset}", *(f"--target={target}" for target in targets))
    if code != 0:
        pytest.fail(f"these tests need the patched tree: kvtool fetch, apply, build ({built['error']['what']})")
    return built


@pytest.fixture(scope="session")
def model(real: Real) -> Path:
    """A small model that reads and writes text."""
    return real.spoken("llama-dense")


@pytest.fixture(scope="session")
def mute(real: Real) -> Path:
    """A model of 64 KiB a cell, trained on 262144 tokens, and without a vocabulary."""
    return models.cache_model(models.QWEN35_27B, real.work)


@pytest.fixture(scope="session")
def wide(real: Real, mute: Path) -> Path:
    """The same with a vocabulary: its cache is most of what a server takes."""
    return real.speaking(mute)


@pytest.fixture(scope="session")
def sight(real: Real, model: Path) -> Path:
    """A projector for `model`."""
    return projector(model, real.work)


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a prompt has its images; a server makes up another name each time."""
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", MARKER)

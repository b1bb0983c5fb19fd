"""Provide the built patched tree to the end-to-end tests. `make test` or `kvtool build` builds it.

KVTOOL_TEST_PRESET names another preset of `kvtool build`. With a preset that has a sanitizer, a test fails if a program
that it started wrote a report.
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
MARKER = "<image>"  # value for LLAMA_MEDIA_MARKER
SUPPRESSED = ROOT / "ci" / "tsan.supp"
REPORTS = ROOT / "report" / PRESET
NETWORK = 9  # exit code of kvtool if there is no network
BUSY = "another kvtool is building"


def pytest_configure() -> None:
    """Set the options of the sanitizers, so that no report goes unnoticed.

    Tests capture the output of programs and do not search it for reports. So each program writes its reports to files
    in REPORTS, and the fixture no_sanitizer_report looks for these files. In a program with ASan, UBSan ignores
    log_path and writes its reports to stderr. So a report of UBSan must end the program, which makes the test fail.
    """
    if SANITIZED:
        shutil.rmtree(REPORTS, ignore_errors=True)
        REPORTS.mkdir(parents=True)
        more = {"UBSAN": "print_stacktrace=1:halt_on_error=1", "TSAN": f"suppressions={SUPPRESSED}"}
        for name in ("ASAN", "UBSAN", "TSAN"):
            options = (os.environ.get(f"{name}_OPTIONS"), more.get(name), f"log_path={REPORTS / name.lower()}")
            os.environ[f"{name}_OPTIONS"] = ":".join(filter(None, options))


@pytest.fixture(autouse=True)
def no_sanitizer_report() -> Iterator[None]:
    """Fail a test if a program wrote a report of a sanitizer.

    If a fixture of the module started the program, the test that runs when the program ends fails.
    """
    before = set(REPORTS.glob("*"))
    yield
    found = sorted(set(REPORTS.glob("*")) - before)
    if found:
        pytest.fail("\n".join(path.read_text("utf-8", "replace")[:4000] for path in found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of verify first.

    These tests need a third of the time of all tests, and use all cores. If they ran last, some cores would be idle at
    the end.
    """
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
    first = Path(__file__).with_name("test_verify.py")
    items.sort(key=lambda item: item.path != first)


@dataclass(frozen=True)
class Real:
    """Describe the patched tree and its build directory.

    `toys_by` is the program that writes the toys (tiny test models).
    """

    tree: Path
    build: Path
    toys_by: Path

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def work(self) -> Path:
        """Return the folder in which verify and these tests write models."""
        return self.tree / "build" / "verify"

    @property
    def toys(self) -> Path:
        """Return the folder of the toy models. Make the toys if verify has not run yet."""
        return models.toys(self.toys_by, self.work)[0].parent

    def text_model(self, toy: str) -> Path:
        """Return a toy with a vocabulary, so that it can read and write text."""
        return self.with_vocabulary(self.toys / f"{toy}.gguf")

    def with_vocabulary(self, model: Path) -> Path:
        return models.text_model(model, self.tree / "models" / models.VOCABULARY, self.work)


def kvtool(*args: str) -> tuple[int, dict[str, Any]]:
    """Run kvtool as a process, and return its exit code and its JSON document.

    If another pytest process is building, kvtool refuses. Then repeat until the time limit of the test.
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
    """Build the patched tree with everything that verify needs.

    Several pytest processes build one after the other, because kvtool refuses to build twice at the same time. All of
    them use the same toys.
    """
    with lock_file(ROOT / "report" / "e2e.lock", Console(quiet=True), "the build of these tests"):
        # use the release build for every preset, because it writes the same files faster
        toys_by = _built("release", "test-llama-archs")
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
    """Return a small model that reads and writes text."""
    return real.text_model("llama-dense")


@pytest.fixture(scope="session")
def no_vocab_model(real: Real) -> Path:
    """Return a model with 64 KiB per cell, a training context of 262144 tokens and no vocabulary."""
    return models.cache_model(models.QWEN35_27B, real.work)


@pytest.fixture(scope="session")
def large_cell_model(real: Real, no_vocab_model: Path) -> Path:
    """Return the model of `no_vocab_model`, with a vocabulary added.

    The cells of this model are so large that they are most of a server's memory.
    """
    return real.with_vocabulary(no_vocab_model)


@pytest.fixture(scope="session")
def mmproj(real: Real, model: Path) -> Path:
    """Return a projector for `model`."""
    return projector(model, real.work)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the path of a trained model. Skip the tests if it cannot be downloaded."""
    if SANITIZED:
        pytest.skip("a trained model takes too long under a sanitizer")
    code, document = kvtool("fetch", "--model", "smollm2")
    if code == NETWORK:
        pytest.skip(f"SmolLM2 cannot be downloaded: {document['error']['why']}")
    assert code == 0, document
    return Path(document["file"])


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the marker for images in prompts. Otherwise, a server chooses a random marker."""
    monkeypatch.setenv("LLAMA_MEDIA_MARKER", MARKER)

"""Test `kvtool package` on a tiny tree that looks like llama.cpp: real CMake, real git, no network."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import VerifyError
from tests.conftest import Tiny, git

CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(tiny)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_library(llama SHARED src/lib.cpp)
set_target_properties(llama PROPERTIES VERSION 0.1.0 SOVERSION 0)
add_executable(llama-server src/main.cpp)
target_link_libraries(llama-server llama)
add_executable(test-llama-archs src/main.cpp)
target_link_libraries(test-llama-archs llama)
"""


@pytest.fixture
def tiny(project: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    project.add_patch(
        "build", ("CMakeLists.txt", "project(tiny)\nadd_library(a src/a.cpp src/new.cpp)\n", CMAKE.lstrip())
    )
    files = {
        "src/lib.cpp": "int lib() { return 7; }\n",
        "src/main.cpp": '#include <cstdio>\nint lib();\nint main() { std::printf("%d\\n", lib()); }\n',
        "vendor/x/LICENSE": "free\n",
        "LICENSE": "MIT\n",
    }
    for name, text in files.items():
        path = project.root / "cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return project


def package(kvtool: Any, out: Path, *more: str) -> Any:
    return kvtool("package", "--preset", "release", "--no-ui", "--out", str(out), "--json", *more)


def test_archive_runs_elsewhere(tiny: Tiny, kvtool: Any, tmp_path: Path) -> None:
    assert kvtool("apply").code == 0
    made = package(kvtool, tmp_path / "out").json
    assert made["ok"], made
    with tarfile.open(made["archive"]) as tar:
        tar.extractall(tmp_path / "there")
    folder = tmp_path / "there" / "llama-v1"
    (tiny.tree / "build").rename(tmp_path / "gone")  # from here on, the files of the build do not exist any more
    assert subprocess.run([folder / "llama-server"], capture_output=True, text=True).stdout == "7\n"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert {"libllama.so", "libllama.so.0", "libllama.so.0.1.0", "LICENSE", "licenses/LICENSE-x"} <= names
    assert "test-llama-archs" not in names
    assert names == set(made["files"])
    summed = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert summed.returncode == 0 and "llama-server: OK" in summed.stdout, summed.stderr

    said = json.loads((folder / "manifest.json").read_bytes())
    assert said["upstream"] == {"tag": "v1", "tree": git(tiny.upstream, "rev-parse", "v1^{tree}")}
    assert said["patched"]["tree"] == git(tiny.tree, "rev-parse", "HEAD^{tree}")
    assert (said["page"], said["flags"]["CMAKE_BUILD_TYPE"]) == (False, "Release")
    assert str(tmp_path) not in json.dumps(said), "no path of the machine that built it"
    # the tree after the mails are applied must be the same
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", "-b", "v1", str(tiny.upstream), str(again))
    git(again, "am", "-q", *(str(folder / "patches" / name) for name in said["patches"]))
    assert git(again, "rev-parse", "HEAD^{tree}") == said["patched"]["tree"]


def test_archive_of_same_build_is_equal(tiny: Tiny, kvtool: Any, tmp_path: Path) -> None:
    assert kvtool("apply").code == 0
    first = package(kvtool, tmp_path / "one").json
    # a library that the build of an earlier upstream left
    (tiny.tree / "build" / "cpu-release" / "bin" / "libllama.so.0.0.9").write_bytes(b"old")
    second = package(kvtool, tmp_path / "two").json
    assert first["sha256"] == second["sha256"]
    assert Path(first["archive"]).read_bytes() == Path(second["archive"]).read_bytes()


def test_changed_tree_is_not_packed(tiny: Tiny, kvtool: Any, tmp_path: Path) -> None:
    kvtool("apply")
    (tiny.tree / "src" / "lib.cpp").write_text("int lib() { return 8; }\n")
    refused = package(kvtool, tmp_path / "out")
    assert (refused.code, refused.json["error"]["code"]) == (4, "tree")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [(VerifyError("it does not run there"), 8, "it does not run there"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_failed_archive_is_removed(
    tiny: Tiny, kvtool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException, code: int, says: str
) -> None:
    kvtool("apply")

    def fails(*_args: object) -> None:
        raise ends

    monkeypatch.setattr("kvtool.package.check.check", fails)
    failed = package(kvtool, tmp_path / "out", "--check")
    assert (failed.code, failed.json["error"]["what"]) == (code, says)
    assert not list((tmp_path / "out").iterdir())

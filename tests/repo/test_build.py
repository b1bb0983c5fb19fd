"""Test kvtool build with the real CMake, ninja and compiler, on a tiny tree that looks like llama.cpp."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from kvtool import cli, process
from tests.conftest import Tiny

CMAKE = """
    cmake_minimum_required(VERSION 3.20)
    project(tiny C CXX)
    option(FAIL "stop while configuring" OFF)
    if (FAIL)
        message(FATAL_ERROR "Vulkan was not found")
    endif()
    set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
    include_directories(${CMAKE_SOURCE_DIR}/include)
    if (GREETING)
        add_compile_definitions(GREETING="${GREETING}")
    endif()
    add_executable(llama-server server.cpp other.c)
    add_executable(llama-bench bench.cpp)
    if (BATCHES)
        target_sources(llama-bench PRIVATE src/models/one.cpp src/models/two.cpp)
        set_target_properties(llama-bench PROPERTIES UNITY_BUILD ON)
        set_source_files_properties(bench.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
"""
SERVER = """
    #include <cstdio>
    #include "tiny.h"
    extern "C" int other(void);
    int main() { std::printf("%s %d\\n", GREETING, other()); }
"""
HEADER = """
    #ifndef GREETING
    #define GREETING "hello"
    #endif
"""

Run = Callable[..., dict[str, Any]]


def write_tree(root: Path) -> Path:
    """Make a tree that has two of llama.cpp's programs, but not the other default targets."""
    files = {
        "CMakeLists.txt": CMAKE,
        "include/tiny.h": HEADER,
        "server.cpp": SERVER,
        "other.c": "int other(void) { return 7; }\n",
        "bench.cpp": "int main() {}\n",
        "src/models/one.cpp": '#include "models.h"\nconst char * one() { return __FILE__; }\n',
        "src/models/two.cpp": '#include "models.h"\nconst char * two() { return __FILE__; }\n',
        "src/models/models.h": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `kvtool build --json` on a tree.

    It returns the JSON document, with the exit code as "exit".
    """
    project = tmp_path / "project"
    (project / "patches").mkdir(parents=True)
    (project / "patches" / "series.toml").touch()
    monkeypatch.setattr("kvtool.commands.build.require_applied", lambda _project: None)
    # without ccache, every machine runs the same commands
    monkeypatch.setenv("CCACHE_DISABLE", "1")

    def run(tree: Path, *arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        code = cli.run(["build", "--json", "--project", str(project), "--tree", str(tree), *arguments])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return {**document, "exit": code}

    return run


def output_of(tree: Path, name: str, build_name: str = "cpu-release") -> str:
    return process.capture([tree / "build" / build_name / "bin" / name]).stdout.strip()


def test_build_uses_existing_default_targets(build: Run, tree: Path) -> None:
    done = build(tree)
    assert (done["exit"], done["configured"]) == (0, True)
    assert done["targets"] == ["llama-server", "llama-bench"]
    assert (done["steps"], done["compiled"]) == (5, 3), "three objects, two programs"
    assert output_of(tree, "llama-server") == "hello 7"


def test_second_build_is_incremental(build: Run, tree: Path) -> None:
    build(tree)
    again = build(tree)
    assert (again["configured"], again["steps"]) == (False, 0)
    (tree / "other.c").write_text("int other(void) { return 8; }\n")
    edited = build(tree)
    assert (edited["configured"], edited["steps"]) == (False, 2), "one object, one program"
    assert output_of(tree, "llama-server") == "hello 8"


def test_failing_build_shows_command(build: Run, tree: Path) -> None:
    (tree / "other.c").write_text("int other(void) { return nonsense; }\n")
    failed = build(tree)
    assert failed["exit"] == 7
    error = failed["error"]
    assert (error["code"], error["what"]) == ("build", "the build failed at other.c")
    assert "nonsense" in error["why"]
    command, *said = error["output"].splitlines()
    assert "-c" in command and "other.c" in command
    assert any("nonsense" in line for line in said)
    (tree / "other.c").write_text("int other(void) { return 9; }\n")
    assert build(tree)["exit"] == 0


def test_unknown_target_suggests_name(build: Run, tree: Path) -> None:
    wrong = build(tree, "--target", "lama-server")
    assert (wrong["exit"], wrong["error"]["what"]) == (2, "there is no target lama-server")
    assert "llama-server" in wrong["error"]["why"]


def test_build_named_targets(build: Run, tree: Path) -> None:
    one = build(tree, "--target", "llama-bench")
    assert (one["targets"], one["steps"]) == (["llama-bench"], 2)
    assert build(tree, "--target", "all")["steps"] == 3


def test_new_default_target_is_built(build: Run, tree: Path) -> None:
    build(tree)
    with (tree / "CMakeLists.txt").open("a") as file:
        file.write("\nadd_executable(kv-check bench.cpp)\n")
    done = build(tree)
    assert done["targets"] == ["llama-server", "llama-bench", "kv-check"]
    assert done["configured"] is False, "ninja runs CMake again itself"


def test_define_is_not_remembered(build: Run, tree: Path) -> None:
    assert build(tree, "-D", "GREETING=hi")["configured"] is True
    assert output_of(tree, "llama-server") == "hi 7"
    assert build(tree)["configured"] is True
    assert output_of(tree, "llama-server") == "hello 7"


def test_failed_configure_is_repeated(build: Run, tree: Path) -> None:
    build(tree)
    failed = build(tree, "-D", "FAIL=ON")
    assert failed["exit"] == 7
    assert failed["error"]["what"] == "configure failed"
    assert "Vulkan was not found" in failed["error"]["why"]
    assert build(tree)["configured"] is True


@pytest.mark.parametrize("colour", ["CLICOLOR_FORCE", "MAKE_TERMERR MAKE_TERMOUT"])
def test_reason_is_not_coloured(build: Run, tree: Path, monkeypatch: pytest.MonkeyPatch, colour: str) -> None:
    """Set the variables with which CMake colours its output. GNU make sets two of them in a terminal."""
    for name in colour.split():
        monkeypatch.setenv(name, "1" if name == "CLICOLOR_FORCE" else "/dev/pts/0")
    failed = build(tree, "-D", "FAIL=ON")
    assert "Vulkan was not found" in failed["error"]["why"]


def test_broken_cmakelists_shows_reason(build: Run, tree: Path) -> None:
    build(tree)
    (tree / "CMakeLists.txt").write_text((tree / "CMakeLists.txt").read_text() + "\nno_such_command()\n")
    failed = build(tree)
    assert (failed["exit"], failed["error"]["what"]) == (7, "configure failed")
    assert "no_such_command" in failed["error"]["why"]


def test_directory_per_backend_and_preset(build: Run, tree: Path) -> None:
    build(tree, "--preset", "debug")
    build(tree, "--preset", "asan", "-t", "llama-bench")
    assert sorted(path.name for path in (tree / "build").iterdir()) == ["cpu-asan", "cpu-debug"]
    assert Path(build(tree, "--vulkan", "--preset", "asan", "--dry-run")["build_dir"]).name == "vulkan-asan"


def test_parallel_build_is_refused(build: Run, tree: Path) -> None:
    build(tree)
    with filelock.FileLock(tree / "build" / "cpu-release" / "kvtool.lock"):
        refused = build(tree)
    assert (refused["exit"], refused["error"]["what"]) == (7, "another kvtool is building or verifying there")
    assert build(tree)["exit"] == 0


@pytest.mark.skipif(shutil.which("ccache") is None, reason="ccache is not installed")
def test_ccache_hits_at_other_path(build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CCACHE_DISABLE")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    # upstream compiles its models in batches: a generated source includes the real sources by their path
    first = build(write_tree(tmp_path / "first"), "-D", "BATCHES=ON")
    assert (first["cache_hits"], first["cache_misses"]) == (0, 4)
    elsewhere = tmp_path / "a" / "longer path"
    second = build(write_tree(elsewhere), "-D", "BATCHES=ON")
    assert (second["cache_hits"], second["cache_misses"]) == (4, 0)
    assert output_of(elsewhere, "llama-server") == "hello 7"


@pytest.mark.skipif(shutil.which("ccache") is None, reason="ccache is not installed")
def test_ccache_keeps_debug_source_paths(build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CCACHE_DISABLE")
    monkeypatch.setenv("CCACHE_DIR", str(tmp_path / "ccache"))
    build(write_tree(tmp_path / "first"), "--preset", "debug")
    second = build(write_tree(tmp_path / "second"), "--preset", "debug")
    assert second["cache_misses"] == 3
    objects = (tmp_path / "second" / "build" / "cpu-debug").rglob("server.cpp.o")
    assert b"/second/build/cpu-debug" in next(objects).read_bytes()


def test_build_directory_is_relocatable(build: Run, tree: Path, tmp_path: Path) -> None:
    with (tree / "CMakeLists.txt").open("a") as file:
        file.write("\nset(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)\nadd_library(lib SHARED other.c)\n")
        file.write("add_executable(llama-cli server.cpp)\ntarget_link_libraries(llama-cli lib)\n")
    build(tree)
    (tree / "build" / "cpu-release" / "bin").rename(tmp_path / "elsewhere")
    assert process.capture([tmp_path / "elsewhere" / "llama-cli"]).stdout.strip() == "hello 7"


PAGE = """
if (LLAMA_BUILD_UI)
    add_custom_target(assets
        COMMAND ${CMAKE_COMMAND} -E echo "-- UI: ${SAYS}" COMMAND ${CMAKE_COMMAND} -E echo "  UI: ${THEN}" VERBATIM)
    add_dependencies(llama-server assets)
endif()
"""
MISSING = "-D", "SAYS=npm ci failed (1)", "-D", "THEN=no assets available - building without"


@pytest.fixture
def page(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Add a web page to the server of the tree. Return a function that sets whether this machine has npm."""
    with (tree / "CMakeLists.txt").open("a") as file:
        file.write(PAGE)
    real = process.which

    def npm(there: bool) -> None:
        found = Path("/n/npm") if there else None
        monkeypatch.setattr(process, "which", lambda name: found if name == "npm" else real(name))

    return npm


def built_page(tree: Path) -> bool:
    return "LLAMA_BUILD_UI:UNINITIALIZED=ON" in (tree / "build/cpu-release/CMakeCache.txt").read_text()


def test_page_is_built_with_npm(build: Run, tree: Path, page: Callable[[bool], None]) -> None:
    page(True)
    assert build(tree)["ui"] is True and built_page(tree)
    page(False)
    assert build(tree)["ui"] is False and not built_page(tree)


def test_no_ui_is_remembered(build: Run, tree: Path, page: Callable[[bool], None]) -> None:
    page(True)
    assert build(tree, "--no-ui")["ui"] is False
    again = build(tree)
    assert (again["ui"], again["configured"]) == (False, False), "otherwise verify would build the page again"
    assert build(tree, "--ui")["ui"] is True and built_page(tree)


def test_requested_page_needs_npm(build: Run, tree: Path, page: Callable[[bool], None]) -> None:
    page(False)
    refused = build(tree, "--ui")
    assert (refused["exit"], refused["error"]["code"]) == (7, "missing_tool")
    assert "npm" in refused["error"]["next"] and "--no-ui" in refused["error"]["next"]
    assert not (tree / "build").exists(), "nothing was started"


def test_npm_failure_is_error_if_requested(build: Run, tree: Path, page: Callable[[bool], None]) -> None:
    page(True)
    without = build(tree, *MISSING)
    assert (without["exit"], without["no_page"]) == (0, "npm ci failed (1)")
    failed = build(tree, "--ui", *MISSING)
    assert (failed["exit"], failed["error"]["what"]) == (7, "llama-server was built without its web page")
    assert failed["error"]["why"] == "npm ci failed (1)"


@pytest.fixture
def compiles(project: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Add a patch with which the library of the tiny project compiles."""
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    project.add_patch("declare", ("src/a.cpp", "int function_1(", "int grown();\nint function_1("))
    return project


def test_only_applied_tree_is_built(compiles: Tiny, kvtool: Any) -> None:
    missing = kvtool("build", "--json")
    assert (missing.code, missing.json["error"]["code"]) == (4, "tree")
    kvtool("apply")
    assert kvtool("build").code == 0
    source = compiles.tree / "src" / "a.cpp"
    text = source.read_text()

    source.write_text(text + "// mine\n")
    dirty = kvtool("build", "--json")
    assert (dirty.code, dirty.json["error"]["code"]) == (4, "tree")
    source.write_text(text)
    assert kvtool("build").code == 0, "after the revert, it is the applied tree"

    compiles.add_patch("more", ("src/b.h", "bool three;", "bool three; // 3"))
    log = compiles.tree / "build" / "cpu-release" / ".ninja_log"
    before = log.read_bytes()
    stale = kvtool("build", "--json")
    assert (stale.code, stale.json["error"]["next"]) == (4, "kvtool apply")
    assert log.read_bytes() == before, "nothing was started"


def test_apply_again_rebuilds_nothing(compiles: Tiny, kvtool: Any) -> None:
    kvtool("apply")
    assert kvtool("build", "--json").json["steps"] == 3, "two objects, one library"
    kvtool("apply")
    again = kvtool("build", "--json").json
    assert (again["configured"], again["steps"]) == (False, 0)
    compiles.add_patch("eight", ("src/a.cpp", "int y = x + 8;", "int y = x + 9;"))
    kvtool("apply")
    assert kvtool("build", "--json").json["steps"] == 2, "one object, the library; not src/new.cpp"


def test_changed_cpp_file_rebuilds_dependents(compiles: Tiny, kvtool: Any) -> None:
    (compiles.root / "cpp/src/new.h").write_text("extern int brand_new;\n")
    (compiles.root / "cpp/src/new.cpp").write_text('#include "new.h"\nint brand_new;\n')
    kvtool("apply")
    assert kvtool("build", "--json").json["steps"] == 3, "two objects, one library"
    untouched = compiles.tree / "src" / "a.cpp"
    stamp = untouched.stat().st_mtime_ns
    (compiles.root / "cpp/src/new.h").write_text("extern int brand_new; // documented\n")
    kvtool("apply")
    built = kvtool("build", "--json").json
    assert (built["configured"], built["steps"], built["compiled"]) == (False, 2, 1), "src/new.cpp, the library"
    assert untouched.stat().st_mtime_ns == stamp
    kvtool("apply")
    assert kvtool("build", "--json").json["steps"] == 0

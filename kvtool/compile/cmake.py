"""Describe how to configure and build llama.cpp: backends, presets, flags, targets, the exact commands.

Pure: nothing here runs a program, so `kvtool build --dry-run` and the tests see the commands of any system.
builder.py runs a plan.
"""

import fnmatch
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# What kvtool sets for every backend. Nothing here lets configure or build use the network.
COMMON_FLAGS: Mapping[str, str] = {
    "LLAMA_BUILD_TESTS": "ON",  # test-llama-archs, which writes the models that verify needs, and our own unit tests
    "LLAMA_BUILD_UI": "OFF",  # the web page of llama-server; --ui turns it on, and npm then asks its registry
    "LLAMA_USE_PREBUILT_UI": "OFF",  # the same page, downloaded while the server is built
    "LLAMA_OPENSSL": "OFF",  # https, which -hf needs: on if Toolchain.https has flags
    "GGML_RPC": "ON",  # other machines' devices, and ggml-rpc-server: upstream's releases have them
    "GGML_RPC_RDMA": "OFF",  # as with OpenSSL: over a system library
    "GGML_CCACHE": "OFF",  # the launchers below are the one way to ccache
}

PAGE_ON = "-DLLAMA_BUILD_UI=ON"
# so that bin/ can be copied or moved as a whole: programs search for their libraries in their own folder
_RPATH = {"Darwin": "@loader_path", "Linux": "$ORIGIN"}


class Backend(NamedTuple):
    """Hold a backend's additions to the common flags. system: the only system it builds on, or "" for any."""

    flags: Mapping[str, str]
    languages: tuple[str, ...] = ("C", "CXX")
    system: str = ""


# GGML_METAL is upstream's default on macOS, so every other backend sets OFF: a backend means the same everywhere.
# EMBED_LIBRARY compiles the shaders at start-up from inside the library: no full Xcode needed, and bin/ can be moved.
BACKENDS: Mapping[str, Backend] = {
    "cpu": Backend({"GGML_METAL": "OFF"}),
    "metal": Backend(
        {
            "GGML_METAL": "ON",
            "GGML_METAL_EMBED_LIBRARY": "ON",
            "GGML_ACCELERATE": "ON",
            "GGML_BLAS": "ON",
            "GGML_BLAS_VENDOR": "Apple",
            "GGML_NATIVE": "ON",
        },
        system="Darwin",
    ),
    "cuda": Backend({"GGML_CUDA": "ON", "GGML_METAL": "OFF"}, languages=("C", "CXX", "CUDA")),
    "vulkan": Backend({"GGML_VULKAN": "ON", "GGML_METAL": "OFF"}),
}


class Preset(NamedTuple):
    """A kind of build. A debugger needs the true directory of the sources, so debug keeps it in ccache's key.

    extras: with what else the machine lets llama-server have: its web page where npm is, https where OpenSSL is;
    portable: for any machine of its kind, and not this one alone.
    """

    flags: Mapping[str, str]
    ccache_any_dir: bool = True
    extras: bool = False
    portable: bool = False


# Less to compile and to run than with -O2 -g, and a report still names function and line.
_SANITIZED: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    "CMAKE_C_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG",
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG",
    "GGML_OPENMP": "OFF",  # its barriers are invisible to a thread sanitizer: nothing but false reports
}


def _sanitized(*kinds: str) -> Preset:
    """Upstream's sanitizer options do not reach ggml: both sets are needed."""
    return Preset({**_SANITIZED, **{f"{part}_SANITIZE_{kind}": "ON" for part in ("LLAMA", "GGML") for kind in kinds}})


PRESETS: Mapping[str, Preset] = {
    "release": Preset({"CMAKE_BUILD_TYPE": "Release"}, extras=True),
    "dist": Preset({"CMAKE_BUILD_TYPE": "Release"}, extras=True, portable=True),
    "debug": Preset({"CMAKE_BUILD_TYPE": "Debug"}, ccache_any_dir=False),
    "asan": _sanitized("ADDRESS", "UNDEFINED"),
    "tsan": _sanitized("THREAD"),
}

# As upstream's releases have it: a CPU library for each generation of processors, chosen when a program starts. On a
# Mac one serves all, and the oldest system is named instead.
_PORTABLE = {"GGML_NATIVE": "OFF", "GGML_BACKEND_DL": "ON", "GGML_CPU_ALL_VARIANTS": "ON"}
_PORTABLE_ON_A_MAC = {"GGML_NATIVE": "OFF", "CMAKE_OSX_DEPLOYMENT_TARGET": "13.3"}

RPC_SERVER = "ggml-rpc-server"
# Programs for users of the dynamic cache, and for verify. Targets that an older upstream lacks are left out.
USER_TARGETS = ("llama-server", "llama-cli", "llama-completion", "llama-bench", "llama-perplexity", RPC_SERVER)
VERIFY_TARGETS = ("kv-check", "test-llama-archs")
# further programs that a user expects
PORTABLE_TARGETS = ("llama-quantize", "llama-gguf-split", "llama-imatrix", "llama-mtmd-cli")
BENCH_TARGET = "kv-bench"  # built when it is asked for

# Environment variables that CMake reads when it configures. If they change, the build is configured again.
_CMAKE_ENV = ("CC", "CXX", "CUDACXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH", "VULKAN_SDK")


@dataclass(frozen=True)
class Toolchain:
    """Hold the tools of a plan.

    flags: cache variables with the places of tools for CMake
    https: cache variables that enable OpenSSL; empty without OpenSSL
    """

    cmake: Path
    ninja: Path
    ccache: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    npm: Path | None = None
    https: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One build, and from that what runs, where, with which additions to the environment.

    tests: the C++ unit tests that cpp/ brings to the tree; chosen: the targets that the user named, so that an unknown
    one is an error; defines: the user's own -D, which win; with_page: llama-server has its web page if there is an npm
    to make it; page_required: without it is an error.
    """

    tree: Path
    tools: Toolchain
    backend: str
    preset: str
    system: str
    jobs: int
    tests: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    defines: Mapping[str, str] = field(default_factory=dict)
    with_page: bool = False
    page_required: bool = False

    @property
    def build_dir(self) -> Path:
        """Return the build directory of this plan."""
        return build_dir(self.tree, self.backend, self.preset)

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the named targets, or programs for the user, programs for verify, and the unit tests of cpp/."""
        if self.chosen:
            return self.chosen
        if PRESETS[self.preset].portable:  # the tests call the CPU's library, which programs here load when they start
            return (*USER_TARGETS, *PORTABLE_TARGETS, *VERIFY_TARGETS)
        return (*USER_TARGETS, *VERIFY_TARGETS, *self.tests)

    @property
    def flags(self) -> dict[str, str]:
        """Return every cache variable, in the order of CMake's command line."""
        backend, preset, tools = BACKENDS[self.backend], PRESETS[self.preset], self.tools
        system = backend.system or self.system
        out = {**preset.flags, **COMMON_FLAGS}
        if system in _RPATH:
            out |= {"CMAKE_BUILD_WITH_INSTALL_RPATH": "ON", "CMAKE_INSTALL_RPATH": _RPATH[system]}
        out |= backend.flags
        if preset.portable:
            out |= _PORTABLE_ON_A_MAC if system == "Darwin" else _PORTABLE
        if self.page_required or (self.with_page and tools.npm):
            out["LLAMA_BUILD_UI"] = "ON"
        if tools.ccache:
            out |= {f"CMAKE_{language}_COMPILER_LAUNCHER": str(tools.ccache) for language in backend.languages}
            # upstream compiles its models in batches, whose generated files must not name the tree they were made in
            out["CMAKE_UNITY_BUILD_RELOCATABLE"] = "ON"
        # not in a portable build for Macs: the system has no OpenSSL there, only who installed one
        https = tools.https if preset.extras and not (preset.portable and system == "Darwin") else {}
        return {**out, **tools.flags, **https, **self.defines}

    @property
    def configure(self) -> tuple[str, ...]:
        """Return the command that configures the build."""
        # --fresh: forget the results of an earlier configure; objects stay, ninja compares commands
        places = ("--fresh", "-S", str(self.tree), "-B", str(self.build_dir), "-G", "Ninja")
        tools = str(self.tools.cmake), *places, f"-DCMAKE_MAKE_PROGRAM={self.tools.ninja}"
        return (*tools, *(f"-D{name}={value}" for name, value in self.flags.items()))

    @property
    def env(self) -> dict[str, str]:
        """Return the variables that the commands need in the environment."""
        out: dict[str, str] = {}
        if self.tools.ccache:
            # it hits in a checkout at another path: paths below the tree count relative to the build
            out |= {"CCACHE_BASEDIR": str(self.tree), "CCACHE_STATSLOG": str(self.build_dir / "ccache.stats")}
            out |= {"CCACHE_NOHASHDIR": "1"} if PRESETS[self.preset].ccache_any_dir else {}
        if self.page:
            # upstream's script that calls npm needs it on PATH, and no long wait for a registry that is away
            out |= {"npm_config_fetch_retries": "1", "npm_config_audit": "false", "npm_config_fund": "false"}
            if self.tools.npm and shutil.which("npm") is None:
                out["PATH"] = os.pathsep.join((str(self.tools.npm.parent), os.environ.get("PATH", "")))
        return out

    @property
    def page(self) -> bool:
        """Return True if llama-server is built with its web page."""
        return PAGE_ON in self.configure

    def build(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return the command that builds these targets."""
        where = ("--build", str(self.build_dir), "--parallel", str(self.jobs))
        return (str(self.tools.cmake), *where, "--target", *targets)

    @property
    def key(self) -> str:
        """Changes when the build directory must be configured again; has the command that does."""
        return json.dumps([self.configure, {name: os.environ.get(name, "") for name in _CMAKE_ENV}])


def unit_test_targets(files: Iterable[str]) -> tuple[str, ...]:
    """Return the C++ unit tests among some files of cpp/, by the names of their targets."""
    return tuple(sorted(Path(file).stem for file in files if fnmatch.fnmatchcase(file, "tests/test-kv-*.cpp")))


def build_dir(tree: Path, backend: str = "cpu", preset: str = "release") -> Path:
    """Return the build directory of a backend and a preset in a tree."""
    return tree / "build" / f"{backend}-{preset}"

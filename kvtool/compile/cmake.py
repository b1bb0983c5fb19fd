"""Define how llama.cpp is configured and built: backends, presets, flags, targets and the exact commands.

No program is run here. So `kvtool build --dry-run` and the tests can print the commands for any system. builder.py runs
a plan.
"""

import fnmatch
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# Values that kvtool sets for every backend. With them, configuring and building do not use the network.
COMMON_FLAGS: Mapping[str, str] = {
    # for test-llama-archs, which makes the models of kvtool verify, and for the unit tests of cpp/
    "LLAMA_BUILD_TESTS": "ON",
    "LLAMA_BUILD_UI": "OFF",  # the web page of llama-server; --ui turns it on, and then npm uses its registry
    "LLAMA_USE_PREBUILT_UI": "OFF",  # the same page, which the build would download
    "LLAMA_OPENSSL": "OFF",  # https, which the option -hf needs; on if Toolchain.https has flags
    "GGML_RPC": "ON",  # devices of other machines, and ggml-rpc-server; upstream's releases have this, too
    "GGML_RPC_RDMA": "OFF",  # off, because it would need a library of the system
    "GGML_CCACHE": "OFF",  # off, because the compiler launchers below start ccache
}

PAGE_ON = "-DLLAMA_BUILD_UI=ON"
# Programs search for their libraries in their own folder, so that bin/ can be copied or moved as a whole.
_RPATH = {"Darwin": "@loader_path", "Linux": "$ORIGIN"}


class Backend(NamedTuple):
    """Hold the values that a backend adds to the common flags.

    system: the only system that the backend can be built on, "" for any
    """

    flags: Mapping[str, str]
    languages: tuple[str, ...] = ("C", "CXX")
    system: str = ""


# On macOS, GGML_METAL is on by default. So every other backend turns it off, and a backend means the same on every
# system. EMBED_LIBRARY puts the shaders into the library, which compiles them when a program starts. So Xcode is not
# needed as a whole, and bin/ can be moved.
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
    """Describe a kind of build.

    flags: the values that the preset adds
    ccache_any_dir: whether ccache may reuse a result from another folder; off for debug, because a debugger needs the
        right folder of the sources
    extras: whether llama-server has its web page (if npm is installed) and https (if OpenSSL is installed)
    portable: whether the programs run on other machines, too
    """

    flags: Mapping[str, str]
    ccache_any_dir: bool = True
    extras: bool = False
    portable: bool = False


# this needs less time to compile and to run than -O2 -g, and a report still has the function and the line
_SANITIZED: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    "CMAKE_C_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG",
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG",
    # the thread sanitizer does not see OpenMP's barriers, and would only report errors that are none
    "GGML_OPENMP": "OFF",
}


def _sanitized(*kinds: str) -> Preset:
    """Return a preset with sanitizers.

    Upstream's CMake options LLAMA_SANITIZE_... do not affect ggml, so the options GGML_SANITIZE_... are set, too.
    """
    return Preset({**_SANITIZED, **{f"{part}_SANITIZE_{kind}": "ON" for part in ("LLAMA", "GGML") for kind in kinds}})


PRESETS: Mapping[str, Preset] = {
    "release": Preset({"CMAKE_BUILD_TYPE": "Release"}, extras=True),
    "dist": Preset({"CMAKE_BUILD_TYPE": "Release"}, extras=True, portable=True),
    "debug": Preset({"CMAKE_BUILD_TYPE": "Debug"}, ccache_any_dir=False),
    "asan": _sanitized("ADDRESS", "UNDEFINED"),
    "tsan": _sanitized("THREAD"),
}

# As in upstream's releases, there is a CPU library for each generation of processors, and a program chooses one when it
# starts. On a Mac one library is enough; there the oldest supported system is set instead.
_PORTABLE = {"GGML_NATIVE": "OFF", "GGML_BACKEND_DL": "ON", "GGML_CPU_ALL_VARIANTS": "ON"}
_PORTABLE_ON_A_MAC = {"GGML_NATIVE": "OFF", "CMAKE_OSX_DEPLOYMENT_TARGET": "13.3"}

RPC_SERVER = "ggml-rpc-server"
# The programs for users of the dynamic cache, and those for verify. Targets that an older upstream does not have are
# left out.
USER_TARGETS = ("llama-server", "llama-cli", "llama-completion", "llama-bench", "llama-perplexity", RPC_SERVER)
VERIFY_TARGETS = ("kv-check", "test-llama-archs")
# further programs that users expect
PORTABLE_TARGETS = ("llama-quantize", "llama-gguf-split", "llama-imatrix", "llama-mtmd-cli")
BENCH_TARGET = "kv-bench"  # is built only if it is named

# CMake reads these environment variables when it configures. If one changes, the build is configured again.
_CMAKE_ENV = ("CC", "CXX", "CUDACXX", "CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_PREFIX_PATH", "VULKAN_SDK")


@dataclass(frozen=True)
class Toolchain:
    """Hold the tools of a plan.

    flags: the CMake variables with the paths of tools
    https: the CMake variables that enable OpenSSL; empty if OpenSSL is not installed
    """

    cmake: Path
    ninja: Path
    ccache: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    npm: Path | None = None
    https: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Describe one build: the commands, their folder and their environment.

    tests: the targets of the C++ unit tests in cpp/
    chosen: the targets that the user named; an unknown target is an error
    defines: the CMake variables that the user set with -D; they have priority
    with_page: build llama-server's web page if npm is installed
    page_required: treat a missing web page as an error
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
        """Return the targets that the user named.

        Without names, return the programs for users, the programs for verify, and the unit tests of cpp/.
        """
        if self.chosen:
            return self.chosen
        # In a portable build, a program loads the CPU library when it starts. Unit tests call functions of this
        # library directly, so a portable build leaves out the unit tests.
        if PRESETS[self.preset].portable:
            return (*USER_TARGETS, *PORTABLE_TARGETS, *VERIFY_TARGETS)
        return (*USER_TARGETS, *VERIFY_TARGETS, *self.tests)

    @property
    def flags(self) -> dict[str, str]:
        """Return all CMake variables in the order of the command line."""
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
            # upstream compiles its models in batches; the generated files must not contain the path of the tree
            out["CMAKE_UNITY_BUILD_RELOCATABLE"] = "ON"
        # not in a portable build for Macs: macOS contains no OpenSSL, so it may be missing on the other Mac
        https = tools.https if preset.extras and not (preset.portable and system == "Darwin") else {}
        return {**out, **tools.flags, **https, **self.defines}

    @property
    def configure(self) -> tuple[str, ...]:
        """Return the command that configures the build."""
        # --fresh forgets the results of an earlier configuration; the object files stay, and ninja compares commands
        places = ("--fresh", "-S", str(self.tree), "-B", str(self.build_dir), "-G", "Ninja")
        tools = str(self.tools.cmake), *places, f"-DCMAKE_MAKE_PROGRAM={self.tools.ninja}"
        return (*tools, *(f"-D{name}={value}" for name, value in self.flags.items()))

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables that the commands need."""
        out: dict[str, str] = {}
        if self.tools.ccache:
            # with this, ccache finds results of a checkout at another path: it sees paths in the tree relative to the
            # build
            out |= {"CCACHE_BASEDIR": str(self.tree), "CCACHE_STATSLOG": str(self.build_dir / "ccache.stats")}
            out |= {"CCACHE_NOHASHDIR": "1"} if PRESETS[self.preset].ccache_any_dir else {}
        if self.page:
            # upstream's script finds npm on PATH; do not wait long for a registry that cannot be reached
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
        """Return a text that changes if the build directory must be configured again.

        It contains the command that configures.
        """
        return json.dumps([self.configure, {name: os.environ.get(name, "") for name in _CMAKE_ENV}])


def unit_test_targets(files: Iterable[str]) -> tuple[str, ...]:
    """Return the targets of the C++ unit tests among some files of cpp/."""
    return tuple(sorted(Path(file).stem for file in files if fnmatch.fnmatchcase(file, "tests/test-kv-*.cpp")))


def build_dir(tree: Path, backend: str = "cpu", preset: str = "release") -> Path:
    """Return the build directory of a backend and a preset in a tree."""
    return tree / "build" / f"{backend}-{preset}"

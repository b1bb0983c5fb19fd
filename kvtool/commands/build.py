"""Implement `kvtool build`: configure and build the patched tree."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool import process
from kvtool.compile import builder, cmake, toolchain
from kvtool.console import Console
from kvtool.errors import UsageError
from kvtool.machine import cores
from kvtool.options import Context, Cpu, Cuda, Env, Jobs, Metal, Preset, Vulkan, choose_backend, env_of
from kvtool.project import Project
from kvtool.result import Result
from kvtool.worktree.status import carried_files, require_applied


@dataclass(frozen=True)
class Options:
    backend: str = "cpu"
    preset: str = "release"
    targets: tuple[str, ...] = ()
    jobs: int = 0
    defines: tuple[str, ...] = ()
    # True: with llama-server's web page; None: as in the last build, or in a first build if npm is installed
    ui: bool | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Command:
    """Hold a command line, and the environment variables that are added to kvtool's environment for this command."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def __str__(self) -> str:
        given = (f"{name}={process.quote([value])}" for name, value in self.env.items())
        return " ".join((*given, process.quote(self.argv)))


@dataclass(frozen=True, kw_only=True)
class Built(builder.Outcome, Result, command="build"):
    """Report a successful build. With dry_run, report only the commands of a build.

    commands: the command that configures and the command that builds
    seconds: the duration of the whole `kvtool build`
    ui: True if llama-server's web page is part of the build
    """

    tree: Path
    build_dir: Path
    bin_dir: Path
    backend: str
    preset: str
    jobs: int
    dry_run: bool
    commands: tuple[Command, ...]
    seconds: float
    ui: bool

    def render(self, console: Console) -> None:
        if self.dry_run:
            for command in self.commands:
                console.line(str(command))
            return
        cached = f", {self.cache_hits} of them by ccache" if self.cache_hits else ""
        work = f"{self.compiled} files compiled{cached}" if self.compiled else "nothing to compile"
        console.line(f"built {self.backend}-{self.preset} in {self.seconds:.1f} s ({work})")
        console.line(f"programs: {self.bin_dir}")


def make_plan(project: Project, options: Options, tools: cmake.Toolchain) -> cmake.Plan:
    """Return the plan of a build. Raise UsageError for an unknown preset or a negative number of jobs."""
    if options.preset not in cmake.PRESETS:
        raise UsageError(f"no preset {options.preset}", next_step=f"--preset {'|'.join(cmake.PRESETS)}")
    if options.jobs < 0:
        raise UsageError(f"--jobs {options.jobs} is negative", next_step="use --jobs 0 for one job per core")
    page = options.ui
    # keep the choice of the last build, so that the build of `kvtool verify` does not change the choice of the user
    if page is None:
        known = builder.configured_page(cmake.build_dir(project.tree, options.backend, options.preset))
        page = cmake.PRESETS[options.preset].extras if known is None else known
    return cmake.Plan(
        *(project.tree, tools, options.backend, options.preset, platform.system()),
        options.jobs or cores(),
        tests=cmake.unit_test_targets(carried_files(project)),
        chosen=options.targets,
        defines=parse_defines(options.defines),
        with_page=page,
        page_required=options.ui is True,
    )


def parse_defines(given: Sequence[str]) -> dict[str, str]:
    """Parse options of the form NAME=VALUE. Raise UsageError for any other form."""
    if wrong := [text for text in given if text.find("=") < 1]:
        raise UsageError(f"-D {wrong[0]} is not NAME=VALUE", next_step="for example -D GGML_LTO=ON")
    return dict(text.split("=", 1) for text in given)


def build_project(env: Env, options: Options) -> Built:
    """Build the patched tree of the project. With dry_run, return the commands without running them."""
    project, started = env.project, time.monotonic()
    project.require_llama_cpp("build")
    if options.dry_run:
        planned = make_plan(project, options, toolchain.for_dry_run(options.backend))
        outcome = builder.Outcome(planned.targets)
    else:
        tools = toolchain.require(options.backend)
        if options.ui:
            toolchain.require_npm()
        planned = make_plan(project, options, tools)
        require_applied(project)
        outcome = builder.build_tree(planned, env.console)
    return Built(
        **vars(outcome),
        tree=planned.tree,
        build_dir=planned.build_dir,
        bin_dir=planned.build_dir / "bin",
        backend=planned.backend,
        preset=planned.preset,
        jobs=planned.jobs,
        dry_run=options.dry_run,
        commands=tuple(Command(argv, planned.env) for argv in (planned.configure, planned.build(outcome.targets))),
        seconds=time.monotonic() - started,
        ui=planned.page,
    )


def command(
    ctx: Context,
    cpu: Cpu = False,
    metal: Metal = False,
    cuda: Cuda = False,
    vulkan: Vulkan = False,
    preset: Preset = "release",
    targets: Annotated[
        list[str] | None,
        Option(
            "--target",
            "-t",
            metavar="T",
            help="Build this target instead of the default targets; `all` builds everything.",
        ),
    ] = None,
    jobs: Jobs = 0,
    defines: Annotated[
        list[str] | None,
        Option(
            "--define",
            "-D",
            metavar="NAME=VALUE",
            help="Set a CMake option of llama.cpp. It overrides the value that kvtool sets.",
        ),
    ] = None,
    ui: Annotated[
        bool | None,
        Option(
            "--ui/--no-ui",
            help="Build llama-server's web page or not [as in the last build; at first, if npm is installed].",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", "-n", help="Print the exact commands and run nothing.")] = False,
) -> Built:
    """Build the patched llama.cpp.

    Configures and builds with cmake and ninja, in TREE/build/BACKEND-PRESET. The programs are in its folder bin/. You
    can move this folder as a whole on this machine. For another machine, make an archive with kvtool package. ccache is
    used if it is installed.

    If npm is installed, llama-server contains its web page, built from the sources in the tree. For this, npm downloads
    packages from its registry, which needs minutes. With --ui, a failure of npm is an error. After --no-ui, later
    builds leave the page out too, until --ui. If OpenSSL's headers are installed, the programs support https, which
    their option -hf needs.

        kvtool build --metal            # llama-server and friends for a Mac's GPU
        kvtool build --preset debug     # with assertions and for a debugger
        kvtool build -D GGML_LTO=ON --target llama-server
    """
    options = Options(
        backend=choose_backend(cpu=cpu, metal=metal, cuda=cuda, vulkan=vulkan),
        preset=preset,
        targets=tuple(targets or ()),
        jobs=jobs,
        defines=tuple(defines or ()),
        ui=ui,
        dry_run=dry_run,
    )
    return build_project(env_of(ctx), options)

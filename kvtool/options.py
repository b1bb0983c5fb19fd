"""Define the environment of a command, and the options that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import UsageError
from kvtool.process import quote
from kvtool.project import Project, find_project

Context: TypeAlias = typer.Context


class Env:
    """Hold the console and the project. The first use of `project` searches for it, or raises UsageError."""

    def __init__(self, console: Console, find: Callable[[], Project]) -> None:
        self.console, self._find = console, find

    @functools.cached_property
    def project(self) -> Project:
        """Search for the project on first use, and return it."""
        found = self._find()
        self.console.upstream = found.name
        return found


BACKENDS = {
    "cpu": "Build for the CPU only (the default).",
    "metal": "Build for Apple's GPUs, on macOS.",
    "cuda": "Build for NVIDIA's GPUs. This needs nvcc.",
    "vulkan": "Build for any GPU with Vulkan. This needs glslc.",
}
Cpu = Annotated[bool, Option("--cpu", help=BACKENDS["cpu"])]
Metal = Annotated[bool, Option("--metal", help=BACKENDS["metal"])]
Cuda = Annotated[bool, Option("--cuda", help=BACKENDS["cuda"])]
Vulkan = Annotated[bool, Option("--vulkan", help=BACKENDS["vulkan"])]
Preset = Annotated[
    str,
    Option(
        "--preset",
        metavar="NAME",
        help="Kind of build. release: for this processor. dist: for other machines, too. debug: with assertions, for a "
        "debugger. asan, tsan: with the sanitizer of this name.",
    ),
]
Jobs = Annotated[int, Option("--jobs", "-j", metavar="N", help="Number of parallel jobs. 0 means one per core.")]
Tag = Annotated[str | None, Argument(metavar="TAG", help="Upstream tag of patches/upstream.lock [the current one].")]
Mirror = Annotated[
    str | None,
    Option("--mirror", metavar="PATH|URL", help="Fetch upstream only from this git repository (or KVTOOL_UPSTREAM)."),
]
Groups = Annotated[
    list[str] | None,
    Option(
        "--group",
        metavar="ID",
        help="Use only this group of series.toml and the groups that it depends on. May be repeated [all groups].",
    ),
]
BinDir = Annotated[
    Path | None, Option("--bin", metavar="DIR", help="Use the programs in DIR instead of building them.")
]

SHARED = ("json", "quiet", "verbose", "project", "tree")  # parameters of make_env()


def make_env(
    json: Annotated[
        bool, Option("--json", help="Print one JSON document to stdout, everything else to stderr.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Do not print steps and progress.")] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Print each command that kvtool runs, and details of conflicts.")
    ] = False,
    project: Annotated[
        Path | None,
        Option(
            "--project",
            metavar="DIR",
            help="Folder with patches/series.toml (or KVTOOL_PROJECT) [the nearest folder above, else kvtool's own].",
        ),
    ] = None,
    tree: Annotated[
        Path | None,
        Option(
            "--tree",
            metavar="DIR",
            help="Folder of the patched tree (or KVTOOL_TREE) [llama.cpp in the project].",
        ),
    ] = None,
) -> Env:
    """Make the environment of a command from the options that every command has."""
    named = [word for flag, place in (("--tree", tree), ("--project", project)) if place for word in (flag, place)]
    places = f" {quote(named)}" if named else ""
    return Env(Console(json=json, quiet=quiet, verbose=verbose, places=places), lambda: find_project(project, tree))


def env_of(ctx: Context) -> Env:
    """Return the environment that cli.py made for the running command."""
    env: Env = ctx.obj
    return env


def choose_backend(**given: bool) -> str:
    """Return the backend whose flag was given, or "cpu" without such a flag. Raise UsageError if several were given."""
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        flags = " and ".join(f"--{name}" for name in named)
        next_step = "name one backend; each has a build directory of its own"
        raise UsageError(f"{flags} are two builds", next_step=next_step)
    return named[0] if named else "cpu"


def reject(command: str, *rules: tuple[object, str]) -> None:
    """Raise UsageError with the text of the first rule that applies.

    A rule is a pair. The first item is true if the options contradict each other. The second item is the text of the
    error.
    """
    if wrong := next((words for holds, words in rules if holds), ""):
        raise UsageError(wrong, next_step=f"kvtool {command} --help")

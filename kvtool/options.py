"""What commands take: the Env, options that several of them share, and how options become parameters.

A command takes its options one by one, or as a frozen dataclass whose fields are annotated for typer and have defaults.
There a tuple is an option that may be given several times, and Flags are several options for one word.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from typer import Argument, Option

from kvtool.console import Console, escape
from kvtool.errors import UsageError
from kvtool.process import quote
from kvtool.project import Project, find_project


class Env:
    """The console, and the project: looked for on first use (UsageError when there is none)."""

    def __init__(self, console: Console, find: Callable[[], Project]) -> None:
        self.console, self._find = console, find

    @functools.cached_property
    def project(self) -> Project:
        found = self._find()
        self.console.upstream = found.name
        return found


class Flags(NamedTuple):
    """A build named by a flag: --cpu, --metal, ... help: of each."""

    help: Mapping[str, str]

    def chosen(self, given: Iterable[str]) -> str:
        """The one that was given; cpu when none was."""
        named = list(given)
        if len(named) > 1:
            flags = " and ".join(f"--{name}" for name in named)
            next_step = "name one backend; each has a build directory of its own"
            raise UsageError(f"{flags} are two builds", next_step=next_step)
        return named[0] if named else "cpu"


BACKENDS = {
    "cpu": "CPU only (the default).",
    "metal": "Apple GPUs; on macOS.",
    "cuda": "NVIDIA GPUs; needs nvcc.",
    "vulkan": "Any GPU with Vulkan; needs glslc.",
}
Backend = Annotated[str, Flags(BACKENDS)]
Preset = Annotated[
    str,
    Option(
        "--preset",
        metavar="NAME",
        help="release: for this processor; dist: for any of its kind; debug: with assertions, for a debugger; "
        "asan, tsan: with sanitizers.",
    ),
]
Jobs = Annotated[int, Option("--jobs", "-j", metavar="N", help="At once; 0: one per core.")]
Tag = Annotated[str | None, Argument(metavar="TAG", help="An upstream of patches/upstream.lock [the current one].")]
Mirror = Annotated[
    str | None,
    Option("--mirror", metavar="PATH|URL", help="A git repository to take upstream from (or KVTOOL_UPSTREAM)."),
]
Groups = Annotated[
    tuple[str, ...],
    Option(
        "--group",
        metavar="ID",
        help="Only this group of series.toml and those that it depends on; may be repeated [all groups].",
    ),
]
BinDir = Annotated[Path | None, Option("--bin", metavar="DIR", help="Take the programs in DIR; build nothing.")]


def refuse(command: str, *rules: tuple[object, str]) -> None:
    """UsageError for the first of these that holds, in its words: options that make no sense, alone or together."""
    if wrong := next((words for holds, words in rules if holds), ""):
        raise UsageError(wrong, next_step=f"kvtool {command} --help")


def env_of(
    json: Annotated[bool, Option("--json", help="One JSON document on stdout, everything else on stderr.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No steps and no progress on stderr.")] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="Show each command that is run.")] = False,
    project: Annotated[
        Path | None,
        Option(
            "--project",
            metavar="DIR",
            help="Where patches/series.toml is (or KVTOOL_PROJECT) [the one around this directory, else kvtool's own].",
        ),
    ] = None,
    tree: Annotated[
        Path | None,
        Option(
            "--tree",
            metavar="DIR",
            help="Patched tree (or KVTOOL_TREE) [llama.cpp in the project].",
        ),
    ] = None,
) -> Env:
    """What every command takes, as it arrives there."""
    named = [word for flag, place in (("--tree", tree), ("--project", project)) if place for word in (flag, place)]
    places = f" {quote(named)}" if named else ""
    return Env(Console(json=json, quiet=quiet, verbose=verbose, places=places), lambda: find_project(project, tree))


class Taken(NamedTuple):
    """What a command takes. parameters: what is parsed for it; value: what it is, given what they were."""

    parameters: Sequence[inspect.Parameter]
    value: Callable[[Mapping[str, Any]], Any]


def taken_by(make: Callable[..., Any]) -> Taken:
    """What a function takes but for env, or a dataclass; the value is its keyword arguments."""
    own = [p for p in inspect.signature(make, eval_str=True).parameters.values() if p.annotation is not Env]
    each = {p.name: _taken(p.name, p.annotation, p.default) for p in own}
    parameters = [parameter for some in each.values() for parameter in some.parameters]
    return Taken(parameters, lambda given: {name: some.value(given) for name, some in each.items()})


def _taken(name: str, hint: Any, default: Any) -> Taken:
    """Take a parameter apart into what typer can parse."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        fields = taken_by(hint)
        return Taken(fields.parameters, lambda given: hint(**fields.value(given)))
    kind, info = get_args(hint)
    if isinstance(info, Flags):
        flags = [_parameter(word, bool, Option(f"--{word}", help=text), False) for word, text in info.help.items()]
        return Taken(flags, lambda given: info.chosen(word for word in info.help if given[word]))
    if get_origin(kind) is tuple:
        return Taken([_parameter(name, list[str], info, [])], lambda given: tuple(given[name]))
    return Taken([_parameter(name, kind, info, default)], lambda given: given[name])


def _parameter(name: str, kind: Any, info: Any, default: Any) -> inspect.Parameter:
    """One for typer, its help plain text (typer takes [bench] for markup and drops it), and no <bool> behind a flag."""
    info = copy.copy(info)
    info.help, info.metavar = escape(info.help), "" if kind is bool else info.metavar
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])

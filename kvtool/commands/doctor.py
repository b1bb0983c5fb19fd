"""Implement `kvtool doctor`: find missing tools, and print how to install them."""

import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool.compile import toolchain
from kvtool.compile.cmake import BACKENDS
from kvtool.console import Console
from kvtool.errors import KvtoolError, MissingToolError, UsageError
from kvtool.options import Context, choose_backend, env_of
from kvtool.project import user_cache
from kvtool.result import Result

# Disk space that kvtool needs, rounded up. Measured on Linux: cached upstream 0.04 GB, checkout 0.1 GB, release build
# 0.1 GB, models of verify 1.0 GB.
NEEDED_BYTES = 2 * 1000**3


@dataclass(frozen=True)
class Check:
    """Hold the result of checking one requirement.

    required: True if fetch, build or verify needs it
    found: the version, size or path that was found
    problem: the reason why it is insufficient, "" if it is sufficient
    how: the commands that install it, one line for each operating system
    """

    name: str
    ok: bool
    required: bool
    found: str
    problem: str = ""
    how: str = ""


@dataclass(frozen=True)
class Diagnosis(Result, command="doctor"):
    """Hold all checks.

    checks: the most important requirements first
    backends: for each backend the reason why it cannot be built, "" if it can
    """

    system: str
    checks: tuple[Check, ...]
    backends: dict[str, str]

    @property
    def failure(self) -> KvtoolError | None:
        wanting = [check for check in self.checks if check.required and not check.ok]
        if not wanting:
            return None
        return MissingToolError(
            f"not ready: {', '.join(check.name for check in wanting)}",
            why="; ".join(check.problem for check in wanting),
            next_step="\n".join(dict.fromkeys(check.how for check in wanting if check.how)),
        )

    def render(self, console: Console) -> None:
        rows = [
            ("ok" if c.ok else "MISSING" if c.required else "optional", c.name, c.found or c.problem)
            for c in self.checks
        ]
        console.table(("", "needed", "found"), rows)
        console.line()
        backends = [("-" if why else "ok", f"kvtool build --{name}", why) for name, why in self.backends.items()]
        console.table(("", "backend", ""), backends)
        for check in self.checks:
            # the error message after this output lists the required ones
            if not check.ok and not check.required and check.how:
                console.line()
                console.line(f"{check.name} is optional; to get it:")
                console.line(check.how)
        if self.failure is None:
            console.line()
            console.line("ready: kvtool fetch, then apply, build, verify")


def _check(name: str, found: str, problem: str, how: str, *, required: bool = True) -> Check:
    return Check(name, not problem, required, *(("", problem, how) if problem else (found,)))


def _tool(tool: toolchain.Tool, optional: str = "") -> Check:
    """Return the check of a tool.

    optional: for an optional tool, a sentence about the disadvantage of not having it; "" for a required tool
    """
    problem = "; ".join(filter(None, (tool.missing, optional))) if tool.missing else ""
    return _check(tool.name, f"{tool.version} ({tool.path})".strip(), problem, tool.how, required=not optional)


def _existing(path: Path) -> Path:
    """Return the path itself or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def _disk(name: str, path: Path) -> Check:
    free = shutil.disk_usage(_existing(path)).free
    found = f"{free / 1000**3:.1f} GB free at {path}"
    problem = f"{found}, and {NEEDED_BYTES / 1000**3:.0f} GB are needed" if free < NEEDED_BYTES else ""
    return _check(name, found, problem, "free some, or name another place with --tree DIR and KVTOOL_CACHE=DIR")


def _writable(name: str, path: Path, how: str) -> Check:
    """Check that kvtool can write to a directory, by creating a file.

    Permissions of a directory are not sufficient for this: its file system may be mounted read-only.
    """
    problem = ""
    try:
        tempfile.TemporaryFile(dir=_existing(path)).close()
    except OSError as err:
        problem = f"cannot write in {path}: {err.strerror}"
    return _check(name, str(path), problem, how)


def diagnose(tree: Path, cache: Path, backend: str = "cpu") -> Diagnosis:
    """Check all requirements, without changing or fetching anything.

    backend: the backend that the user wants to build
    """
    system = platform.system()
    checks = (
        Check("python", True, True, f"{platform.python_version()} ({sys.executable})"),
        *map(_tool, (toolchain.find_git(), *toolchain.builders(), *toolchain.backend_tools(backend, system))),
        _tool(toolchain.find("ccache"), "without it every rebuild compiles everything"),
        _tool(toolchain.find("npm"), "for llama-server's web page, and a way to fetch upstream"),
        _tool(toolchain.find_openssl(), "without it no https, which -hf needs"),
        _disk("disk", tree),
        _writable("tree", tree, "name another place with --tree DIR or KVTOOL_TREE"),
        _writable("cache", cache, "name another place with KVTOOL_CACHE=DIR"),
    )
    lacks = {name: filter(None, (tool.missing for tool in toolchain.tools_of(name, system))) for name in BACKENDS}
    return Diagnosis(system, checks, {name: "; ".join(why) for name, why in lacks.items()})


_HELP = "Also check the tools of the {} build."


def command(
    ctx: Context,
    metal: Annotated[bool, Option("--metal", help=_HELP.format("metal"))] = False,
    cuda: Annotated[bool, Option("--cuda", help=_HELP.format("cuda"))] = False,
    vulkan: Annotated[bool, Option("--vulkan", help=_HELP.format("vulkan"))] = False,
) -> Diagnosis:
    """Check that this machine can fetch, build and verify.

    The exit code is 0 if `kvtool fetch`, apply, build and verify can run for the CPU or for the named backend. Else it
    is 7. For each missing tool, kvtool prints how to install it on Debian, macOS and Windows.

        kvtool doctor
        kvtool doctor --vulkan   # with the Vulkan headers, the loader and the shader compiler
    """
    env = env_of(ctx)
    try:
        tree, cache = env.project.tree, env.project.cache
    except UsageError:  # doctor also works outside of a project
        tree, cache = Path.cwd() / "llama.cpp", user_cache()
    return diagnose(tree, cache, choose_backend(metal=metal, cuda=cuda, vulkan=vulkan))

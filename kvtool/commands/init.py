"""`kvtool init`: a project of the user's own."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import UsageError, writing
from kvtool.options import Env
from kvtool.process import quote
from kvtool.project import Project, expanded
from kvtool.result import Result
from kvtool.series.series import load_patches, new_files

_TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
# beside patches/ and cpp/: where each template goes
_FILES = {
    "gitignore": ".gitignore",
    "gitattributes": ".gitattributes",
    "workflow.yml": ".github/workflows/kvtool.yml",
    "Makefile": "Makefile",
    "README.md": "README.md",
}
_MAY_BE_THERE = "README.md"  # a new repository has one, and nothing here needs ours


@dataclass(frozen=True)
class InitResult(Result, command="init"):
    """patches, new_files: how many the series has; files: what was written beside patches/ and cpp/."""

    project: Path
    patches: int
    new_files: int
    files: tuple[str, ...]

    def render(self, console: Console) -> None:
        series = f"{self.patches} patches, {self.new_files} new files" if self.patches else "an empty series"
        console.line(f"{self.project}: {series}")
        there = quote(["cd", self.project])
        console.line(f"next: {there} && git init && git add . && git commit -m 'Start', then make build")
        console.line(f"in {_FILES['workflow.yml']}, KVTOOL says where GitHub gets kvtool: it is for you to fill in")


def create(source: Project, place: Path, *, empty: bool = False) -> tuple[Project, tuple[str, ...]]:
    """A project like `source`; UsageError when something of it is there already, and then nothing is written.

    With what was written beside patches/ and cpp/: a README.md that is there stays.
    """
    root = expanded(place).absolute()
    made_here = {"patches", "cpp", "llama.cpp", *_FILES.values()} - {_MAY_BE_THERE}
    if there := sorted(name for name in made_here if (root / name).exists()):
        raise UsageError(f"{root} has {', '.join(there)} already", next_step="name a directory that has not")
    made = Project(root, root / "llama.cpp", source.cache)
    with writing(str(root), "name another place"):
        if empty:
            made.patches.mkdir(parents=True)
            shutil.copyfile(source.lock, made.lock)
            if (guide := source.patches / "README.md").exists():
                shutil.copyfile(guide, made.patches / guide.name)
            shutil.copyfile(_TEMPLATES / "series.toml", made.series)
        else:
            shutil.copytree(source.patches, made.patches)
            if source.cpp.is_dir():
                shutil.copytree(source.cpp, made.cpp, ignore=shutil.ignore_patterns("__pycache__"))
        wanted = {n: target for n, target in _FILES.items() if target != _MAY_BE_THERE or not (root / target).exists()}
        for name, target in wanted.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_TEMPLATES / name, root / target)
    return made, tuple(wanted.values())


def command(
    env: Env,
    place: Annotated[Path, Argument(metavar="DIR", help="The new project; made if it is not there.")],
    empty: Annotated[bool, Option("--empty", help="Begin without a patch, for a series about anything.")] = False,
) -> InitResult:
    """Make a project of your own: a patch series, with a Makefile and a workflow for GitHub.

    It starts with the series that this kvtool has, to be changed, or with --empty with none, pinned to the same
    llama.cpp. kvtool run inside works on it: commit in the patched tree, and export takes the commits into patches/.

        kvtool init my-llama
        kvtool init my-fork --empty

    Exit codes: 2 the directory has patches/, cpp/, llama.cpp/ or one of the files that init writes already: Makefile,
    .gitignore, .gitattributes, .github/workflows/kvtool.yml. A README.md that is there stays.
    """
    made, written = create(env.project, place, empty=empty)
    return InitResult(made.root, len(load_patches(made)), len(new_files(made.cpp)), written)

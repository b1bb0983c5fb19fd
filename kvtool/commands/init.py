"""Implement `kvtool init`: make a project with a patch series of the user's own."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tomlkit
from typer import Argument, Option

from kvtool.console import Console
from kvtool.errors import UsageError, writing
from kvtool.options import Context, env_of, reject
from kvtool.process import quote
from kvtool.project import LLAMA_CPP, Project, expanded, place_of
from kvtool.result import Result
from kvtool.series.series import load_patches, new_files
from kvtool.upstream.lock import is_usable_name

_TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
# paths of the templates that do not belong into patches/ or cpp/
_FILES = {
    "gitignore": ".gitignore",
    "gitattributes": ".gitattributes",
    "workflow.yml": ".github/workflows/kvtool.yml",
    "Makefile": "Makefile",
    "README.md": "README.md",
}
_MAY_BE_THERE = "README.md"  # kept if it exists, because most repositories have one and kvtool does not need its own
# pages that explain how to work with a series; a new project gets a copy
_PAGES = (
    "patches/README.md",
    *(f"docs/guides/{name}.md" for name in ("carry-your-own-fork", "follow-upstream", "submit-a-patch")),
)


@dataclass(frozen=True)
class InitResult(Result, command="init"):
    """Report a new project.

    patches: the number of patches in its series
    new_files: the number of files in cpp/
    files: the paths of the written files outside of patches/ and cpp/
    """

    project: Path
    patches: int
    new_files: int
    files: tuple[str, ...]

    def render(self, console: Console) -> None:
        series = f"{self.patches} patches, {self.new_files} new files" if self.patches else "an empty series"
        console.line(f"{self.project}: {series}")
        there = quote(["cd", self.project])
        begin = "make build" if console.upstream == LLAMA_CPP else "kvtool rebase TAG (or kvtool import FORK)"
        console.line(f"next: {there} && git init && git add . && git commit -m 'Start', then {begin}")
        console.line(f"in {_FILES['workflow.yml']}, set KVTOOL to the place from which GitHub installs kvtool")


@dataclass(frozen=True)
class OtherUpstream:
    """A repository other than llama.cpp, for a project without patches."""

    name: str  # name in messages, and of the folder of the patched tree
    remote: str  # git URL that has every tag

    def text(self, template: str) -> str:
        """Return a template with the name and the remote of the upstream filled in."""
        text = template.replace("{name}", self.name)
        return text.replace("{remote}", tomlkit.item(self.remote).as_string())

    def guide(self, text: str) -> str:
        """Return a guide with the parts that are only about llama.cpp replaced."""
        for old, new in _IN_GUIDE.items():
            text = text.replace(old, new)
        return self.text(text)


_EXAMPLES = "The output is an example from another repository, which kvtool can also build and verify."
# Parts of the guides that are only about llama.cpp, and their replacements. They are replaced in this order.
_IN_GUIDE = {
    f"The output is from a small fork of {LLAMA_CPP} v0.5.0 with two commits.": _EXAMPLES,
    f"my-{LLAMA_CPP}": "my-fork",
    "my-llama": "my-project",
    "    kvtool build && kvtool verify\n": "",
    "src/llama-context.cpp": "FILE",
    f"github.com/ggml-org/{LLAMA_CPP}": "github.com/OWNER/{name}",
    LLAMA_CPP: "{name}",
}


def create(
    source: Project, place: Path, *, empty: bool = False, other: OtherUpstream | None = None
) -> tuple[Project, tuple[str, ...]]:
    """Make a project like `source`. Return the project, and the paths of its new files outside of patches/ and cpp/.

    Raises UsageError if the folder already has one of the files that init makes; then nothing is written. An existing
    README.md is kept.

    empty: make a project without patches
    other: make a project without patches for another upstream than llama.cpp
    """
    root = expanded(place).absolute()
    name = other.name if other else source.name
    made_here = {"patches", "cpp", name, *_FILES.values()} - {_MAY_BE_THERE}
    if there := sorted(name for name in made_here if (root / name).exists()):
        raise UsageError(f"{root} has {', '.join(there)} already", next_step="choose a directory without them")
    made = Project(root, root / name, source.cache, name)
    with writing(str(root), "name another place"):
        if other:
            made.patches.mkdir(parents=True)
            lock = (_TEMPLATES / "other/upstream.lock").read_text(encoding="utf-8")
            made.lock.write_text(other.text(lock), encoding="utf-8", newline="\n")
            shutil.copyfile(_TEMPLATES / "series.toml", made.series)
        elif empty:
            made.patches.mkdir(parents=True)
            shutil.copyfile(source.lock, made.lock)
            shutil.copyfile(_TEMPLATES / "series.toml", made.series)
        else:
            shutil.copytree(source.patches, made.patches)
            if source.cpp.is_dir():
                shutil.copytree(source.cpp, made.cpp, ignore=shutil.ignore_patterns("__pycache__"))
        wanted = {n: target for n, target in _FILES.items() if target != _MAY_BE_THERE or not (root / target).exists()}
        for template, target in wanted.items():
            _fill_in(root / target, other or OtherUpstream(name, ""), template)
        guides = _copy_pages(source, made, other)
    return made, (*wanted.values(), *guides)


def _copy_pages(source: Project, made: Project, other: OtherUpstream | None) -> list[str]:
    """Copy the guides into a new project. Return the paths of the copied guides that are outside of patches/.

    A page that the project already has is kept. A link to a page that the new project does not have becomes plain text.
    """
    copied = [page for page in _PAGES if (source.root / page).exists() and not (made.root / page).exists()]
    for page in copied:
        text = (source.root / page).read_text(encoding="utf-8")
        (made.root / page).parent.mkdir(parents=True, exist_ok=True)
        (made.root / page).write_text(other.guide(text) if other else text, encoding="utf-8", newline="\n")
    for file in {*made.patches.glob("*.md"), *(made.root / page for page in copied)}:
        text = file.read_text(encoding="utf-8")
        file.write_text(_without_dead_links(text, file.parent), encoding="utf-8", newline="\n")
    return [page for page in copied if not page.startswith("patches/")]


def _without_dead_links(text: str, folder: Path) -> str:
    """Replace each link to a missing file by its text."""

    def keep(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        return link[0] if "://" in target or (folder / target).exists() else link[1]

    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", keep, text)


def _fill_in(target: Path, other: OtherUpstream, template: str) -> None:
    """Write a file from its template.

    A project of another upstream uses the template in templates/other/, if there is one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    special = _TEMPLATES / "other" / template
    if other.name != LLAMA_CPP and special.exists():
        text = other.text(special.read_text(encoding="utf-8"))
    else:
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        text = text.replace(f"/{LLAMA_CPP}\n", f"/{other.name}\n")  # this line is only in .gitignore
    target.write_text(text, encoding="utf-8", newline="\n")


def _other_upstream(remote: str, name: str | None) -> OtherUpstream:
    """Return the upstream that the user named. Raise UsageError if its name cannot be the name of a folder."""
    name = name or re.split(r"[/:]", remote.rstrip("/"))[-1].removesuffix(".git")
    if not is_usable_name(name):
        why = "it names the folder of the patched tree: letters, digits, and . _ - inside"
        raise UsageError(
            f"{name!r} cannot be the name of an upstream", why=why, next_step="choose one with --name NAME"
        )
    return OtherUpstream(name, place_of(remote))


def command(
    ctx: Context,
    place: Annotated[
        Path, Argument(metavar="DIR", help="Folder of the new project. It is created if it does not exist.")
    ],
    empty: Annotated[bool, Option("--empty", help="Start without patches.")] = False,
    remote: Annotated[
        str | None,
        Option(
            "--remote", metavar="URL", help="With --empty: make patches for this git repository instead of llama.cpp."
        ),
    ] = None,
    name: Annotated[
        str | None,
        Option("--name", metavar="NAME", help="With --remote: name of its project [the last part of the URL]."),
    ] = None,
) -> InitResult:
    """Make a project of your own: a patch series, with a Makefile and a workflow for GitHub.

    The project starts with the patches of this kvtool or, with --empty, without patches. It uses the same tag of
    llama.cpp. In its folder, kvtool works on this project: you commit in the patched tree, and kvtool export writes
    your commits to patches/.

        kvtool init my-llama
        kvtool init my-fork --empty
        kvtool init my-zlib --empty --remote https://github.com/madler/zlib --name zlib

    With --remote, the patches are for that repository instead of llama.cpp. Messages and the folder of the patched
    tree use its name. The project has no tag yet: `kvtool rebase TAG` or `kvtool import` chooses the first one. The
    commands build, verify, bench and package support only llama.cpp.

    Exit codes: 2 the directory already has patches/, cpp/, llama.cpp/ or a file that init writes: Makefile,
    .gitignore, .gitattributes, .github/workflows/kvtool.yml. An existing README.md and existing guides in docs/guides/
    are kept.
    """
    env = env_of(ctx)
    reject(
        "init",
        (remote and not empty, "--remote needs --empty: the patches of this series are for llama.cpp"),
        (name and not remote, "--name needs --remote"),
    )
    made, written = create(env.project, place, empty=empty, other=_other_upstream(remote, name) if remote else None)
    env.console.upstream = made.name
    return InitResult(made.root, len(load_patches(made)), len(new_files(made.cpp)), written)

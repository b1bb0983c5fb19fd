"""Collect the contents of an archive: programs, their libraries, licences, the patches as mails, and a manifest."""

import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from kvtool import __version__, process
from kvtool.compile.cmake import BENCH_TARGET, Plan
from kvtool.errors import BuildError
from kvtool.gitcmd import Git
from kvtool.package.archive import Entry
from kvtool.project import Project
from kvtool.upstream.lock import Upstream

MANIFEST = "manifest.json"
_LICENCE = re.compile(r"(?:LICEN[CS]E|COPYING|NOTICE)[^/]*$")
_LIBRARY = re.compile(r"(?:\.so[.\d]*|\.dylib|\.dll)$")


def _programs(plan: Plan, targets: Sequence[str]) -> list[Path]:
    """Return the paths of the built programs for users. Tests are left out."""
    wanted = [name for name in targets if not name.startswith(("test-", BENCH_TARGET))]
    return list(filter(None, (process.program_in(name, plan.build_dir / "bin") for name in wanted)))


def _libraries(plan: Plan, targets: Sequence[str]) -> list[Path]:
    """Return the libraries in bin/ that the programs need. Libraries of earlier builds are left out."""
    asked = process.capture([plan.tools.ninja, "-C", plan.build_dir, "-t", "inputs", *targets], error=BuildError).stdout
    made = {(plan.build_dir / line).resolve() for line in asked.splitlines() if _LIBRARY.search(line)}
    return sorted(path for path in (plan.build_dir / "bin").iterdir() if path.resolve() in made)


def _file(path: Path) -> Entry:
    if path.is_symlink():
        return Entry(path.name, link=str(path.readlink()))
    return Entry(path.name, path.read_bytes(), executable=True)


def _licences(project: Project, git: Git) -> list[Entry]:
    """Return the licences of upstream, of the code that upstream includes, and of this project.

    The licence of included code has the name of its folder in its own name, such as `licenses/LICENSE-FOLDER`.
    """
    found = {}
    for path in git.entries("ls-files", "-z"):
        if _LICENCE.search(path) and not path.startswith("gguf-py/"):
            folder, name = Path(path).parent.name, Path(path).name
            there = name if folder in ("", "licenses") else f"{name.partition('.')[0]}-{folder}"
            found[there if path == "LICENSE" else f"licenses/{there}"] = project.tree / path
    if (project.root / "LICENSE").is_file():
        found["licenses/LICENSE-kvtool"] = project.root / "LICENSE"
    return [Entry(name, path.read_bytes()) for name, path in sorted(found.items())]


def _compilers(build_dir: Path) -> dict[str, str]:
    """Return the compiler of each language with CMake's name for it, such as {"C": "GNU 12.2.0"}."""
    found: dict[str, list[str]] = {}
    for file in sorted(build_dir.glob("CMakeFiles/[0-9]*/CMake*Compiler.cmake")):
        language = file.stem.removeprefix("CMake").removesuffix("Compiler")
        said = rf'^set\(CMAKE_{language}_COMPILER_(?:ID|VERSION) "([^"]+)"\)'
        found[language] = re.findall(said, file.read_text("utf-8", "replace"), re.MULTILINE)
    return {language: " ".join(words) for language, words in found.items() if words}


def manifest(plan: Plan, git: Git, upstream: Upstream, mails: Sequence[Path]) -> dict[str, object]:
    """Return the facts about the archive: where it is from, and everything that is needed to build it again."""
    return {
        "upstream": {"tag": upstream.tag, "tree": upstream.tree},
        "patched": {"commit": git.resolve("HEAD"), "tree": git.resolve("HEAD^{tree}")},
        "patches": [mail.name for mail in mails],
        "backend": plan.backend,
        "preset": plan.preset,
        # all flags that affect the result, without the paths of this machine's tools
        "flags": {name: value for name, value in plan.flags.items() if not name.endswith("_LAUNCHER")},
        "compilers": _compilers(plan.build_dir),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "page": plan.page,
        "kvtool": __version__,
    }


def gather(
    project: Project, plan: Plan, targets: Sequence[str], upstream: Upstream, mails: Sequence[Path]
) -> list[Entry]:
    """Return all files of the archive in their order, except the checksums.

    targets: the targets that were built
    """
    git = Git(project.tree)
    facts = manifest(plan, git, upstream, mails)
    return [
        *(_file(path) for path in sorted({*_programs(plan, targets), *_libraries(plan, targets)})),
        *_licences(project, git),
        *(Entry(f"patches/{mail.name}", mail.read_bytes()) for mail in mails),
        Entry(MANIFEST, (json.dumps(facts, indent=2) + "\n").encode()),
    ]

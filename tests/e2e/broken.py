"""Build a libllama that contains many broken lines. An environment variable enables one of them.

A trap is a known mistake: it removes or reverses one line of the patched tree, and a test must then fail. To compile a
library for each trap would take long. So one library contains all traps. Each place becomes a branch between the
original and the broken code, and the number in KV_BROKEN selects the branch. Only the objects with such a place are
compiled again, with the commands that ninja recorded. libllama is linked again in another folder. Nothing in the build
directory changes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from tests.e2e.conftest import Real

VARIABLE = "KV_BROKEN"

_CHOICE = f"""\
#include "llama-kv-dynamic.h"
#include <cstdlib>
#ifndef {VARIABLE}
#define {VARIABLE}
static bool kv_broken(int n) {{
    const char * val = getenv("{VARIABLE}");
    return val && atoi(val) == n;
}}
#endif
#line 1
"""


@dataclass(frozen=True)
class Edit:
    """Describe one broken place.

    file: the source file
    old: a sequence of statements (ending with ; or }) or an expression
    new: its broken form
    after: an earlier line of the file, which is needed if `old` occurs more than once
    """

    file: str
    old: str
    new: str
    after: str = ""

    def find(self, text: str) -> int:
        """Return the position of `old`. Raise AssertionError if it does not occur, or if it is ambiguous."""
        start = text.find(self.after)
        assert start >= 0, f"{self.file} has no {self.after!r}"
        at = text.find(self.old, start)
        assert at >= 0, f"{self.file} no longer has the line to break: {self.old!r}"
        assert self.after or text.count(self.old) == 1, f"{self.file} has {self.old!r} more than once"
        return at


def rewrite(text: str, edits: Sequence[tuple[int, Edit]]) -> str:
    """Return the source with a branch for every edit, selected by its number. Several edits may have the same place."""
    places: dict[tuple[int, str], list[tuple[int, Edit]]] = {}
    for number, edit in edits:
        places.setdefault((edit.find(text), edit.old), []).append((number, edit))
    for (at, old), choices in sorted(places.items(), reverse=True):
        made = old
        for number, edit in choices:
            if re.search(r"[;}]\s*(//.*)?$", old):
                made = f"if (kv_broken({number})) {{\n{edit.new}\n}} else {{\n{made}\n}}"
            else:
                made = f"(kv_broken({number}) ? ({edit.new}) : ({made}))"
        text = text[:at] + made + text[at + len(old) :]
    return _CHOICE + text


def _commands(real: Real) -> list[str]:
    """Return the commands that build libllama, in their order."""
    ninja = process.which("ninja")
    assert ninja is not None
    names = {"darwin": "libllama.dylib", "win32": "llama.dll"}
    target = f"bin/{names.get(sys.platform, 'libllama.so')}"
    return subprocess.run(
        [ninja, "-C", real.build, "-t", "commands", target], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def _unit(plan: Sequence[str], source: Path) -> Path:
    """Return the file that the compiler reads for a source file.

    This is the source file itself, or the batch file of CMake that includes it.
    """
    for line in plan:
        unit = Path(line.rsplit(" -c ", 1)[-1])
        if unit == source:
            return source
        if "unity_" in unit.name and f'/{source.name}"' in unit.read_text("utf-8"):
            return unit
    raise AssertionError(f"nothing compiles {source}")


def _run(command: str, cwd: Path) -> None:
    done = subprocess.run(command, shell=True, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def build(real: Real, edits: Sequence[tuple[Edit, ...]], out: Path) -> None:
    """Write a libllama with all edits to `out`, with the names that programs load. The edits are numbered from 1."""
    by_file: dict[str, list[tuple[int, Edit]]] = {}
    for number, group in enumerate(edits, 1):
        for edit in group:
            by_file.setdefault(edit.file, []).append((number, edit))

    plan = _commands(real)
    link = next(line for line in plan if "-shared" in line and " -o bin/libllama" in line)
    units: dict[Path, str] = {}  # for each file that the compiler reads, its text with the edits
    for file, chosen in by_file.items():
        source = real.tree / file
        text = rewrite(source.read_text("utf-8"), chosen)
        unit = _unit(plan, source)
        if unit == source:
            units[unit] = text
        else:  # CMake compiles several source files together
            (out / source.name).write_text(text, "utf-8")
            whole = units.get(unit) or unit.read_text("utf-8")
            units[unit] = re.sub(rf'#include "[^"]*/{source.name}"', f'#include "{out / source.name}"', whole)

    compiles: list[str] = []
    for unit, text in units.items():
        broken = out / f"unit-{unit.name}"
        broken.write_text(text, "utf-8")
        (command,) = (line for line in plan if line.endswith(f"-c {unit}"))
        original = command.split(" -o ")[1].split(" ")[0]
        made = out / f"{unit.stem}.o"
        # the edited file is in another folder than its headers, so add the folder of the headers with -I
        command = command.replace(f"-o {original}", f"-o {made} -I{real.tree / 'src'}")
        # -O1 needs two thirds of the time to compile, and no trap depends on speed
        command = command.replace(f"-c {unit}", f"-O1 -c {broken}")
        compiles.append(command.replace(f"-MF {original}.d", f"-MF {made}.d"))
        assert original in link
        link = link.replace(original, str(made))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(lambda command: _run(command, real.build), compiles))

    target = link.split(" -o ")[1].split(" ")[0]
    built = out / Path(target).name
    link = link.split("&& ", 1)[1] if link.startswith(":") else link
    _run(link.replace(f"-o {target}", f"-o {shlex.quote(str(built))}").removesuffix("&& :"), real.build)
    for alias in real.bin.glob("libllama.so*"):
        if not (out / alias.name).exists():
            (out / alias.name).symlink_to(built)

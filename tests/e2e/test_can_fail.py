"""A check that cannot fail proves nothing: libllama is built with one line broken, and kv-check must see it.

One object file is compiled from the broken source and libllama linked again beside the real one, with the commands that
ninja recorded; kv-check then loads that library. Nothing in the build directory changes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtool import process
from tests.e2e.conftest import Real


@dataclass(frozen=True)
class Mutant:
    """One broken line, and the run that must see it. says: a check of kv-check that must not be "same"."""

    name: str
    file: str
    old: str
    new: str
    toy: str
    args: tuple[str, ...]
    says: str


MUTANTS = (
    Mutant(
        "the stride of transposed V keeps its old size",
        "src/llama-kv-storage.cpp",
        "memcpy((char *) dst->data + b.offset(s, i, n_dst), (const char *) src->data",
        "memcpy((char *) dst->data + b.offset(s, i, n_src), (const char *) src->data",
        "llama-dense",
        ("-fa", "off"),
        "prompt",
    ),
    Mutant(
        "the streams of K keep their old stride",
        "src/llama-kv-storage.cpp",
        "memcpy((char *) dst->data + b.offset(s, i, n_dst), (const char *) src->data",
        "memcpy((char *) dst->data + b.offset(s, i, n_src), (const char *) src->data",
        "llama-dense",
        ("-fa", "on", "--seqs", "4"),
        "prompt",
    ),
    Mutant(
        "the last live cell is not copied",
        "src/llama-kv-storage.cpp",
        "return std::min(n_used.at(s), n_cells);",
        "return std::max(1u, std::min(n_used.at(s), n_cells)) - 1;",
        "qwen35-dense",
        ("-fa", "on"),
        "generate",
    ),
    Mutant(
        "context shift is offered while the caches happen to have one size",
        "src/llama-kv-cache-iswa.cpp",
        "kv_base->get_size_max() == kv_swa->get_size_max()",
        "kv_base->get_size() == kv_swa->get_size()",
        "gemma3-dense",
        ("-fa", "on"),
        "shift",
    ),
    Mutant(
        "new rows are not zero",
        "src/llama-kv-storage.cpp",
        "ggml_backend_buffer_clear(buf.get(), 0);",
        "ggml_backend_buffer_clear(buf.get(), 0xff);",
        "llama-dense",
        ("-fa", "off"),
        "prompt",
    ),
    Mutant(
        "a restored state gets the stride of the full size",
        "src/llama-kv-cache.cpp",
        "((size_t) r.from + j * get_size()) * v_size_el",
        "((size_t) r.from + j * get_size_max()) * v_size_el",
        "llama-dense",
        ("-fa", "off"),
        "state-into-dynamic",
    ),
)


def commands(real: Real, target: str) -> list[str]:
    """The commands that build a target, in order."""
    ninja = process.which("ninja")
    assert ninja is not None
    out = subprocess.run(
        [ninja, "-C", real.build, "-t", "commands", target], capture_output=True, text=True, check=True
    )
    return out.stdout.splitlines()


def library(real: Real) -> str:
    """The target that links libllama."""
    names = {"darwin": "libllama.dylib", "win32": "llama.dll"}
    return f"bin/{names.get(sys.platform, 'libllama.so')}"


def build_mutant(real: Real, mutant: Mutant, out: Path) -> None:
    """Put a libllama with the mutant's line into `out`, under the names by which programs load it."""
    source = real.tree / mutant.file
    text = source.read_text("utf-8")
    assert text.count(mutant.old) == 1, f"the line to break is not there exactly once: {mutant.old}"
    broken = out / source.name
    broken.write_text(text.replace(mutant.old, mutant.new), "utf-8")

    plan = commands(real, library(real))
    (compile_it,) = (line for line in plan if line.endswith(f"-c {source}"))
    original = compile_it.split(" -o ")[1].split(" ")[0]
    made = out / "broken.o"
    # -I: the source's own directory was where it found its headers
    compile_it = compile_it.replace(f"-o {original}", f"-o {made} -I{source.parent}").replace(
        f"-c {source}", f"-c {broken}"
    )
    subprocess.run(compile_it.replace(f"-MF {original}.d", f"-MF {made}.d"), shell=True, cwd=real.build, check=True)

    link = next(line for line in plan if "-shared" in line and original in line and " -o bin/libllama" in line)
    target = link.split(" -o ")[1].split(" ")[0]
    link = link.split("&& ", 1)[1] if link.startswith(":") else link
    link = (
        link.replace(original, str(made)).replace(f"-o {target}", f"-o {out / Path(target).name}").removesuffix("&& :")
    )
    subprocess.run(link, shell=True, cwd=real.build, check=True)
    built = out / Path(target).name
    for alias in real.bin.glob("libllama.so*"):
        if not (out / alias.name).exists():
            (out / alias.name).symlink_to(built)


def run_kv_check(real: Real, mutant: Mutant, libraries: Path | None) -> dict[str, object]:
    argv = [real.bin / "kv-check", "-m", real.toys / f"{mutant.toy}.gguf", "--quick", *mutant.args]
    env = dict(os.environ)
    if libraries is not None:
        env["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return {**answer, "exit": done.returncode}


@pytest.mark.skipif(sys.platform != "linux", reason="the broken library is linked by Linux's rules")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_kv_check_sees_one_broken_line(real: Real, mutant: Mutant, tmp_path: Path) -> None:
    before = run_kv_check(real, mutant, None)
    assert (before["status"], before["exit"]) == ("same", 0), before["reason"]
    build_mutant(real, mutant, tmp_path)
    after = run_kv_check(real, mutant, tmp_path)
    assert after["exit"] == 1
    assert after["status"] in ("differs", "dynamic-fails")
    checks = {c["name"]: c["status"] for c in after["checks"]}  # type: ignore[attr-defined]
    assert checks[mutant.says] in ("differs", "dynamic-fails"), shlex.join(f"{k}={v}" for k, v in checks.items())

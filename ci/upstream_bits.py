"""Compare the results of the patched libllama with those of upstream's libllama, bit for bit.

    python ci/upstream_bits.py UNPATCHED_BUILD PATCHED_BUILD TOY...

kv-check compares the patched library with itself. Here, ci/upstream_bits.c is compiled once with upstream's header and
runs on both builds. They must be builds of one tag with the same options. On the patched build, the program runs with
the dynamic cache switched off, with a cache that grows in place, and with one that grows by copy.

The program covers prompts, tokens, copies, states, removed and shifted cells, a clear, vectors as input, tokens of two
sequences, attention that is not causal, a control vector, an aborted batch, and two threads. It runs with and without
flash attention, with quantized cells, and with one stream and four streams. Its output has a hash of the logits of each
batch, and must be the same on all builds. If upstream's run ends in an assertion, the output must be the same up to
that point.

Prints a row for each kind of cache, and then the differences. The exit code is 1 if something differs, and 2 if no
cache grew.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvtool.machine import cores

SOURCE = Path(__file__).with_suffix(".c")
# The patch cpu-flash-attn computes quantized K and V with other kernels than upstream, so both builds use the reference
# kernels here.
CACHES = (("fa",), ("fa", "streams"), (), ("streams",), ("fa", "q8_0", "ref"))
WAYS = {
    "without the flag": {},
    "in place": {"LLAMA_KV_DYNAMIC": "1"},
    "by copy": {"LLAMA_KV_DYNAMIC": "1", "LLAMA_KV_DYNAMIC_STORAGE": "copy"},
}
TIMEOUT = 3600  # seconds for one model


def compiled(tree: Path, build: Path, program: Path) -> Path:
    """Compile the program with upstream's headers. It can run with the libraries of any build."""
    headers = (f"-I{tree / name}" for name in ("include", "ggml/include"))
    libraries = (f"-L{build / 'bin'}", "-lllama", "-lggml-cpu", "-lggml", "-lggml-base")
    subprocess.run(["cc", "-O1", "-rdynamic", *headers, "-o", program, SOURCE, *libraries], check=True)
    return program


class Said(NamedTuple):
    """Hold one run of the program: its output, its exit code, and whether a cache grew.

    code: the exit code; for a program that a signal ended, the negative number of the signal
    """

    lines: tuple[str, ...]
    code: int | None
    grew: bool = False


class Row(NamedTuple):
    """Hold the results of a model with one kind of cache.

    upstream: the result of upstream's build
    patched: the results of the patched build, by the names in WAYS
    """

    toy: str
    cache: tuple[str, ...]
    upstream: Said
    patched: dict[str, Said]

    def difference(self, way: str) -> str:
        """Return the first difference between both builds in the output or the exit code; "" if there is none.

        way: the kind of cache of the patched build, a name in WAYS
        """
        ours, theirs = self.patched[way], self.upstream
        if ours.code is None or theirs.code is None:
            return "no end"
        lines, code = ours.lines, ours.code
        if theirs.code == -signal.SIGABRT:
            lines, code = lines[: len(theirs.lines)], theirs.code
        pairs = zip((*lines, f"exit code {code}"), (*theirs.lines, f"exit code {theirs.code}"), strict=False)
        return next((f"{mine!r} instead of {yours!r}" for mine, yours in pairs if mine != yours), "")


def said(program: Path, build: Path, toy: Path, cache: Sequence[str], env: dict[str, str]) -> Said:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    ours |= {"LD_LIBRARY_PATH": str(build / "bin"), "GGML_NO_BACKTRACE": "1"}
    argv: list[str | Path] = [program, toy, *cache]
    try:
        done = subprocess.run(argv, env=ours | env, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Said((), None)
    return Said(tuple(done.stdout.splitlines()), done.returncode, "grew" in done.stderr)


def show(rows: Iterable[Row]) -> int:
    """Print the results for each kind of cache, and return the exit code."""
    found = [row for row in rows if row.upstream.lines[:1] != ("no context",)]
    columns = ("cache", "models", *(f"{way}: equal, grew" for way in WAYS), "upstream ends")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cache in dict.fromkeys(row.cache for row in found):
        ran = [row for row in found if row.cache == cache]
        numbers = [
            f"{sum(not row.difference(way) for row in ran)}, {sum(row.patched[way].grew for row in ran)}"
            for way in WAYS
        ]
        ends = str(sum(row.upstream.code != 0 for row in ran))
        print(f"| {' | '.join((' '.join(cache) or 'f16, one stream', str(len(ran)), *numbers, ends))} |")
    bad = [
        f"{row.toy} {' '.join(row.cache)}, {way}: {why}"
        for row in found
        for way in WAYS
        if (why := row.difference(way))
    ]
    print("", *bad, sep="\n")
    grew = all(any(row.patched[way].grew for row in found) for way, env in WAYS.items() if env)
    return 1 if bad else 0 if grew else 2


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("unpatched", type=Path, help="build directory of upstream's tree, which is its parent")
    parser.add_argument("patched", type=Path, help="build directory of the patched tree")
    parser.add_argument("toys", type=Path, nargs="+", help="models")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        upstream, patched = args.unpatched.absolute(), args.patched.absolute()
        program = compiled(upstream.parent, upstream, Path(place) / "bits")

        def compare(pair: tuple[Path, tuple[str, ...]]) -> Row:
            toy, cache = pair
            ours = {way: said(program, patched, toy, cache, env) for way, env in WAYS.items()}
            return Row(toy.stem, cache, said(program, upstream, toy, cache, {}), ours)

        with ThreadPoolExecutor(cores()) as pool:
            return show(pool.map(compare, [(toy, cache) for toy in args.toys for cache in CACHES]))


if __name__ == "__main__":
    sys.exit(main())

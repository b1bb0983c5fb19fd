"""Compare a static and a dynamic cache on a model of the user: logits, texts of llama-server, memory and speed.

The program with the static cache ends before the program with the dynamic cache starts, and each program loads the
model only once. So the machine needs memory for one copy of the model.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtool import process
from kvtool.console import Console
from kvtool.errors import UsageError
from kvtool.machine import available_memory, cores, memory_warning
from kvtool.result import CheckOutcome, parse_last_json_line
from kvtool.verify import talk
from kvtool.verify.checks import Check, Finding
from kvtool.verify.devices import Device
from kvtool.verify.gguf_file import Header, read_header
from kvtool.verify.runner import kv_check
from kvtool.verify.talk import Pair
from kvtool.verify.trial import Failed

DEFAULT_CONTEXT, LEAST_CONTEXT = 8192, 1024
_SMALL = 2**30  # models with fewer bytes are fast enough for the longer checks
_COMPUTE = 512 * 2**20  # bytes for compute buffers, the server and its saved states
_SIDE_SECONDS = 3600.0
_UNKNOWN_ARCH = re.compile(r"unknown model architecture: '([^']*)'")
_LOAD_ERROR = re.compile(r"error loading model[^:]*: (.*)")

# For each memory class, which part of the cache grows.
LIMITS: Mapping[str, str] = {
    "plain": "The whole cache grows and shrinks with the conversation.",
    "iSWA": "Both caches grow. The cache of the sliding window never exceeds its window, so it saves less.",
    "hybrid": "The attention cache grows. The recurrent state has a fixed size for each sequence.",
    "hybrid-iSWA": "The window's cache grows up to its window. The recurrent state has a fixed size for each sequence.",
    "hybrid-idx": "Attention and indexer caches grow. The recurrent state has a fixed size for each sequence.",
    "DSA": "The cache and its indexer's cache grow together.",
    "DSA-iSWA": "The cache, its indexer's cache and the window's cache grow.",
    "MSA": "The cache and its indexer's cache grow together.",
    "DSV4": "The compressed caches and the window's cache grow. A saved state contains every row.",
    "recurrent": "Nothing grows: the state of a sequence has a fixed size at any context length.",
    "no cache": "The model has no cache.",
}


@dataclass(frozen=True)
class Subject:
    """Hold a model to check, and its settings."""

    file: Path
    header: Header
    context: int
    gpu_layers: int | None = None  # number of layers on the GPU; None: all layers, if the build supports a GPU
    draft: Path | None = None
    projector: Path | None = None
    quick: bool = False

    @property
    def is_small(self) -> bool:
        """Return True if the model is small enough for the longer checks."""
        return self.header.n_bytes <= _SMALL

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all files that llama-server loads."""
        return self.header.n_bytes + sum(read_header(more).n_bytes for more in (self.draft, self.projector) if more)

    @property
    def threads(self) -> tuple[str, str]:
        """Return the arguments that set the number of threads."""
        return ("-t", str(cores()))


@dataclass(frozen=True)
class Report:
    """Hold the results of all checks of one model."""

    file: Path
    arch: str
    memory_class: str
    context: int
    needed_bytes: int  # bytes that the checks need, as printed before the first program started
    findings: tuple[Finding, ...]
    memory: tuple[Pair, ...]
    speed: tuple[Pair, ...]
    limits: str


def subject(
    file: Path, context: int = 0, gpu_layers: int | None = None, *, quick: bool = False, **more: Path | None
) -> Subject:
    """Return a model to check. Raise UsageError if a file is missing, truncated or not a GGUF file.

    context: the size of the context in tokens; 0 means 8192, or fewer if the model was trained for fewer
    more: the paths of the draft model and the projector, None for none
    """
    header = read_header(file)
    for other in filter(None, more.values()):
        read_header(other)
    trained = header.context or DEFAULT_CONTEXT
    if context and context < LEAST_CONTEXT:
        why = "the conversation of this check needs it"
        raise UsageError(f"-c {context} is too small: the least is {LEAST_CONTEXT}", why=why)
    return Subject(file, header, context or min(DEFAULT_CONTEXT, trained), gpu_layers, quick=quick, **more)


def cache_bytes(kv_check: Path, what: Subject) -> int:
    """Return the bytes of the static cache. The weights are not loaded.

    Raises UsageError if libllama does not know the architecture or refuses the model.
    """
    argv: list[str | Path] = [kv_check, "-m", what.file, "--memory", "--no-alloc", "-v", "-c", str(what.context)]
    done = process.capture(argv, check=False, timeout=300)
    said = parse_last_json_line(done.stdout) or {}
    if said.get("status") == "ok":
        return int(said["reserved"])
    if unknown := _UNKNOWN_ARCH.search(done.stderr):
        why = f"this llama.cpp does not know the architecture {unknown[1]!r}"
        raise UsageError(f"{what.file} cannot be loaded", why=why, next_step="use a newer upstream: kvtool rebase TAG")
    told = _LOAD_ERROR.search(done.stderr)
    why = told[1] if told else str(said.get("reason") or f"kv-check ended with exit code {done.returncode}")
    raise UsageError(f"{what.file} cannot be loaded", why=why, output=done.stderr[-1000:])


def announce_memory(what: Subject, cache: int, console: Console, *, in_host_memory: bool) -> int:
    """Print how much memory the checks need, and return the bytes.

    Raises UsageError if the machine has less memory.
    """
    needed = what.n_bytes + cache + _COMPUTE
    sizes = f"model {_gib(what.n_bytes)}, static cache {_gib(cache)} at -c {what.context}"
    console.step(f"{what.file.name}: needs {_gib(needed)} ({sizes}); the two sides run one after the other")
    if in_host_memory and (why := memory_warning(needed, available_memory())):
        smaller = "close other programs, or choose a smaller context with -c"
        raise UsageError(f"{what.file.name} does not fit into the memory of this machine", why=why, next_step=smaller)
    return needed


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"


@dataclass
class Comparison:
    """Run all checks of one model. Call run() only once."""

    what: Subject
    bin_dir: Path
    work: Path
    on: Device
    cache: int  # bytes of the static cache
    text: Path  # path of real text, at least 60 KB
    memory_class: str = ""
    _grew: bool = False
    _found: list[Finding] = field(default_factory=list)

    def run(self, console: Console, needed: int) -> Report:
        """Run all checks, one after the other, and return the report."""
        what = self.what
        planned = self._kv_checks()
        with console.progress(f"comparing {what.file.name}", len(planned) + 2) as bar:
            for check in planned:
                bar.update(len(self._found), check.group)
                found = self._kv_check(check)
                self._found.append(found)
            bar.update(len(planned), "llama-server")
            spoken = self._talk()
            bar.update(len(planned) + 1, "speed")
            speed = () if what.quick or self.on.label == "rpc" else self._speed()
        memory_class = self.memory_class or "other"
        limits = LIMITS.get(memory_class, "")
        every = (*self._found, *spoken.findings)
        speeds = (*speed, *spoken.speed)
        arch, context = what.header.arch, what.context
        return Report(what.file, arch, memory_class, context, needed, every, spoken.memory, speeds, limits)

    # --- kv-check -----------------------------------------------------------------------------------------------

    def _kv_checks(self) -> list[Check]:
        """Return the checks with kv-check.

        The first check decodes more tokens than the others. The other checks change how the cache grows or how its
        cells are stored.
        """
        long = self.what.is_small and not self.what.quick
        decode = ("--checks", "prompt,generate")
        first = ("--fill", str(min(700, self.what.context - 250))) if long else ()
        planned = [self._check("logits", "logits: batches, single tokens", *decode, *first)]
        states = "state-into-dynamic" if self.what.quick else "state-self,state-into-dynamic,state-into-static"
        planned.append(self._check("states", "save and restore", "--checks", states))
        bits = "retype-bits" if self.what.quick else "retype-bits,retype-generate"
        retype = ("--checks", bits, "--retype", "f16:q8_0:f16")
        planned.append(self._check("types", "f16 to q8_0 and back", *retype))
        if not self.what.quick:
            if not self.on.label:
                planned.append(self._check("by-copy", "logits: growth by copy", *decode, "--storage", "copy"))
            planned.append(self._check("q8_0", "logits: q8_0 cache", *decode, "-ctk", "q8_0", "-ctv", "q8_0"))
            planned.append(self._check("fa-off", "logits: no flash attention", *decode, "-fa", "off"))
        return planned

    def _check(self, name: str, title: str, *args: str) -> Check:
        what = self.what
        common = ["-c", str(what.context), "--text", str(self.text), *what.threads]
        common += ["--quick"] if "--fill" not in args else []
        common += ["-ngl", str(what.gpu_layers)] if what.gpu_layers is not None else []
        return Check(f"{name}/{what.file.stem}", "kv-check", what.file, title, (*common, *args), _SIDE_SECONDS)

    @property
    def _kv_check_program(self) -> Path:
        return self.bin_dir / "kv-check"

    def _kv_check(self, check: Check) -> Finding:
        """Run kv-check on the device. Keep the title of the check and the memory class of the model."""
        found = kv_check(check, self._kv_check_program, lane=self.on.lanes[0])
        if found.outcome is CheckOutcome.PASSED and not found.reason:
            found = replace(found, reason=f"{found.details.get('values', 0) / 1e6:.1f} million values")
        if found.group not in ("", check.group, "other"):
            self.memory_class = found.group
        self._grew = self._grew or found.grown
        details = {**found.details, "title": check.group}
        return replace(found, group=self.memory_class, details=details)

    # --- llama-server -------------------------------------------------------------------------------------------

    def _talk(self) -> talk.Spoken:
        what = self.what
        args = ["-c", str(what.context), *what.threads, *self.on.tools]
        args += ["-ngl", str(what.gpu_layers)] if what.gpu_layers is not None else []
        args += ["-md", str(what.draft), "--spec-type", "draft-simple"] if what.draft else []
        args += ["--mmproj", str(what.projector)] if what.projector else []
        script = talk.Script(
            turns=2 if what.quick else 4,
            answer=48,
            paragraph=min(1000, what.context // 4),
            has_image=what.projector is not None,
            must_grow=self._grew,
        )
        check = Check(f"server/{what.file.stem}", "server", what.file, args=tuple(args))
        return talk.compare(check, self.bin_dir / "llama-server", self.work, script, self.text, self.cache)

    # --- kv-bench -----------------------------------------------------------------------------------------------

    def _speed(self) -> tuple[Pair, ...]:
        """Return the tokens per second of a static and a dynamic context.

        Both contexts are in one process and are called alternately.
        """
        what = self.what
        threads = 1 if what.is_small else cores()
        rounds, batches, tokens = (4, 3, 16) if what.is_small else (1, 1, 4)
        argv: list[str | Path] = [self.bin_dir / "kv-bench", "-m", what.file, "--kv-dynamic", "on"]
        argv += f"-c {what.context} -d 256 -p 64 -b {batches} -n {tokens} --rounds {rounds} -t {threads}".split()
        argv += self._bench_device()
        done = process.capture(argv, check=False, timeout=_SIDE_SECONDS)
        pairs = (parse_last_json_line(done.stdout) or {}).get("pairs", [])
        cores_used = threads if not self.on.label else 1
        return tuple(
            Pair(f"{name}, {threads} thread{'s' * (threads > 1)}", "tokens/s", *_speeds(pairs, kind, cores_used))
            for name, kind in (("prompt", "prompt"), ("generation", "generate"))
        )

    def _bench_device(self) -> list[str]:
        """Return the argument that chooses the device in kv-bench."""
        return ["-dev", self.on.tools[1]] if self.on.tools else []


def _speeds(pairs: Sequence[Mapping[str, Any]], kind: str, cores_used: int) -> tuple[float | None, float | None]:
    """Return the tokens per second of the static and of the dynamic context.

    The calls in which the dynamic cache did not grow are used. If the cache grew in every call, all calls are used.
    """
    all_calls = [pair for pair in pairs if pair["kind"] == kind]
    chosen = [pair for pair in all_calls if not pair["n_grow"]] or all_calls
    tokens = sum(pair["n_tokens"] for pair in chosen)
    seconds = [sum(pair[side] for pair in chosen) / cores_used for side in ("base", "test")]
    static, dynamic = (tokens / each if each else None for each in seconds)
    return static, dynamic


def documentation() -> list[str]:
    """Return the chapters about the Python language that every Python contains."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def write_text(path: Path) -> Path:
    """Write 60 KB of real text: chapters about the Python language that every Python contains."""
    chapters = itertools.accumulate(documentation())
    text = next((so_far for so_far in chapters if len(so_far) > 60_000), "".join(documentation()))
    if len(text) < 10_000:
        raise Failed("garbage", "this Python contains no text (pydoc_data.topics)")
    path.write_text(text, "utf-8")
    return path

"""Define the checks of `kvtool verify` as data, and judge the output of the programs.

A Check is one comparison of a static with a dynamic cache. A Finding is its result. The functions here run nothing;
kvtool/verify/runner.py runs the checks. The kinds of checks are:

- kv-check: kv-check compares the logits of every decode of one toy model (a tiny test model of llama.cpp) bit for bit.
- retype: kv-check also changes the types of the cells, and compares the bytes of the cells with those of a reference.
- completion: llama-completion must write the same text with and without --kv-dynamic.
- bench: llama-bench, which has its own parser of arguments, must measure a speed with and without the flag.
- server: llama-server must give the same answers to a script of requests with and without the flag.
- parts: llama-server's answers must stay the same while its projector and its draft model are loaded and unloaded.
- memory: a new dynamic context with the cache dimensions of Qwen3.5-27B must add at most 64 MiB to the resident
  memory.
- unit: a C++ unit test of cpp/tests must pass. Runs only with `--patch`; otherwise ctest runs these tests.
- preset: CMake must be able to read the tree's presets, and one must be the preset for Metal. Runs only with `--patch`.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvtool.contract import START_LINE, line_pattern
from kvtool.result import CheckOutcome, parse_last_json_line

Kind = Literal["kv-check", "retype", "completion", "bench", "server", "parts", "memory", "unit", "preset"]

# Meaning of the statuses that kv-check prints.
STATUSES: Mapping[str, CheckOutcome] = {
    **dict.fromkeys(("same", "same-not-grown"), CheckOutcome.PASSED),
    # the static cache cannot run it either, so there is nothing to compare
    **dict.fromkeys(("static-fails", "no-cache", "skipped"), CheckOutcome.SKIPPED),
    **dict.fromkeys(("differs", "dynamic-fails", "not-run", "load-fails"), CheckOutcome.FAILED),
}

# the value of kv-check's option --storage, and the word that kv-check prints for it
STORAGES = {"inplace": "in place", "copy": "by copy"}

# Toys (test models) that together have every memory class, the cheap ones first. Toys that the tree does not have are
# left out. The comment after a name is the memory class.
CLASS_TOYS = (
    "llama-dense",  # plain
    "qwen35-dense",  # hybrid
    "gemma3-dense",  # iSWA
    "lfm2-dense",  # hybrid-iSWA
    "deepseek2-moe",  # plain, MLA: no V
    "minimax-m3-moe",  # MSA
    "dots3note-moe",  # DSA-iSWA
    "qwen4exp-moe",  # hybrid-idx
    "deepseek32-moe",  # DSA
    "deepseek4-moe",  # DSV4
)
# The memory classes, those with many models first. Other classes follow, sorted by name.
CLASS_ORDER = ("plain", "iSWA", "hybrid", "hybrid-iSWA", "hybrid-idx", "DSA", "DSA-iSWA", "DSV4", "MSA", "recurrent")
CHEAP_TOYS = CLASS_TOYS[:4]  # --quick runs these toys without flash attention, too
# The caches of these toys reach their full size only with --swa-full, because their attention has a window. The toy of
# the class hybrid-iSWA has no other cache that could grow.
WINDOW_TOYS = ("lfm2-dense", "gemma3-dense", "dots3note-moe", "deepseek4-moe")

# A row of this toy's compressed caches stands for four positions, and a cache that grows by copy starts with 512 rows
# for each sequence. So the toy grows only if more tokens are decoded.
COMPRESSED = "deepseek4-moe"
_LONGER: Mapping[str, tuple[str, ...]] = {
    "1": ("--fill", "2300", "-c", "8192"),
    "4": ("--fill", "2300", "-c", "20480"),
    "4-unified": ("--fill", "9200", "-c", "20480"),
}

# How many toys must grow with flash attention on, by upstream tag. The numbers were measured when the patches were
# written for the tag. If fewer grow, a memory class has stopped growing, and every other check would still report
# "same". v0.5.0 has 127 toys and b11549 has 130. Four of them have no cache, two have only a recurrent state, and one
# (lfm2) has only windows.
EXPECTED_GROWN: Mapping[str, int] = {"v0.5.0": 120, "b11549": 123}
GROWN_SHARE = 0.75  # share of the toys that must grow on a tag without a measurement

MEMORY_CONTEXT = 131072
MEMORY_LIMIT = 64 * 2**20  # bytes that a dynamic context of MEMORY_CONTEXT cells may add to the resident memory


@dataclass(frozen=True)
class Check:
    """Describe one comparison.

    group: the row of the result table that the check belongs to
    args: further arguments for the program
    timeout: the limit in seconds for each of the two runs, static and dynamic
    by_env: set the environment variable of the flag instead of passing the flag
    exact: for the server only. True: requests run one at a time, so a static server repeats its answers exactly, and
        one different token is a failure. False: requests run together, so the batches depend on when the requests
        arrive, and an answer must equal the answer of at least one static run.
    """

    id: str
    kind: Kind
    model: Path
    group: str = ""
    args: tuple[str, ...] = ()
    timeout: float = 900.0  # deepseek4 needs two minutes on an idle core, and other programs may run at the same time
    by_env: bool = False
    exact: bool = True


# checks how many of the toys that kv-check ran have grown
GROWN = Check("kv-check/grown", "kv-check", Path(), group="all toys")


@dataclass(frozen=True)
class Finding:
    """Hold the result of a check.

    status: one of STATUSES, or "crash", "timeout", "garbage", "unstable", "not-grown", "too-big" or "skipped"
    group: the memory class of the model, read from the log; the group of the check if the log does not have it
    details: more data for scripts, in types that JSON has
    """

    id: str
    kind: Kind
    group: str
    outcome: CheckOutcome
    status: str
    reason: str = ""
    grown: bool = False
    seconds: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Return the name of the model. It is a part of the id."""
        return self.id.split("/", 2)[1]


def finding(check: Check, outcome: CheckOutcome, status: str, reason: str, **more: Any) -> Finding:
    """Make the finding of a check."""
    group = check.group or ("other" if check.kind in ("kv-check", "retype") else "")
    return Finding(check.id, check.kind, group, outcome, status, reason, **more)


def passed(check: Check, reason: str, **more: Any) -> Finding:
    """Make the finding of a check that passed."""
    return finding(check, CheckOutcome.PASSED, "same", reason, **more)


def failed(check: Check, status: str, reason: str, **more: Any) -> Finding:
    """Make the finding of a check that failed."""
    return finding(check, CheckOutcome.FAILED, status, reason, **more)


def skipped(check: Check, reason: str) -> Finding:
    """Make the finding of a check that did not run."""
    return finding(check, CheckOutcome.SKIPPED, "skipped", reason)


def toy_check(toy: Path, name: str, *args: str, kind: Kind = "kv-check") -> Check:
    """Return the check of one toy with kv-check. kv-check gets `args` unchanged."""
    return Check(f"kv-check/{toy.stem}/{name}", kind, toy, args=args)


def toy_checks(toys: Iterable[Path], args: Sequence[str] = (), flash: Sequence[str] = ("on", "off")) -> list[Check]:
    """Return the kv-check checks of some toys, for each setting of flash attention in `flash`."""
    label = "".join(f"/{a.lstrip('-')}" for a in args)
    return [toy_check(toy, f"fa-{fa}{label}", "-fa", fa, *args) for fa in flash for toy in toys]


def named_toys(toys: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Return the toys that have one of the names, in the order of `names`. Names without a toy are ignored."""
    by_name = {toy.stem: toy for toy in toys}
    return [by_name[name] for name in names if name in by_name]


def toys_like(toys: Iterable[Path], globs: str) -> list[Path]:
    """Return the toys whose names match one of the comma-separated globs. "" matches all toys."""
    return [toy for toy in toys if any(fnmatch.fnmatch(toy.stem, glob) for glob in (globs or "*").split(","))]


def long_fill_args(toy: Path, sequences: str = "1") -> tuple[str, ...]:
    """Return the additional arguments with which the toy COMPRESSED grows by copy; () for any other toy.

    sequences: the kind of sequences, as the matrix names it
    """
    return _LONGER.get(sequences, ()) if toy.stem == COMPRESSED else ()


def class_rank(name: str) -> tuple[int, str]:
    """Return a key that sorts memory classes."""
    return CLASS_ORDER.index(name) if name in CLASS_ORDER else len(CLASS_ORDER), name


# For each memory class, words that libllama prints if the context has that class. The first class whose words are all
# in the log is the right one.
_CACHE, _WINDOW, _STATE = "llama_kv_cache: size", "llama_kv_cache_iswa:", "llama_memory_recurrent:"
_CLASS_WORDS: Mapping[str, tuple[str, ...]] = {
    "DSV4": ("llama_kv_cache_dsv4:",),
    "DSA-iSWA": ("llama_kv_cache_dsa_iswa:",),
    "DSA": ("llama_kv_cache_dsa:",),
    "MSA": ("llama_kv_cache_msa:",),
    "hybrid-idx": (_STATE, "creating indexer KV cache"),
    "hybrid-iSWA": (_STATE, _WINDOW),
    "hybrid": (_STATE, _CACHE),
    "recurrent": (_STATE,),
    "iSWA": (_WINDOW,),
    "plain": (_CACHE,),
}


def memory_class(log: str) -> str:
    """Return the memory class of a model's context, read from libllama's log; "" if it is unknown.

    There is no table of architectures, so a model that upstream adds later has a class, too.
    """
    return next((name for name, words in _CLASS_WORDS.items() if all(word in log for word in words)), "")


_DYNAMIC = re.compile(line_pattern(START_LINE) + r".*?llama_kv_cache: size = .*?, +(\d+) layers", re.DOTALL)


def has_layers_that_grow(log: str) -> bool:
    """Return True if a dynamic cache in libllama's log has layers, or if the log has no number of layers.

    A model with a sliding window has one cache for its window layers, and one for its other layers. If all layers are
    window layers, the other cache has no layers and grows by 0 bytes. Then the check would test nothing.
    """
    layers = [int(n) for _cells, n in _DYNAMIC.findall(log)]
    return not layers or any(layers)


def judge_kv_check(check: Check, returncode: int, stdout: str, log: str) -> Finding:
    """Turn kv-check's output into a Finding. If the output contradicts the exit code, the check fails."""
    check = replace(check, group=memory_class(log) or check.group)
    end, data = {"log": log[-2000:]}, parse_last_json_line(stdout)
    if data is None or data.get("status") not in STATUSES:
        if returncode < 0 or returncode > 2:
            signal = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
            return failed(check, "crash", f"kv-check itself ended with {signal}", details=end)
        why = "printed no JSON line" if data is None else f"has an unknown status {data.get('status')!r}"
        return failed(check, "garbage", f"kv-check {why} (exit code {returncode})", details=end)
    status, reason = str(data["status"]), str(data.get("reason", ""))
    details, outcome = _details(data), STATUSES[status]
    if (returncode == 0) != (outcome is not CheckOutcome.FAILED):
        reason = f"kv-check printed {status} but ended with exit code {returncode}"
        return failed(check, "garbage", reason, details=details | end)
    if outcome is CheckOutcome.FAILED:
        return failed(check, status, _where(data) or reason or status, details=details | end)
    if status == "same" and not has_layers_that_grow(log):
        status, reason = "same-not-grown", "the cache that grew has no layers: all attention here has a window"
    if status == "no-cache":
        check = replace(check, group=memory_class(log) or "no cache")
    grown = status == "same" and bool(data.get("grown"))
    how, wanted = data.get("storage"), next((STORAGES[arg] for arg in check.args if arg in STORAGES), None)
    if grown and wanted and how not in (wanted, None):
        return failed(check, "another-way", f"it should grow {wanted}, but grew {how}", details=details | end)
    return finding(check, outcome, status, reason, grown=grown, details=details)


def _details(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of kv-check's output that is kept for each run, so that a report with 254 runs stays small."""
    names = ("arch", "cells_start", "cells_end", "growths", "storage", "device", "type_k", "type_v")
    kept = {name: data[name] for name in names if name in data}
    checks: list[dict[str, Any]] = data.get("checks", [])
    by_name = {key: {c["name"]: c[key] for c in checks if c.get(key)} for key in ("reason", "first_diff", "measured")}
    kept["checks"] = {c["name"]: c["status"] for c in checks}
    kept["reasons"] = by_name.pop("reason")
    kept["values"] = sum(c.get("values", 0) for c in checks)
    return kept | {key: said for key, said in by_name.items() if said}


def _where(data: Mapping[str, Any]) -> str:
    """Return a sentence about the first failure."""
    for check in data.get("checks", []):
        if check["status"] in ("differs", "dynamic-fails"):
            if diff := check.get("first_diff"):
                place = f"decode {diff.get('decode')}, row {diff.get('row')}, value {diff.get('index')}"
                return f"{check['name']}: {place}: static {diff.get('static')}, dynamic {diff.get('dynamic')}"
            return f"{check['name']}: {check.get('reason') or check['status']}"
    return ""


def expected_grown(tag: str, toys: int) -> int:
    """Return for how many of the toys the cache must grow on this upstream tag."""
    return min(EXPECTED_GROWN.get(tag, int(GROWN_SHARE * toys)), toys)


def judge_grown(findings: Sequence[Finding], tag: str, label: str = "") -> Finding:
    """Fail unless the caches of enough toys grew with flash attention on.

    A comparison in which no cache grew would prove nothing.

    label: the label of the device
    """
    variant = f"/fa-on/{label}" if label else "/fa-on"
    runs = [f for f in findings if f.kind == "kv-check" and f.id.endswith(variant)]
    grown, wanted = sum(f.grown for f in runs), expected_grown(tag, len(runs))
    details = {"grown": grown, "expected": wanted, "toys": len(runs)}
    if grown < wanted:
        reason = f"only {grown} of {len(runs)} toys grew with flash attention on, {wanted} are expected at {tag}"
        return failed(GROWN, "not-grown", reason, details=details)
    reason = f"{grown} of {len(runs)} toys grew with flash attention on, {wanted} expected"
    return passed(GROWN, reason, details=details)


def judge_quick_grown(findings: Sequence[Finding], tag: str, label: str = "") -> list[Finding]:
    """Return a failure if no cache grew in --quick, or if a model passed a check but the model's cache never grew.

    A model whose cache never grew is a failure only in host memory, and only on an upstream tag for which
    EXPECTED_GROWN has a number.

    label: the label of the device; "" for host memory
    """
    able = {f.model for f in findings if f.outcome is CheckOutcome.PASSED}
    grown = {f.model for f in findings if f.grown}
    flat = sorted(able - grown) if tag in EXPECTED_GROWN and not label else []
    if grown and not flat:
        return []
    reason = f"in no run grew {', '.join(flat)}" if grown else "no model grew"
    return [failed(GROWN, "not-grown", reason, details={"grown": len(grown), "not_grown": flat})]


def judge_memory(check: Check, static: int | None, dynamic: int, cache: int, why_no_static: str = "") -> Finding:
    """Judge the bytes that a context added to the resident memory.

    static: the bytes with a static cache; None if it did not run. The dynamic cache is judged in any case.
    cache: the bytes of the static KV cache, computed from the model's dimensions
    why_no_static: the reason why the static cache did not run
    """
    details = {"static_bytes": static, "dynamic_bytes": dynamic, "cache_bytes": cache, "context": MEMORY_CONTEXT}
    mib = f"{dynamic / 2**20:.0f} MiB"
    against = f"static {static / 2**20:.0f} MiB" if static is not None else f"static not run: {why_no_static}"
    if dynamic > MEMORY_LIMIT:
        limit = f"{MEMORY_LIMIT / 2**20:.0f} MiB"
        return failed(check, "too-big", f"dynamic {mib}, more than the {limit} allowed; {against}", details=details)
    if static is not None and static < cache // 2:
        reason = f"the static context has {static / 2**20:.0f} MiB, its cache alone is {cache / 2**20:.0f} MiB"
        return failed(check, "garbage", f"{reason}: the measurement is wrong", details=details)
    return passed(check, f"dynamic {mib}, {against}", details=details)

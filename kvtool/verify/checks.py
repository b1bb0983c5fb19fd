"""What verify checks, as data, and what each answer means. Pure: kvtool/verify/runner.py does the running.

A Check is one comparison of a static with a dynamic cache; a Finding is what came of it. The kinds:

- kv-check: one toy model through kv-check, which compares the logits of every decode bit for bit
- retype: the same while the types of the cells change, whose bytes are compared with a reference's
- completion: llama-completion's text on a model that speaks, with and without --kv-dynamic
- bench: llama-bench, which parses its arguments itself, measures with and without it
- server: llama-server's answers to a script of requests, likewise
- parts: llama-server's answers while its projector and its draft model come and go
- memory: what a context of Qwen3.5-27B's cache geometry takes right after its creation
- unit: a C++ unit test of cpp/tests (`--patch` only; otherwise ctest runs them)
- preset: CMake reads the tree's presets, and the one for Metal is among them (`--patch` only)
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

# What kv-check's own words mean.
STATUSES: Mapping[str, CheckOutcome] = {
    **dict.fromkeys(("same", "same-not-grown"), CheckOutcome.PASSED),
    # the static cache cannot do it either: nothing to compare
    **dict.fromkeys(("static-fails", "no-cache", "skipped"), CheckOutcome.SKIPPED),
    **dict.fromkeys(("differs", "dynamic-fails", "not-run", "load-fails"), CheckOutcome.FAILED),
}

STORAGES = {"inplace": "in place", "copy": "by copy"}  # what --storage asks for, in the words of kv-check's answer

# Toys that together have every memory class, the cheap ones first; one that a tree does not have is left out.
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
# The classes in the order of how many models have them; what is not named here follows by name.
CLASS_ORDER = ("plain", "iSWA", "hybrid", "hybrid-iSWA", "hybrid-idx", "DSA", "DSA-iSWA", "DSV4", "MSA", "recurrent")
CHEAP_TOYS = CLASS_TOYS[:4]  # --quick runs these without flash attention too
# Their window caches reach their full size only with --swa-full; hybrid-iSWA has nothing else that could grow.
WINDOW_TOYS = ("lfm2-dense", "gemma3-dense", "dots3note-moe", "deepseek4-moe")

# A row of its compressed caches is for four positions, and by copy each sequence begins with 512.
COMPRESSED = "deepseek4-moe"
_LONGER: Mapping[str, tuple[str, ...]] = {
    "1": ("--fill", "2300", "-c", "8192"),
    "4": ("--fill", "2300", "-c", "20480"),
    "4-unified": ("--fill", "9200", "-c", "20480"),
}

# How many toys must really grow with flash attention on, by upstream tag: what was measured when the patches were
# written for it. Fewer means that a class quietly stopped growing, which every other check would call "same". Of
# v0.5.0's 127 and b11549's 130, four have no cache, two only a recurrent state, and one (lfm2) only windows.
EXPECTED_GROWN: Mapping[str, int] = {"v0.5.0": 120, "b11549": 123}
GROWN_SHARE = 0.75  # of the toys, where nobody has measured yet

MEMORY_CONTEXT = 131072
MEMORY_LIMIT = 64 * 2**20  # bytes a dynamic context of that size may add to the resident memory


@dataclass(frozen=True)
class Check:
    """One comparison. group: its row in the table; args: more arguments for the program; timeout in seconds per side.

    by_env: the flag is given by its environment variable.
    exact (server only): the static server repeats itself to the bit, so one differing token is a failure; otherwise
    the batches depend on when requests arrive, and an answer must be one that some static run gave.
    """

    id: str
    kind: Kind
    model: Path
    group: str = ""
    args: tuple[str, ...] = ()
    timeout: float = 900.0  # deepseek4 takes two minutes on an idle core, and machines are not always idle
    by_env: bool = False
    exact: bool = True


GROWN = Check("kv-check/grown", "kv-check", Path(), group="all toys")  # the guard over what kv-check ran


@dataclass(frozen=True)
class Finding:
    """What came of a check. status: one of STATUSES, or crash, timeout, garbage, unstable, not-grown, too-big, skipped.

    group: the memory class, once the log has told it. details: what a machine may want to know, JSON types only.
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
        """The name of the model, which the id has."""
        return self.id.split("/", 2)[1]


def finding(check: Check, outcome: CheckOutcome, status: str, reason: str, **more: Any) -> Finding:
    group = check.group or ("other" if check.kind in ("kv-check", "retype") else "")
    return Finding(check.id, check.kind, group, outcome, status, reason, **more)


def passed(check: Check, reason: str, **more: Any) -> Finding:
    return finding(check, CheckOutcome.PASSED, "same", reason, **more)


def failed(check: Check, status: str, reason: str, **more: Any) -> Finding:
    return finding(check, CheckOutcome.FAILED, status, reason, **more)


def skipped(check: Check, reason: str) -> Finding:
    return finding(check, CheckOutcome.SKIPPED, "skipped", reason)


def toy_check(toy: Path, name: str, *args: str, kind: Kind = "kv-check") -> Check:
    """kv-check on one toy. args go to kv-check as they are."""
    return Check(f"kv-check/{toy.stem}/{name}", kind, toy, args=args)


def toy_checks(toys: Iterable[Path], args: Sequence[str] = (), flash: Sequence[str] = ("on", "off")) -> list[Check]:
    """kv-check over the toys, with flash attention as named."""
    label = "".join(f"/{a.lstrip('-')}" for a in args)
    return [toy_check(toy, f"fa-{fa}{label}", "-fa", fa, *args) for fa in flash for toy in toys]


def named_toys(toys: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Those of the names that are there, in that order."""
    by_name = {toy.stem: toy for toy in toys}
    return [by_name[name] for name in names if name in by_name]


def toys_like(toys: Iterable[Path], globs: str) -> list[Path]:
    """Those whose name fits one of the globs, which have commas between them; "": all."""
    return [toy for toy in toys if any(fnmatch.fnmatch(toy.stem, glob) for glob in (globs or "*").split(","))]


def long_fill_args(toy: Path, sequences: str = "1") -> tuple[str, ...]:
    """Arguments with which a toy grows by copy, beside what one has that grows anyhow. sequences: as the matrix names
    them."""
    return _LONGER.get(sequences, ()) if toy.stem == COMPRESSED else ()


def class_rank(name: str) -> tuple[int, str]:
    """To sort memory classes by."""
    return CLASS_ORDER.index(name) if name in CLASS_ORDER else len(CLASS_ORDER), name


# Each class by the words of libllama's log that it has; the first that has all of its own is meant.
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
    """The memory class that a model's context has, read from libllama's log ("" when the log does not say).

    The log is asked, and not a table of architectures, so that a model that upstream adds tomorrow has a row too.
    """
    return next((name for name, words in _CLASS_WORDS.items() if all(word in log for word in words)), "")


_DYNAMIC = re.compile(line_pattern(START_LINE) + r".*?llama_kv_cache: size = .*?, +(\d+) layers", re.DOTALL)


def has_layers_that_grow(log: str) -> bool:
    """Whether some dynamic cache in libllama's log has layers; True when the log does not say.

    A cache whose layers were all given to a window cache grows without a byte: nothing would have been tested.
    """
    layers = [int(n) for _cells, n in _DYNAMIC.findall(log)]
    return not layers or any(layers)


def judge_kv_check(check: Check, returncode: int, stdout: str, log: str) -> Finding:
    """kv-check's answer as a Finding. An answer that contradicts the exit code counts as none."""
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
        reason = f"kv-check says {status} but ended with exit code {returncode}"
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
        return failed(check, "another-way", f"it was to grow {wanted}, and grew {how}", details=details | end)
    return finding(check, outcome, status, reason, grown=grown, details=details)


def _details(data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of kv-check's answer worth keeping 254 times."""
    names = ("arch", "cells_start", "cells_end", "growths", "storage", "device", "type_k", "type_v")
    kept = {name: data[name] for name in names if name in data}
    checks: list[dict[str, Any]] = data.get("checks", [])
    by_name = {key: {c["name"]: c[key] for c in checks if c.get(key)} for key in ("reason", "first_diff", "measured")}
    kept["checks"] = {c["name"]: c["status"] for c in checks}
    kept["reasons"] = by_name.pop("reason")
    kept["values"] = sum(c.get("values", 0) for c in checks)
    return kept | {key: said for key, said in by_name.items() if said}


def _where(data: Mapping[str, Any]) -> str:
    """The first check that went wrong, in one sentence."""
    for check in data.get("checks", []):
        if check["status"] in ("differs", "dynamic-fails"):
            if diff := check.get("first_diff"):
                place = f"decode {diff.get('decode')}, row {diff.get('row')}, value {diff.get('index')}"
                return f"{check['name']}: {place}: static {diff.get('static')}, dynamic {diff.get('dynamic')}"
            return f"{check['name']}: {check.get('reason') or check['status']}"
    return ""


def expected_grown(tag: str, toys: int) -> int:
    """How many of this many toys must grow on this upstream."""
    return min(EXPECTED_GROWN.get(tag, int(GROWN_SHARE * toys)), toys)


def judge_grown(findings: Sequence[Finding], tag: str, label: str = "") -> Finding:
    """The regression guard: of all toys with flash attention on, enough really grew. label: the device's."""
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
    """The same for --quick, said only where it fails: some model grew; and each that a static cache can run did in one
    of its runs, in host memory of an upstream where that was measured."""
    able = {f.model for f in findings if f.outcome is CheckOutcome.PASSED}
    grown = {f.model for f in findings if f.grown}
    flat = sorted(able - grown) if tag in EXPECTED_GROWN and not label else []
    if grown and not flat:
        return []
    reason = f"in no run grew {', '.join(flat)}" if grown else "no model grew"
    return [failed(GROWN, "not-grown", reason, details={"grown": len(grown), "not_grown": flat})]


def judge_memory(check: Check, static: int | None, dynamic: int, cache: int, why_no_static: str = "") -> Finding:
    """Bytes that a context added to the resident memory. cache: bytes of the static KV cache by its geometry.

    static None: it was not run, for the reason given; the dynamic side is judged all the same.
    """
    details = {"static_bytes": static, "dynamic_bytes": dynamic, "cache_bytes": cache, "context": MEMORY_CONTEXT}
    mib = f"{dynamic / 2**20:.0f} MiB"
    against = f"static {static / 2**20:.0f} MiB" if static is not None else f"static not run: {why_no_static}"
    if dynamic > MEMORY_LIMIT:
        limit = f"{MEMORY_LIMIT / 2**20:.0f} MiB"
        return failed(check, "too-big", f"dynamic {mib}, more than the {limit} allowed; {against}", details=details)
    if static is not None and static < cache // 2:
        reason = f"the static context takes {static / 2**20:.0f} MiB, its cache alone is {cache / 2**20:.0f} MiB"
        return failed(check, "garbage", f"{reason}: the measurement is wrong", details=details)
    return passed(check, f"dynamic {mib}, {against}", details=details)

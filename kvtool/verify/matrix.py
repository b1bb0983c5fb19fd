"""Plan the checks of `kvtool verify --matrix`: every kind of cache on every toy (test model). Also make its table.

Each toy runs four times: with flash attention and a cache of f16, of q8_0 and of q4_0, and without flash attention and
a cache of f16. A quantized V needs flash attention. Each of these four runs is made with one sequence, with four
sequences that have a stream each, and with four sequences in one stream.

Each combination runs in host memory, where the cache grows in place. If the build has a device, each combination also
runs with the cache on the device, where it grows by copy. In host memory, only a cache of f16 also runs with growth by
copy, because a copy moves the bytes of all types in the same way.

Each combination runs only the checks of CHECKS, because their results depend on the kind of cache. `kvtool verify`
without --matrix runs all checks on the usual cache.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvtool import markdown
from kvtool.result import CheckOutcome
from kvtool.verify import checks
from kvtool.verify.checks import Check, Finding
from kvtool.verify.report import Tally, class_rows, tally

CHECKS = "generate,copy,shift,state-self"
# for each kind of cache its type and kv-check's arguments
CACHES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    f"{type_}-fa-{fa}": (type_, ("-fa", fa, "-ctk", type_, "-ctv", type_))
    for fa, type_ in (("on", "f16"), ("on", "q8_0"), ("on", "q4_0"), ("off", "f16"))
}
SEQUENCES: Mapping[str, tuple[str, ...]] = {
    "1": (),
    "4": ("--seqs", "4"),
    "4-unified": ("--seqs", "4", "--unified"),
}
# Upstream's RPC server aborts if it has to shift a quantized K of an MLA model, and all checks after the shift fail,
# too. So on a device the shift is a run of its own, on one model of each memory class.
DEVICE_CHECKS = {"f16": CHECKS, "q8_0": "generate,copy,state-self", "q4_0": "generate,copy,state-self"}
COPIED = tuple(name for name, (type_, _) in CACHES.items() if type_ == "f16")

# all types of upstream's -ctk and -ctv; every pair of them is tested, on one toy for each way of rotating a quantized
# cache
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# a cache that is rotated by Hadamard matrices; a head size of 80, which cannot be rotated; and MLA, which has no V
PAIR_TOYS = ("llama-dense", "laguna-moe", "deepseek2-moe")
PAIR_CHECKS = "prompt,shift,state-self"

# All attention of this toy has a window. The caches of windows are small, so they grow only if the window has its full
# size.
MORE: dict[str, tuple[str, ...]] = {"lfm2-dense": ("--swa-full",)}

_PREFIX = "matrix"


def _check(toy: Path, cache: str, sequences: str, storage: str, args: Sequence[str], which: str) -> Check:
    more = (*MORE.get(toy.stem, ()), *(() if storage == "inplace" else checks.long_fill_args(toy, sequences)))
    name = f"{_PREFIX}/{cache}/{sequences}/{storage}"
    return checks.toy_check(toy, name, *args, *more, "--quick", "--checks", which)


def _variants(toys: Sequence[Path], storage: str, more: tuple[str, ...], caches: Mapping[str, str]) -> list[Check]:
    """Return the checks for one kind of storage.

    caches: the checks to run for each kind of cache
    """
    return [
        _check(toy, cache, name, storage, (*CACHES[cache][1], *args, *more), which)
        for cache, which in caches.items()
        for name, args in SEQUENCES.items()
        for toy in toys
    ]


def in_memory(toys: Sequence[Path]) -> list[Check]:
    """Return the checks in host memory: growth in place, growth by copy, and every pair of types."""
    planned = _variants(toys, "inplace", ("--storage", "inplace"), dict.fromkeys(CACHES, CHECKS))
    planned += _variants(toys, "copy", ("--storage", "copy"), dict.fromkeys(COPIED, CHECKS))
    for toy, k, v in itertools.product(checks.named_toys(toys, PAIR_TOYS), TYPES, TYPES):
        planned.append(_check(toy, f"{k}-{v}", "1", "pair", ("-fa", "on", "-ctk", k, "-ctv", v), PAIR_CHECKS))
    return planned


def on_device(toys: Sequence[Path], label: str) -> list[Check]:
    """Return the checks on a device. There the cache grows by copy, and kv-check reports how it grew."""
    which = {cache: DEVICE_CHECKS[type_] for cache, (type_, _) in CACHES.items()}
    alone = [cache for cache in CACHES if "shift" not in which[cache]]
    shifted = itertools.product(alone, checks.named_toys(toys, checks.CLASS_TOYS))
    return [
        *_variants(toys, label, (), which),
        *(_check(toy, cache, "1-shift", label, CACHES[cache][1], "shift") for cache, toy in shifted),
    ]


def _place(found: Finding) -> tuple[str, str]:
    """Return the kind of cache and the storage of a matrix check; two empty strings for any other check."""
    parts = found.id.split("/")
    return (parts[3], parts[5]) if len(parts) == 6 and parts[2] == _PREFIX else ("", "")


def _cell(of: Tally | None) -> str:
    """Return a cell of the table: the number of equal runs, "/", and the number of runs that a static cache supports.

    The number of equal runs without growth and the number of failed runs follow if they are not 0. Returns "" if there
    were no runs.
    """
    if of is None:
        return ""
    flat = f", {of.same - of.grown} not grown" if of.same > of.grown else ""
    wrong = f" **{of.failed} FAILED**" if of.failed else ""
    return f"{of.same}/{of.same + of.failed}{flat}{wrong}"


def judge_grown(findings: Sequence[Finding], least: int = 0) -> Finding:
    """Fail if the cache of a model grew in one run but not in all of them, or if it grew for fewer than `least` models.

    Without growth, a comparison is "equal" but proves nothing.
    """
    equal = [f for f in findings if f.outcome is CheckOutcome.PASSED and all(_place(f))]
    growing = {f.model for f in equal if f.grown}
    flat = [f.id for f in equal if not f.grown and f.model in growing]
    if flat:
        reason = f"{len(flat)} runs did not grow, of models that do in others: {', '.join(flat[:3])}"
        return checks.failed(checks.GROWN, "not-grown", reason, details={"not_grown": flat})
    if len(growing) < least:
        return checks.failed(checks.GROWN, "not-grown", f"only {len(growing)} models grew, {least} are expected")
    return checks.passed(checks.GROWN, f"{len(growing)} models grew wherever a static cache runs")


def table(findings: Iterable[Finding]) -> str:
    """Return the result as a Markdown table; "" if no check of the matrix ran.

    The table has a row for each memory class, and a column for each kind of cache and storage. A cell has up to four
    numbers (see _cell()): runs with equal bits, runs that a static cache supports, equal runs without growth, and
    failed runs. The numbers count the runs of all models of the class, with one sequence, with four streams, and with
    four sequences in one stream.
    """
    # if a static cache cannot do a run, no context is created, so the log has no memory class
    could = [f for f in findings if f.outcome is not CheckOutcome.SKIPPED and _place(f)[1] not in ("", "pair")]
    rows = class_rows(could, _place)
    places = {place for row in rows for place in row.variants}
    storages = (*checks.STORAGES, *sorted({storage for _, storage in places} - {*checks.STORAGES}))
    columns = [place for place in itertools.product(CACHES, storages) if place in places]
    titles = {cache: type_ if "on" in args else f"{type_} without FA" for cache, (type_, args) in CACHES.items()}
    named = (f">{titles[cache]}, {checks.STORAGES.get(storage, storage.upper())}" for cache, storage in columns)
    body = [[row.memory_class, str(row.models), *(_cell(row.variants.get(at)) for at in columns)] for row in rows]
    return markdown.table(["memory class", ">models", *named], body) if body else ""


def pairs(findings: Iterable[Finding]) -> str:
    """Return one line about the runs with each pair of types for K and V; "" if there were no such runs."""
    found = [f for f in findings if _place(f)[1] == "pair"]
    return f"Pairs of -ctk and -ctv ({', '.join(PAIR_TOYS)}): {_cell(tally(found))} equal.\n" if found else ""

"""Plan `kvtool verify --matrix` (every kind of cache over every toy model), and make its table.

For each toy: flash attention on with caches of f16, q8_0 and q4_0, and off with f16 (quantized V needs flash
attention). Each runs with one sequence, four sequences with a stream each, and four in one stream. Each runs in host
memory, where storage grows in place, and on the device if the build has one, where it grows by copy. In host memory,
f16 also grows by copy (a copy moves bytes of any type). Each combination runs the checks that depend on it (CHECKS):
`kvtool verify` without --matrix runs all checks on the usual cache. Pure: models in, checks out; findings in, a table
out.
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
# by name: the type, and kv-check's arguments
CACHES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    f"{type_}-fa-{fa}": (type_, ("-fa", fa, "-ctk", type_, "-ctv", type_))
    for fa, type_ in (("on", "f16"), ("on", "q8_0"), ("on", "q4_0"), ("off", "f16"))
}
SEQUENCES: Mapping[str, tuple[str, ...]] = {
    "1": (),
    "4": ("--seqs", "4"),
    "4-unified": ("--seqs", "4", "--unified"),
}
# Upstream's RPC server aborts if it cannot shift a quantized K (MLA), and the following checks fail with it. On a
# device, the shift is therefore a separate run, over one model of each class.
DEVICE_CHECKS = {"f16": CHECKS, "q8_0": "generate,copy,state-self", "q4_0": "generate,copy,state-self"}
COPIED = tuple(name for name, (type_, _) in CACHES.items() if type_ == "f16")

# All types of upstream's -ctk and -ctv, in all pairs, once per way in which upstream rotates a quantized cache.
TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# rotated by Hadamard matrices; a head size of 80, which is not; MLA, which has no V
PAIR_TOYS = ("llama-dense", "laguna-moe", "deepseek2-moe")
PAIR_CHECKS = "prompt,shift,state-self"

# All its attention has a window, whose cache is small: only a window of full size grows.
MORE: dict[str, tuple[str, ...]] = {"lfm2-dense": ("--swa-full",)}

_PREFIX = "matrix"


def _check(toy: Path, cache: str, sequences: str, storage: str, args: Sequence[str], which: str) -> Check:
    more = (*MORE.get(toy.stem, ()), *(() if storage == "inplace" else checks.long_fill_args(toy, sequences)))
    name = f"{_PREFIX}/{cache}/{sequences}/{storage}"
    return checks.toy_check(toy, name, *args, *more, "--quick", "--checks", which)


def _variants(toys: Sequence[Path], storage: str, more: tuple[str, ...], caches: Mapping[str, str]) -> list[Check]:
    """Return the runs of one storage. caches: the checks of each kind of cache."""
    return [
        _check(toy, cache, name, storage, (*CACHES[cache][1], *args, *more), which)
        for cache, which in caches.items()
        for name, args in SEQUENCES.items()
        for toy in toys
    ]


def in_memory(toys: Sequence[Path]) -> list[Check]:
    """Return the runs in host memory: both ways to grow, and every pair of types."""
    planned = _variants(toys, "inplace", ("--storage", "inplace"), dict.fromkeys(CACHES, CHECKS))
    planned += _variants(toys, "copy", ("--storage", "copy"), dict.fromkeys(COPIED, CHECKS))
    for toy, k, v in itertools.product(checks.named_toys(toys, PAIR_TOYS), TYPES, TYPES):
        planned.append(_check(toy, f"{k}-{v}", "1", "pair", ("-fa", "on", "-ctk", k, "-ctv", v), PAIR_CHECKS))
    return planned


def on_device(toys: Sequence[Path], label: str) -> list[Check]:
    """Return the runs on a device, which reports its kind of growth; growth is by copy."""
    which = {cache: DEVICE_CHECKS[type_] for cache, (type_, _) in CACHES.items()}
    alone = [cache for cache in CACHES if "shift" not in which[cache]]
    shifted = itertools.product(alone, checks.named_toys(toys, checks.CLASS_TOYS))
    return [
        *_variants(toys, label, (), which),
        *(_check(toy, cache, "1-shift", label, CACHES[cache][1], "shift") for cache, toy in shifted),
    ]


def _place(found: Finding) -> tuple[str, str]:
    """(cache, storage) of a matrix run, both "" for any other."""
    parts = found.id.split("/")
    return (parts[3], parts[5]) if len(parts) == 6 and parts[2] == _PREFIX else ("", "")


def _cell(of: Tally | None) -> str:
    """Return a cell as "equal/possible", the equal runs without growth, and the failures; "" without runs."""
    if of is None:
        return ""
    flat = f", {of.same - of.grown} not grown" if of.same > of.grown else ""
    wrong = f" **{of.failed} FAILED**" if of.failed else ""
    return f"{of.same}/{of.same + of.failed}{flat}{wrong}"


def judge_grown(findings: Sequence[Finding], least: int = 0) -> Finding:
    """Fail if a model grows in one kind of cache but not in all, or if fewer than `least` models grow.

    Without growth, a comparison would be "equal" without proving anything.
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
    """Return the Markdown table: a row per memory class, a column per cache and storage; "" without a matrix run.

    A cell has the runs with equal bits / the runs that a static cache supports, and the number of runs without
    growth. It counts the models of the class, with one sequence, four streams, and four sequences in one stream.
    """
    # runs that a static cache cannot do have no class: without a context, the log names none
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
    """Return one line about the runs over pairs of types; "" without any."""
    found = [f for f in findings if _place(f)[1] == "pair"]
    return f"Pairs of -ctk and -ctv ({', '.join(PAIR_TOYS)}): {_cell(tally(found))} equal.\n" if found else ""

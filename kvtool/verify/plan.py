"""Which checks verify runs. Pure: models and options in, checks out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.verify.checks import (
    CHEAP_TOYS,
    CLASS_TOYS,
    WINDOW_TOYS,
    Check,
    long_fill_args,
    named_toys,
    toy_check,
    toy_checks,
)
from kvtool.verify.conversation import BATCHED

TRAINED = "llama-dense"
TRAINING = ("--train", "--checks", "train", "-ctk", "f32", "-ctv", "f32")  # the types that upstream can train
SERVED = ("llama-dense", "qwen35-dense", "gemma3-dense")  # plain, hybrid, iSWA: the classes that people serve
QUANTIZED = ("llama-dense", "qwen35-dense")


def kv_checks(toys: Sequence[Path], *, quick: bool, chosen: bool, by_copy: bool = False) -> list[Check]:
    """Return the runs of kv-check.

    chosen: the user named the toys, so quick runs all of them
    by_copy: the cache may grow by copy, and all caches that can grow must grow
    """
    short = ("--quick",)
    if quick and chosen:
        return toy_checks(toys, short)
    if quick:
        return [
            *toy_checks(named_toys(toys, CLASS_TOYS), short, ("on",)),
            *toy_checks(named_toys(toys, CHEAP_TOYS), short, ("off",)),
            *toy_checks(named_toys(toys, WINDOW_TOYS[:1]), ("--swa-full", *short), ("on",)),
        ]
    # Both cross 256, 512 and 1024 cells; the long run splits its batches in more ways and fills twice as much.
    planned = toy_checks(toys, flash=("on",))
    if by_copy:
        planned = [replace(check, args=(*check.args, *long_fill_args(check.model))) for check in planned]
    planned += toy_checks(toys, short, flash=("off",))
    planned += toy_checks(named_toys(toys, WINDOW_TOYS), ("--swa-full", *short))
    trained = named_toys(toys, (TRAINED,))
    return [*planned, *(toy_check(toy, "train", "-fa", "off", *TRAINING) for toy in trained)]


RETYPE = ("--checks", "retype")
RETYPE_BYTES = ("--checks", "retype-bits,retype-generate")  # for the classes whose models need minutes
IN_PLACE, BY_COPY, STREAMS = ("--storage", "inplace"), ("--storage", "copy"), ("--seqs", "4")


def retypes(toys: Sequence[Path], *, quick: bool) -> list[Check]:
    """Return the checks of type changes: in place and by copy, four streams, and transposed V (no flash attention).

    quick: two toys, and only one of them for four streams, which need four times as long
    """
    few = named_toys(toys, CHEAP_TOYS[:2]) if quick else toys
    first, second = (named_toys(toys, CHEAP_TOYS[i : i + 1]) if quick else toys for i in (0, 1))
    slow = named_toys(toys, CLASS_TOYS[2:]) if quick else []
    short = ("--quick",) if quick else ()
    variants = (
        (few, "inplace", "on", (*IN_PLACE, *short, *RETYPE)),
        (slow, "inplace", "on", (*IN_PLACE, *short, *RETYPE_BYTES)),
        (few, "copy", "on", (*BY_COPY, *short, *RETYPE)),
        (first, "streams", "on", (*STREAMS, *short, *RETYPE)),
        (few, "inplace", "off", (*IN_PLACE, *short, *RETYPE)),
        (second, "copy-streams", "off", (*BY_COPY, *STREAMS, *short, *RETYPE)),
    )
    return [
        toy_check(toy, f"retype/{how}/fa-{fa}", "-fa", fa, *args, kind="retype")
        for some, how, fa, args in variants
        for toy in some
    ]


def draft(name: str, model: Path, *args: str) -> Check:
    """Return kv-check's comparison of a draft next to a model; args select the draft."""
    return Check(f"kv-check/{name}/draft", "kv-check", model, args=("-fa", "on", *args, "--checks", "draft"))


def texts(speakers: Mapping[str, Path], *, quick: bool) -> list[Check]:
    """Return the checks of programs that generate text, over text models by toy name, cheap ones first.

    single: one request at a time, every default as it is; batched and unified: concurrent requests (conversation.py).
    """
    planned = [Check(f"completion/{name}", "completion", path) for name, path in speakers.items()]
    if plain := speakers.get("llama-dense"):
        planned.append(Check("completion/llama-dense/environment", "completion", plain, by_env=True))
        planned.append(Check("bench/llama-dense", "bench", plain))
        planned.append(Check("server/llama-dense/parts", "parts", plain))
    served: dict[str, tuple[str, ...]] = {"single": (), "batched": BATCHED}
    if not quick:
        for name in filter(speakers.get, QUANTIZED):
            q8_0 = ("-ctk", "q8_0", "-ctv", "q8_0")
            planned.append(Check(f"completion/{name}/q8_0", "completion", speakers[name], args=q8_0))
        # Without the host's prompt cache: its entries are loaded into any idle slot, which depends on arrival.
        served["unified"] = ("-kvu", "-cram", "0", *BATCHED)
    for name in filter(speakers.get, SERVED):
        for how, args in served.items():
            exact = how == "single"
            planned.append(Check(f"server/{name}/{how}", "server", speakers[name], args=args, exact=exact))
    return planned


def on_device(label: str, args: Sequence[str], planned: Sequence[Check]) -> list[Check]:
    """Return the checks on a device: its label in their ids, its arguments at the end of theirs."""
    suffix = f"/{label}" if label else ""
    return [replace(check, id=check.id + suffix, args=(*check.args, *args)) for check in planned]

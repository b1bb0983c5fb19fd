"""Choose the checks that verify runs, from the models and the options. Nothing is run here."""

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
# upstream can train only caches of these types
TRAINING = ("--train", "--checks", "train", "-ctk", "f32", "-ctv", "f32")
# models of the memory classes that most people use in a server: plain, hybrid, iSWA
SERVED = ("llama-dense", "qwen35-dense", "gemma3-dense")
QUANTIZED = ("llama-dense", "qwen35-dense")


def kv_checks(toys: Sequence[Path], *, quick: bool, chosen: bool, by_copy: bool = False) -> list[Check]:
    """Return the checks with kv-check.

    quick: run short checks on a few toys (test models)
    chosen: the user named the toys, so quick uses all of them
    by_copy: the cache grows by copy, so decode more tokens until all caches that can grow have grown
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
    # Both runs cross the sizes 256, 512 and 1024. The long run divides its tokens into batches in more ways, and fills
    # twice as many cells.
    planned = toy_checks(toys, flash=("on",))
    if by_copy:
        planned = [replace(check, args=(*check.args, *long_fill_args(check.model))) for check in planned]
    planned += toy_checks(toys, short, flash=("off",))
    planned += toy_checks(named_toys(toys, WINDOW_TOYS), ("--swa-full", *short))
    trained = named_toys(toys, (TRAINED,))
    return [*planned, *(toy_check(toy, "train", "-fa", "off", *TRAINING) for toy in trained)]


RETYPE = ("--checks", "retype")
RETYPE_BYTES = ("--checks", "retype-bits,retype-generate")  # for the memory classes whose models need minutes
IN_PLACE, BY_COPY, STREAMS = ("--storage", "inplace"), ("--storage", "copy"), ("--seqs", "4")


def retypes(toys: Sequence[Path], *, quick: bool) -> list[Check]:
    """Return the checks of type changes: in place, by copy, with four streams, and without flash attention.

    Without flash attention, V is stored transposed.

    quick: use two toys (test models), and only one toy for the checks with four streams, which take four times as long
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
    """Return the check of a draft: kv-check compares static and dynamic caches while the draft runs beside the model.

    args: the arguments of kv-check that select the draft
    """
    return Check(f"kv-check/{name}/draft", "kv-check", model, args=("-fa", "on", *args, "--checks", "draft"))


def texts(speakers: Mapping[str, Path], *, quick: bool) -> list[Check]:
    """Return the checks of programs that generate text.

    The cheap checks are first. "single" sends one request at a time and uses every default. "batched" and "unified"
    send requests that run together (see conversation.py).

    speakers: the paths of the text models, by the name of the toy that each was made from
    quick: leave the slow checks out
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
        # -cram 0 turns off the prompt cache in host memory. llama-server loads an entry of the prompt cache into any
        # idle slot, so the answers would depend on the times at which the requests arrive.
        served["unified"] = ("-kvu", "-cram", "0", *BATCHED)
    for name in filter(speakers.get, SERVED):
        for how, args in served.items():
            exact = how == "single"
            planned.append(Check(f"server/{name}/{how}", "server", speakers[name], args=args, exact=exact))
    return planned


def on_device(label: str, args: Sequence[str], planned: Sequence[Check]) -> list[Check]:
    """Return the checks for a device: with its label at the end of their ids, and with its arguments."""
    suffix = f"/{label}" if label else ""
    return [replace(check, id=check.id + suffix, args=(*check.args, *args)) for check in planned]

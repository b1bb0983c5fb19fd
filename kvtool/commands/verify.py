"""`kvtool verify`: is the dynamic cache equal to the static one, bit for bit and text for text?"""

import time
from collections.abc import Sequence
from pathlib import Path

from kvtool.commands.verify_steps import Options, Verification, kinds_of, programs
from kvtool.env import Env
from kvtool.errors import UsageError, VerifyError
from kvtool.locks import alone
from kvtool.machine import cores
from kvtool.tree.status import read_applied
from kvtool.upstream.lock import load_lock
from kvtool.verify import devices, junit, matrix
from kvtool.verify.checks import Finding
from kvtool.verify.report import CLASS_ORDER, Verified, class_rows


def _must_be_writable(file: Path) -> None:
    """UsageError before hours of work, and not after them."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as err:
        raise UsageError(f"{file} cannot be written", why=str(err), next_step="name another file") from err


def _write_markdown(file: Path, found: Sequence[Finding]) -> None:
    text = matrix.table(found, CLASS_ORDER)
    file.write_text(f"{text}\n{matrix.pairs(found)}", "utf-8")


def command(env: Env, options: Options) -> Verified:
    """Prove the dynamic cache equal to the static one.

    Builds what it needs, then: kv-check (every logit of every decode, bit for bit) on upstream's toy models with flash
    attention on and off; llama-completion and llama-server with and without --kv-dynamic; the resident memory of a
    context with Qwen3.5-27B's cache.

    The cache is in host memory, on the GPU of a build for one, with --rpc in a ggml-rpc-server on loopback.

    --matrix takes an hour or two; interrupted, the same command goes on where it stopped.

        kvtool verify --quick             an answer in two minutes
        kvtool verify --models 'gemma*'   kv-check on some models only
        kvtool verify --patch state       the tests that series.toml names for it
        kvtool verify --metal             the same with the cache on a Mac's GPU
        kvtool verify --matrix --rpc --markdown table.md

    Exit codes: 4 stale tree, 7 build, 8 something differs, crashes or does not grow.
    """
    project, console = env.project, env.console
    started = time.monotonic()
    options.refuse_contradictions()
    for file in filter(None, (options.junit, options.markdown)):
        _must_be_writable(file)
    kinds = kinds_of(project, options)
    bin_dir, work = programs(env, options, kinds), project.tree / "build" / "verify"
    applied = read_applied(project.tree)
    tag = applied.tag if applied else load_lock(project.lock).current
    work.mkdir(parents=True, exist_ok=True)
    with (
        alone(work, VerifyError, "verify is running"),
        devices.device(options.backend, bin_dir, work, options.jobs or cores()) as on,
    ):
        under_way = Verification(project, console, options, kinds, bin_dir, work, on)
        everything = under_way.run(tag)
    if options.junit is not None:
        junit.write(options.junit, everything)
    if options.markdown is not None:
        _write_markdown(options.markdown, everything)
    under_way.told.close()
    return Verified(
        tag,
        options.mode,
        bin_dir,
        class_rows(everything),
        tuple(everything),
        options.junit,
        time.monotonic() - started,
    )

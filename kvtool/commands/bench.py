"""Implement `kvtool bench`: compare a static cache with dynamic caches that grow by copy and in place."""

import functools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool import process
from kvtool.bench import plots, quality, runs, speed
from kvtool.bench.report import Report
from kvtool.commands import build
from kvtool.commands.verify_model import model_path
from kvtool.compile import cmake
from kvtool.errors import DiskError, MeasureError, writing
from kvtool.locks import try_lock_dir
from kvtool.machine import cores
from kvtool.options import BinDir, Context, Env, env_of, reject
from kvtool.verify import checks, models
from kvtool.worktree.status import read_applied

# SPEED_CONTEXT is smaller, because a speed measurement has two contexts at a time and makes new ones in each round
CONTEXT, SPEED_CONTEXT = 131072, 8192
DEPTHS, QUICK_DEPTHS = (89, 809, 6409, 25609, 32768), (89, 809, 6409, 8192)
# the first two are just below 256 and 1024, so the measured tokens cross a size at which the cache grows
SPEED_DEPTHS = (250, 1000, 2000)
_TOYS = ("kv-check", "test-llama-archs")  # programs that --types needs in addition to kv-bench
ROOM = 1024  # tokens that are decoded after the prompt of a given depth


@dataclass(frozen=True)
class Options:
    quick: bool = False
    model: Path | None = None
    rounds: int = 0
    n_ctx: int = CONTEXT
    baseline: Path | None = None
    out: Path | None = None
    serve: bool = False
    chats: int = 8
    types: bool = False
    quality: bool = False
    attention: bool = False
    strict: bool = False
    bin_dir: Path | None = None


def _check(options: Options) -> None:
    no_library = options.baseline and not (options.baseline / "libllama.so").is_file()
    several = options.types + options.serve + options.quality + options.attention > 1
    reject(
        "bench",
        (options.n_ctx < 2048, f"--ctx {options.n_ctx} is too small to measure in: 2048 or more"),
        (options.chats < 2, "a single chat cannot share a prompt: --chats 2 or more"),
        (several, "--types, --serve, --quality and --attention exclude each other"),
        (options.quality and not options.model, "--quality needs a trained model: --model smollm2, or a file"),
        (options.rounds and options.rounds < 2, "an interval needs two rounds: --rounds 2 or more"),
        (options.model and not options.model.is_file(), f"there is no {options.model}"),
        (no_library, f"there is no libllama.so in {options.baseline}: build the target llama, on Linux"),
    )
    if options.out:
        plots.require()
        with writing(f"to {options.out}", "--out another directory"):
            options.out.mkdir(parents=True, exist_ok=True)


def _types(env: Env, options: Options, program: Path, work: Path) -> Report:
    from kvtool.bench import types

    given, quick = options.model, options.quick
    check, generator = (process.require_program(program.parent, name, MeasureError, "kvtool build") for name in _TOYS)
    bench = runs.KvBench(program, given or models.cache_model(models.QWEN35_27B, work), env.console)
    cells = max(2048, options.n_ctx // (16 if quick else 4))
    changed = types.measure_changes(bench, cells)
    if given:
        held = types.fill_budgets(bench, changed[0].before // 4, changed[0].before // cells)
    else:
        large = replace(bench, model=models.cache_model(types.LARGE_CELLS, work))
        held = types.fill_budgets(large, types.BUDGET // (8 if quick else 1), types.LARGE_CELLS.bytes_per_cell())
    with env.console.progress("making upstream's toy models", None) as bar:
        # use the folder of verify, because the models need almost a GiB and verify may have made them
        toys = models.toys(generator, work.with_name("verify"), lambda made: bar.update(made, f"{made} models"))
    chosen = checks.named_toys(toys, checks.CHEAP_TOYS) if quick else toys
    lost, failed = types.measure_losses(check, chosen, env.console)
    name = given.name if given else models.QWEN35_27B.name
    return types.TypesResult(name, types.type_bars(changed, held, lost, failed), "", cells, changed, held, lost)


def _quality(env: Env, options: Options, program: Path, work: Path) -> Report:
    assert options.model  # _check() refuses the option without it
    text, chunks = quality.write_text(work / "quality.txt"), quality.QUICK_CHUNKS if options.quick else quality.CHUNKS
    losses = quality.Perplexity(program, options.model, text, work, chunks, env.console).measure()
    bars = quality.quality_bars(losses)
    return quality.QualityResult(options.model.name, bars, "", quality.CONTEXT, chunks, losses)


def _serve(env: Env, options: Options, program: Path, work: Path) -> Report:
    from kvtool.bench import serve  # needs httpx, so it is imported only for --serve

    load = serve.Load(options.chats, *((2, 500, 25, 8) if options.quick else (2, 2000, 100, 16)))
    vocabulary = env.project.tree / "models" / models.VOCABULARY
    model = options.model or models.text_model(models.cache_model(serve.GEOMETRY, work), vocabulary, work)
    known = serve.SHARE in process.capture([program, "--help"], error=MeasureError, timeout=60).stdout
    modes = [mode for mode in serve.FLAGS if known or mode != serve.SHARED]
    chat = functools.partial(serve.serve, program, model, work, load)
    rows = tuple(env.console.each("talking to llama-server", modes, chat))
    skipped = "" if known else f"this llama-server has no {serve.SHARE}"
    return serve.ServeResult(model.name, serve.serve_bars(rows), skipped, load, rows)


def _attention(env: Env, options: Options, program: Path, work: Path) -> Report:
    """Measure the speed of smaller cell types at those depths that fit into the context."""
    from kvtool.bench import attention

    fixed = attention.QUICK_DEPTHS if options.quick else attention.DEPTHS
    depths = [d for d in fixed if d + attention.BEYOND <= options.n_ctx]
    rounds = options.rounds or (2 if options.quick else 4)
    bench = runs.KvBench(program, options.model or models.cache_model(models.SMOLLM2_135M, work), env.console)
    unpatched = options.baseline.absolute() / "libllama.so" if options.baseline else None
    speeds = attention.measure_types(bench, depths[-1] + attention.BEYOND, depths, rounds, unpatched)
    name = options.model.name if options.model else models.SMOLLM2_135M.name
    return attention.AttentionResult(name, attention.attention_bars(speeds), "", cores(), rounds, speeds)


def _measure(env: Env, options: Options, program: Path, work: Path) -> Report:
    """Measure memory and speed at those depths that fit into the context."""
    n_ctx, speed_ctx, given = options.n_ctx, min(options.n_ctx, SPEED_CONTEXT), options.model
    depths = [d for d in (QUICK_DEPTHS if options.quick else DEPTHS) if d <= n_ctx]
    speed_depths = [d for d in SPEED_DEPTHS if d + ROOM <= speed_ctx]
    repeats, rounds = (1, options.rounds or 4) if options.quick else (3, options.rounds or 12)
    kv_bench = runs.KvBench(program, given or models.cache_model(models.QWEN35_27B, work), env.console)
    found, skipped = kv_bench.memory(n_ctx, depths, repeats)
    unpatched = options.baseline.absolute() / "libllama.so" if options.baseline else None
    whole = replace(kv_bench, model=given or models.cache_model(models.SMOLLM2_135M, work))
    speeds = whole.speeds(speed_ctx, speed_depths, rounds, unpatched)
    name = given.name if given else f"{models.QWEN35_27B.name} for memory, {models.SMOLLM2_135M.name} for speed"
    held = (*runs.memory_bars(found), *speed.speed_bars(speeds))
    return runs.Benched(name, held, f"static, {skipped}" if skipped else "", n_ctx, repeats, rounds, found, speeds)


def run_benchmark(env: Env, options: Options) -> Report:
    """Build the programs, measure, and write the report."""
    started = time.monotonic()
    _check(options)
    env.project.require_llama_cpp("bench")
    name = "llama-server" if options.serve else quality.PROGRAM if options.quality else cmake.BENCH_TARGET
    targets = (name, *_TOYS) if options.types else (name,)
    bin_dir = options.bin_dir or build.build_project(env, build.Options(targets=targets)).bin_dir
    program = process.require_program(bin_dir.absolute(), name, MeasureError, f"kvtool build --target {name}")
    applied = read_applied(env.project.tree)
    work = models.workplace(env.project, "bench", applied=applied is not None)
    kinds = (
        (_serve, options.serve),
        (_types, options.types),
        (_quality, options.quality),
        (_attention, options.attention),
    )
    with try_lock_dir(work, MeasureError, "bench is running"):
        measure = next((do for do, wanted in kinds if wanted), _measure)
        found = measure(env, options, program, work)
    tag, took = applied.tag if applied else "", time.monotonic() - started
    result = replace(found, tag=tag, strict=options.strict, seconds=took)
    try:
        if options.out:
            result.write(options.out)
    except DiskError as err:  # report the measurements even if they cannot be written
        return replace(result, error=err)
    return result


def command(
    ctx: Context,
    quick: Annotated[bool, Option("--quick", help="Measure only up to 8192 cells, with fewer repetitions.")] = False,
    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            metavar="FILE",
            help="Measure this model instead of random weights: a GGUF file, or smollm2.",
        ),
    ] = "",
    rounds: Annotated[
        int,
        Option(
            "--rounds",
            metavar="N",
            help="How often speed is measured, with new contexts each time. 0 means 12, or 4 with --quick; "
            "with --attention 0 means 4, or 2 with --quick.",
        ),
    ] = 0,
    n_ctx: Annotated[int, Option("--ctx", "-c", metavar="N", help="Size of the context in cells.")] = CONTEXT,
    baseline: Annotated[
        Path | None,
        Option("--baseline", metavar="DIR", help="Also compare with the libraries of this unpatched build (Linux)."),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Also write bench.md, bench.json and plots.")
    ] = None,
    serve: Annotated[
        bool, Option("--serve", help="Measure how much chats with llama-server save if they share a prompt.")
    ] = False,
    chats: Annotated[int, Option("--chats", metavar="N", help="With --serve: number of concurrent chats.")] = 8,
    types: Annotated[
        bool, Option("--types", help="Measure changes of the cells' types, a memory budget, and the lost precision.")
    ] = False,
    quality: Annotated[
        bool,
        Option("--quality", help="Measure how much worse a trained model predicts real text with smaller cell types."),
    ] = False,
    attention: Annotated[
        bool,
        Option("--attention", help="Measure the speed of prompts and tokens with smaller cell types, on all cores."),
    ] = False,
    strict: Annotated[bool, Option("--strict", help="Exit with 8 if a figure misses the project's target.")] = False,
    bin_dir: BinDir = None,
) -> Report:
    """Measure the costs and savings of the dynamic cache.

    Builds the programs that it needs, and makes models with random weights. The report compares each figure with the
    project's target for it.

    Memory is measured with a cache of the size that Qwen3.5-27B needs. A static cache, a dynamic cache that grows by
    copy and a dynamic cache that grows in place each run in a process of their own.

    Speed is measured with the dimensions of SmolLM2-135M, with and without flash attention. A static and a dynamic
    context are in one process and are called alternately. The ratio has a 95 % confidence interval. With --baseline,
    the patched build with the dynamic cache switched off is also compared with an unpatched build.

        kvtool bench --quick                             # some minutes
        kvtool bench --out bench                         # everything, with plots (by matplotlib)
        kvtool bench --baseline ../llama.cpp/build/bin   # also compare with an unpatched build (Linux)

    With --serve, several chats start with the same system prompt. llama-server serves them with a static cache, with
    a dynamic cache, and with a dynamic cache in which the chats share the cells of the system prompt. The report has
    the memory, the number of computed prompt tokens, the time to the first token, and the errors.

        kvtool bench --serve --out bench --chats 16

    With --types, three things are measured. The first is the time and the memory that a change of the cells' types
    needs, compared with memcpy. The second is the number of tokens that fit into a memory budget, with f16 cells alone
    and with a change to smaller types. The third is the lost precision, on llama.cpp's own small test models.

        kvtool bench --types --quick

    With --quality, llama-perplexity measures the perplexity of real text and the divergence from an f16 cache. It does
    so for cells that have a smaller type from the start, for cells whose type changes within the text, and for a
    context shift. This needs hours, and the probabilities of every token need space on the disk. After an
    interruption, the same command continues.

        kvtool bench --quality --model smollm2 --out bench

    With --attention, the speed of prompts and of generated tokens with q8_0 and q4_0 cells is compared with f16, when
    512 to 8192 tokens are in the cache. With --baseline, each type is also compared with the same type in an unpatched
    build.

        kvtool bench --attention -m smollm2 --baseline ../llama.cpp/build/bin

    Exit codes: 4 the tree does not match patches/ and cpp/, 7 the build failed, 8 a measurement failed, or with
    --strict a figure misses its target.
    """
    options = Options(
        quick=quick,
        model=model_path(env_of(ctx), model) if model else None,
        rounds=rounds,
        n_ctx=n_ctx,
        baseline=baseline,
        out=out,
        serve=serve,
        chats=chats,
        types=types,
        quality=quality,
        attention=attention,
        strict=strict,
        bin_dir=bin_dir,
    )
    return run_benchmark(env_of(ctx), options)

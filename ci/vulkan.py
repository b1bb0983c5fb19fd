#!/usr/bin/env python3
"""Run kv-check on Vulkan's software driver (Mesa's llvmpipe), where a cache grows by copy in device memory.

    ci/vulkan.py BIN [GLOB,...]         on upstream's test models, by default on all of them. BIN has the programs of
                                        kvtool build --vulkan --target kv-check --target test-llama-archs
    ci/vulkan.py BIN --full [GLOB,...]  on one model of each memory class: every check, quantized cells, four streams,
                                        changes of type, and failing allocations

kv-check runs with and without flash attention on each model. Models of different memory classes (kinds of caches) are
first. A run of kv-check needs 20 seconds with Mesa 25, and five times as long with Mesa 22.3. So without --full, only
some checks run: those in which the cache grows during a computation, moved cells are used, or a state is restored. The
first run mostly waits for the driver's shader compiler, which needs minutes for an MLA model. The compiled shaders are
kept in ~/.cache (MESA_SHADER_CACHE_DIR). If the script is interrupted, it continues when it is started again.

The results are written to report/vulkan.xml. Exit codes: 0 nothing differs, 1 something differs, 2 the driver is
missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from kvtool import process
from kvtool.errors import KvtoolError, VerifyError
from kvtool.machine import cores
from kvtool.result import CheckOutcome
from kvtool.verify import checks, models, plan, report, runner
from kvtool.verify.checks import Check, Finding
from kvtool.verify.devices import device
from kvtool.verify.journal import Journal

CHECKS = ("--checks", "prompt,generate,shift,state-self")
VARIANTS = {
    "q8_0": ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "--quick"),
    "streams": ("-fa", "on", "--seqs", "4", "--quick"),
    "streams/fa-off": ("-fa", "off", "--seqs", "4", "--quick"),
    "retype": ("-fa", "on", "--quick", *plan.RETYPE),
    "no-memory": ("-fa", "on", "--quick", "--seqs", "3", "--fail", "3+", "--checks", "no-memory"),
    "no-memory/late": ("-fa", "off", "--quick", "--seqs", "3", "--fail", "1+", "--checks", "no-memory"),
    "fa-on": ("-fa", "on"),  # needs many times as long as the other variants
    "fa-off": ("-fa", "off"),
}
# ggml ignores devices that are CPUs unless they are named. f16 is off, as in upstream's own CI. Each lane has one
# thread.
ENVIRONMENT = {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_F16": "1", "LP_NUM_THREADS": "1"}
# Buffers are allocated and freed for each graph. If malloc used mmap() for them, the kernel would need half of the
# time.
ENVIRONMENT |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**10), "MALLOC_TOP_PAD_": str(2**26)}
TIMEOUT = 7200.0  # seconds for each side


def main(bin_dir: Path, globs: str, *, full: bool) -> int:
    os.environ.update(ENVIRONMENT)
    program, work = bin_dir / "kv-check", bin_dir.parent / "verify"
    if preload := waits_for_fences(work):
        os.environ["LD_PRELOAD"] = str(preload)
    with contextlib.ExitStack() as ends:
        try:
            on = ends.enter_context(device("vulkan", bin_dir, work, cores()))
        except VerifyError as err:
            print(f"error: {err.what}; Debian and Ubuntu have a driver in mesa-vulkan-drivers", file=sys.stderr)
            return 2
        toys = checks.toys_like(models.toys(bin_dir / "test-llama-archs", work), globs)
        if not toys:
            sys.exit(f"error: no toy model is called {globs}")
        first = checks.named_toys(toys, checks.CLASS_TOYS)
        if full:
            parts = [planned(variant(name, first), on.label) for name in VARIANTS]
        else:
            parts = [planned(quick(part), on.label) for part in (first, [toy for toy in toys if toy not in first])]
        every = [check for part in parts for check in part]
        if not every:
            sys.exit(f"error: no toy of a memory class is called {globs}")
        journal = Journal(work, models.fingerprint(models.programs(program), *map(str, every)))
        known = journal.known

        def told(check: Check, found: Finding) -> None:
            journal.add(check, found)
            grown = "grown" if found.grown else "not grown"
            said = f"{found.status}, {grown}, {found.seconds:.0f} s {found.reason}"
            print(f"{found.outcome:8} {found.id} {said}", flush=True)

        # the least important runs are at the end, in case the time is not enough: models without a class, and slow
        # variants
        for part in parts:
            left = [check for check in part if check.id not in known]
            known |= {found.id: found for found in runner.kv_checks(left, program, on.lanes, on_finding=told)}
    findings = [known[check.id] for check in every]
    Path("report").mkdir(exist_ok=True)
    Path("report/vulkan.xml").write_text(report.as_junit(findings), "utf-8")
    journal.forget()
    print(f"{len(findings)} runs:", dict(Counter(found.status for found in findings)))
    return int(any(found.outcome is CheckOutcome.FAILED for found in findings))


def waits_for_fences(work: Path) -> Path | None:
    """Build vulkan_wait.so in `work`, and return its path. Return None if that fails: the library only saves time."""
    made = work / "vulkan_wait.so"
    work.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("vulkan_wait.c")
    try:
        process.capture(["cc", "-shared", "-fPIC", "-O1", source, "-o", made, "-lvulkan", "-ldl"], timeout=60)
    except KvtoolError:
        return None
    return made


def quick(toys: list[Path]) -> list[Check]:
    return [replace(check, args=(*check.args, *CHECKS)) for check in checks.toy_checks(toys, ("--quick",))]


def variant(name: str, toys: list[Path]) -> list[Check]:
    kind: checks.Kind = "retype" if name == "retype" else "kv-check"
    return [Check(f"kv-check/{toy.stem}/{name}", kind, toy, args=VARIANTS[name]) for toy in toys]


def planned(each: list[Check], label: str) -> list[Check]:
    return [replace(check, timeout=TIMEOUT) for check in plan.on_device(label, (), each)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=Path)
    parser.add_argument("globs", nargs="?", default="")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_intermixed_args()  # allow --full before the globs, too
    sys.exit(main(args.bin, args.globs, full=args.full))

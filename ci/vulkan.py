#!/usr/bin/env python3
"""kv-check on Vulkan's software driver (Mesa's llvmpipe), where a growth is by copy in device memory.

    ci/vulkan.py BIN [GLOB,...]      over upstream's toy models, default: all of them; BIN: the programs of
                                     kvtool build --vulkan --target kv-check --target test-llama-archs

With and without flash attention; the memory classes first. A run takes minutes, so only the checks that grow while
commands are in flight, go over cells that moved, and restore. An interrupted one goes on where it was. Findings go to
report/vulkan.xml. Exit code: 0 nothing differs, 1 something does, 2 there is no such driver here.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kvtool.machine import cores
from kvtool.result import CheckOutcome
from kvtool.verify import junit, models, runner
from kvtool.verify.checks import CLASS_TOYS, Check, Finding
from kvtool.verify.devices import Lane
from kvtool.verify.journal import Journal

DEVICE = "Vulkan0"
CHECKS = ("--quick", "--checks", "prompt,generate,shift,state-self")
# ggml leaves CPUs out unless they are named; without f16, as upstream's own CI; llvmpipe's threads are one of each lane
ENVIRONMENT = {"GGML_VK_VISIBLE_DEVICES": "0", "GGML_VK_DISABLE_F16": "1", "LP_NUM_THREADS": "1"}
TIMEOUT = 7200.0  # seconds a side


def main(bin_dir: Path, globs: str = "*") -> int:
    os.environ.update(ENVIRONMENT)
    program = bin_dir / "kv-check"
    if f"{DEVICE}:" not in subprocess.check_output([program, "--list-devices"], text=True):
        print(f"error: no {DEVICE} here; Debian and Ubuntu have it in mesa-vulkan-drivers", file=sys.stderr)
        return 2
    work = bin_dir.parent / "verify"
    every = {toy.stem: toy for toy in models.toys(bin_dir / "test-llama-archs", work)}
    names = [name for name in every if any(fnmatch.fnmatch(name, glob) for glob in globs.split(","))]
    first = [name for name in CLASS_TOYS if name in names]
    checks = [
        Check(
            f"kv-check/{name}/fa-{fa}/vulkan",
            "kv-check",
            every[name],
            args=("-fa", fa, "-ngl", "99", *CHECKS),
            timeout=TIMEOUT,
        )
        for name in (*first, *sorted(set(names) - set(first)))
        for fa in ("on", "off")
    ]
    journal = Journal(work, models.fingerprint(models.programs(program), "vulkan"))
    known = journal.known(checks)

    def told(check: Check, found: Finding) -> None:
        journal.add(check, found)
        grown = "grown" if found.grown else "not grown"
        print(f"{found.outcome:8} {found.id} {found.status}, {grown}, {found.seconds:.0f} s {found.reason}", flush=True)

    # one after the other in each lane and in this order, classes first: what is left when time is over is the least
    lanes = (Lane(("--device", DEVICE)),) * cores()
    for part in ("classes", "others"):
        here = [c for c in checks if c.id not in known and (c.id.split("/")[1] in first) == (part == "classes")]
        known |= {found.id: found for found in runner.kv_checks(here, program, lanes, on_finding=told)}
    findings = [known[check.id] for check in checks]
    junit.write(Path("report/vulkan.xml"), findings)
    print(f"{len(findings)} runs:", dict(Counter(found.status for found in findings)))
    return int(any(found.outcome is CheckOutcome.FAILED for found in findings))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

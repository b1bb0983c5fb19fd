#!/usr/bin/env python3
"""kv-check on an upstream whose own tests cannot write toys: with those of another tree, and a tokenizer that it knows.

    ci/older_toys.py BIN VOCABULARY TOYS    BIN: programs of the older upstream's tree; VOCABULARY: a file of that tree;
                                            TOYS: a folder of toys that a newer upstream wrote

One toy of each memory class, with flash attention and without. One that this upstream cannot load, or has no kernel
for, says nothing. Exit code: 0 nothing differs and some cache grew, 1 otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvtool.machine import cores
from kvtool.result import CheckOutcome
from kvtool.verify import checks, models, runner
from kvtool.verify.devices import IN_MEMORY


def main(bin_dir: Path, vocabulary: Path, toys: Path) -> int:
    newer = checks.named_toys(sorted(toys.glob("*.gguf")), checks.CLASS_TOYS)
    with tempfile.TemporaryDirectory(prefix="kvtool-toys-") as work:
        spoken = [models.text_model(toy, vocabulary, Path(work)) for toy in newer]
        planned = checks.toy_checks(spoken, ("--quick",))
        findings = runner.kv_checks(planned, bin_dir / "kv-check", (IN_MEMORY,) * cores())
    for found in findings:
        print(found.id, found.status, *(["grown"] if found.grown else []), found.reason)
    loaded = [found for found in findings if found.status != "load-fails"]
    wrong = [found for found in loaded if found.outcome is CheckOutcome.FAILED]
    return int(bool(wrong) or not any(found.grown for found in loaded))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*map(Path, sys.argv[1:])))

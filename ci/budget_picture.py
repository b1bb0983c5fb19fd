"""Draw docs/results/bench/budget.svg: a conversation within a memory budget that changes its cell type twice.

Usage: python ci/budget_picture.py [BIN_DIR MODEL]

BIN_DIR has this project's kv-bench. MODEL is a model with random weights and a cache as large as Qwen3.5-27B's, which
`kvtool verify` makes. With both arguments, the script measures again and writes budget.json, which takes some minutes.
Without arguments, it draws the recorded budget.json.
It needs kvtool[bench].
"""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

from pictures import record_and_draw

from kvtool.bench import plots

MIB = 2**20
BUDGET, STEP, CELLS = 512, 512, 32768
TYPES = {"f16": plots.BLUE, "q8_0": plots.ORANGE, "q4_0": plots.GREEN}


def measure(kv_bench: Path, model: Path) -> list[dict[str, Any]]:
    """Let a conversation grow until the budget is used up. Return depth, cell type and allocated bytes at each step."""
    depths = ",".join(str(n) for n in range(STEP, CELLS + 1, STEP))
    argv = [kv_bench, "-m", model, "-c", str(CELLS), "--kv-dynamic", "on", "-t", "1", "-d", depths]
    argv += ["--budget", str(BUDGET), "--auto-quant", ",".join(TYPES)]
    done = subprocess.run([str(arg) for arg in argv], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return [
        {"depth": point["depth"], "type": point["type"], "committed": point["usage"]["committed"]}
        for point in points
        if point["name"] in ("created", "depth", "full")
    ]


def draw(points: list[dict[str, Any]]) -> bytes:
    """Return a plot of the points as SVG."""
    with plots.picture("budget") as (files, (axis,)):
        axis.plot([0, CELLS], [BUDGET] * 2, color=plots.GREY, linestyle="--", label=f"budget\n{BUDGET} MiB")
        for before, after in itertools.pairwise(points):
            ends = (
                [point["depth"] for point in (before, after)],
                [point["committed"] / MIB for point in (before, after)],
            )
            changed = before["type"] != after["type"]
            axis.plot(*ends, color=plots.GREY if changed else TYPES[after["type"]], linewidth=1 if changed else 2)
        for kind, colour in TYPES.items():
            last = [point for point in points if point["type"] == kind][-1]
            text = f"{kind}, up to\n{last['depth']:,} tokens"
            at = {"textcoords": "offset points", "ha": "right", "va": "top", "color": colour}
            axis.annotate(text, (last["depth"], 0), (-4, 40), **at)
            axis.plot([last["depth"]] * 2, [0, last["committed"] / MIB], color=colour, linewidth=1, linestyle=":")
        axis.set(title=f"One conversation within {BUDGET} MiB", xlabel="tokens in the conversation")
        axis.set(ylabel="memory of the cells, MiB", xlim=(0, CELLS), ylim=(0, BUDGET * 1.1))
        plots.mark_tokens(axis, CELLS)
    return files["budget.svg"]


def record(bin_dir: Path, model: Path) -> str:
    """Measure, and return the text of budget.json: a line for each point."""
    lines = ",\n".join(f" {json.dumps(point)}" for point in measure(bin_dir / "kv-bench", model))
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    record_and_draw("budget", __doc__, record, draw)

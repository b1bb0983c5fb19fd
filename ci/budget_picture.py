"""Draw docs/results/bench/budget.png, a conversation that changes its type twice.

Usage: python ci/budget_picture.py BIN_DIR MODEL

BIN_DIR has a kv-bench of ours; MODEL has the cache of Qwen3.5-27B, as `kvtool verify` makes it. Needs kvtool[bench].
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "bench" / "budget.png"
MIB = 2**20
BUDGET, STEP, CELLS = 512, 512, 32768
TYPES = ("f16", "q8_0", "q4_0")


def measured(kv_bench: Path, model: Path) -> list[dict[str, Any]]:
    depths = ",".join(str(n) for n in range(STEP, CELLS + 1, STEP))
    argv = [kv_bench, "-m", model, "-c", str(CELLS), "--kv-dynamic", "on", "-t", "1", "-d", depths]
    argv += ["--budget", str(BUDGET), "--auto-quant", ",".join(TYPES)]
    done = subprocess.run([str(arg) for arg in argv], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return [point for point in points if point["name"] in ("created", "depth", "full")]


def draw(points: list[dict[str, Any]]) -> None:
    fig, ax = plt.subplots(figsize=(8, 4))
    depth = [point["depth"] for point in points]
    used = [point["usage"]["committed"] / MIB for point in points]
    ax.plot(depth, used, color="black", linewidth=1)
    for kind in TYPES:
        of_kind = [(d, u) for d, u, point in zip(depth, used, points, strict=True) if point["type"] == kind]
        ax.plot([d for d, _ in of_kind], [u for _, u in of_kind], ".", label=kind)
    ax.axhline(BUDGET, linestyle="--", color="grey", label=f"budget, {BUDGET} MiB")
    ax.set_xlabel("tokens in the conversation")
    ax.set_ylabel("committed, MiB")
    ax.set_ylim(0)
    ax.legend(loc="lower right")
    fig.tight_layout()
    fig.savefig(OUT, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    points = measured(args.bin_dir / "kv-bench", args.model)
    draw(points)
    for point in points:
        print(point["depth"], point["type"], point["name"], point["usage"]["committed"] // MIB)


if __name__ == "__main__":
    main()

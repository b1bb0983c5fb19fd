"""Share the command line of the scripts that record a measurement in docs/results/bench and draw it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "bench"


def record_and_draw(
    name: str, usage: str | None, measure: Callable[[Path, Path], str], draw: Callable[[Any], bytes]
) -> None:
    """Draw NAME.svg from NAME.json. If the command line names BIN_DIR and MODEL, measure and write NAME.json first.

    usage: the text of --help
    measure: is called with BIN_DIR and MODEL, and returns the text of NAME.json
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path, nargs="?")
    parser.add_argument("model", type=Path, nargs="?")
    args = parser.parse_args()
    data = OUT / f"{name}.json"
    if args.bin_dir and args.model:
        data.write_text(measure(args.bin_dir, args.model), "utf-8", newline="\n")
    (OUT / f"{name}.svg").write_bytes(draw(json.loads(data.read_text("utf-8"))))

"""Draw docs/results/top.svg: the output of `kvtool top` for a busy server.

Usage: python ci/top_picture.py BIN_DIR VOCABULARY

BIN_DIR has this project's llama-server. VOCABULARY is a vocabulary file of upstream's tree. The model has random
weights and a cache as large as Qwen3.5-27B's. The script needs a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import tempfile
import threading
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from kvtool.console import drawn
from kvtool.errors import VerifyError
from kvtool.top.draw import draw
from kvtool.top.reading import DEFAULT_URL, Slot
from kvtool.top.server import Server
from kvtool.top.view import View
from kvtool.verify import models
from kvtool.verify.server import LlamaServer, Request, llama_server
from kvtool.verify.texts import FLAG, prompt

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "top.svg"
WIDTH, LINES = 100, 20
URL = DEFAULT_URL  # printed in the picture, although the server uses another port
WORDS = (200, 700, 1500)  # words of the prompts in the slots 0 to 2; slot 3 is erased


def chat(server: LlamaServer, slot: int) -> None:
    """Generate tokens in one slot until the server ends."""
    with contextlib.suppress(VerifyError):
        server.complete(Request(prompt(slot, WORDS[slot]), 4000, slot))


def watch(running: LlamaServer) -> View:
    """Return the view after one slot was erased, while the other slots generate tokens."""
    view = View(URL)
    with Server(running.url) as server:

        def look() -> tuple[Slot, ...]:
            nonlocal view
            reading = server.read()
            view = view.with_reading(reading, time.monotonic())
            return reading.slots or ()

        look()
        running.slot("erase", 3)
        look()
        for slot in range(len(WORDS)):
            threading.Thread(target=chat, args=(running, slot), daemon=True).start()
        while not all(slot.generated > 40 for slot in look()[: len(WORDS)]):
            time.sleep(1)
    return view


def picture(view: View) -> str:
    """Return the view as SVG. The fonts that rich would let the browser download are removed."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(drawn(draw(view, WIDTH, LINES)))
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="kvtool top", code_format=form, unique_id="top")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("vocabulary", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = models.text_model(models.cache_model(models.QWEN35_27B, work), options.vocabulary, work)
        args = [
            "-c",
            "131072",
            "-np",
            "4",
            "--alias",
            "random weights, cache of Qwen3.5-27B",
            "--slot-save-path",
            name,
            FLAG,
        ]
        with llama_server(options.bin_dir.absolute() / "llama-server", model, args, work / "log") as server:
            server.complete(Request(prompt(9, 1000), 8, 3))
            OUT.write_text(picture(watch(server)), "utf-8", newline="\n")
    print(OUT)


if __name__ == "__main__":
    main()

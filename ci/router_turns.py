"""Chat with two trained models of a router in turns, and check that no conversation is computed twice.

Usage: python ci/router_turns.py BIN_DIR MODEL MODEL

BIN_DIR has a llama-server with the patches. The models are trained models, such as the files of
`kvtool fetch --model smollm2` and `kvtool fetch --model gemma3`. The router keeps one model loaded (--models-max 1), so
it unloads a model before each request. Its servers store their conversations on disk (--cache-disk).

The script prints a line for each request. It fails if a model computes more than one ubatch of tokens that it had
computed before it was unloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from disk_stress import WARNING
from turns import take_turn

from kvtool import process
from kvtool.verify.server import START_SECONDS, LlamaServer, free_port
from kvtool.verify.texts import prompt

TURNS, FIRST_WORDS, WORDS, PREDICT = 4, 700, 60, 16
UBATCH = 64  # tokens; small, so that a lost checkpoint is noticed
ARGS = (
    *("--models-max", "1", "-c", "4096", "-np", "1", "-ub", str(UBATCH), "-t", "1", "--fit", "off", "--no-warmup"),
    *("--kv-dynamic", "--cache-ram", "512"),
)


def chat(server: LlamaServer, names: list[str]) -> int:
    """Send each model its next message in turns. Return the largest number of tokens that were computed twice."""
    worst = 0
    chats: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(TURNS):
        for index, (name, tokens) in enumerate(chats.items()):
            begin = time.monotonic()
            text = f" {prompt(100 * turn + index, FIRST_WORDS if turn == 0 else WORDS)}"
            said = take_turn(server, tokens, text, PREDICT, model=name)
            twice = said.known - said.cached
            worst = max(worst, twice)
            numbers = {"turn": turn, "prompt": said.prompt, "cached": said.cached, "twice": twice}
            print(json.dumps({"model": name, **numbers, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
    return worst


def main() -> int:
    """Run the router in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("models", type=Path, nargs=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-router-") as name:
        work = Path(name)
        (work / "models").mkdir()
        for model in given.models:
            (work / "models" / model.name).symlink_to(model.absolute())
        where = ("--models-dir", work / "models", "--cache-disk", work / "disk", "--port", str(port := free_port()))
        argv = [given.bin_dir / "llama-server", "--host", "127.0.0.1", *where, *ARGS]
        with process.spawn(argv, stdout=work / "log") as running, LlamaServer(running, port, work / "log") as server:
            server.wait_ready(START_SECONDS)
            server.http.headers["Connection"] = "close"  # a router closes the connection after a forwarded answer
            worst = chat(server, [model.stem for model in given.models])
            if WARNING in server.log:
                print("a server ignored a file")
                return 1
    if worst > UBATCH:
        print(f"{worst} tokens were computed twice, more than the ubatch of {UBATCH}")
    return int(worst > UBATCH)


if __name__ == "__main__":
    raise SystemExit(main())

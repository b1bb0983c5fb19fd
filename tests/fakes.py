"""Imitate the programs that verify runs, with small Python scripts.

The name of the model's file selects what the scripts do.
"""

from __future__ import annotations

import sys
from pathlib import Path

KV_CHECK = """
import json, os, sys, time
args = sys.argv[1:]
if "--list-devices" in args:
    print(os.environ.get("FAKE_DEVICES", "CPU: a processor"))
    sys.exit(0)
model = args[args.index("-m") + 1]
name = os.path.basename(model).removesuffix(".gguf").split("@")[0]
if "--memory" in args:
    dynamic = args[args.index("--kv-dynamic") + 1] == "on"
    if name == "mute":
        print("Segmentation fault", file=sys.stderr)
        sys.exit(139)
    if name == "slow":
        time.sleep(60)
    added = {"fat": 9 << 30, "unknown": 0}.get(name, 20 << 20) if dynamic else 8590 << 20
    status = "context-fails" if name == "no-context" and not dynamic else "ok"
    before = -1 if name == "unknown" else 1
    print(json.dumps({"rss_context": added, "rss_before": before, "status": status, "reason": "out of memory"}))
    sys.stdout.flush()
    if name == "dies-late":
        os.abort()
    sys.exit(0 if status == "ok" else 2)
print("llama_kv_cache: size =    1.00 MiB", file=sys.stderr)
if name.startswith("iswa"):
    print("llama_kv_cache_iswa: creating non-SWA KV cache", file=sys.stderr)
if "retype-quality" in args:
    worse = 2.0 if name == "worse" else 1.0
    lost = {"f16:q8_0 kl changed": 1.5e-8 * worse, "f16:q8_0 kl from the start": 1.5e-8, "f16:q8_0 kl": worse}
    lost |= {"q8_0:f16 kl changed": 1e-12, "q8_0:f16 kl from the start": 1.5e-8}
    status = "differs" if name == "worse" else "same"
    check = {"name": "retype-quality", "status": status, "reason": "twice", "measured": lost}
    print(json.dumps({"status": status, "grown": True, "checks": [check]}))
    sys.exit(int(name == "worse"))
ok = {"name": "prompt", "status": "same", "decodes": 3, "values": 300, "first_diff": None, "reason": ""}
bad = dict(ok, status="differs", first_diff={"decode": 2, "row": 1, "index": 7, "static": 0.5, "dynamic": 0.25})
says = {
    "differs": ("differs", 1, [ok, dict(bad, name="shift")]),
    "dynamic-fails": ("dynamic-fails", 1, [dict(ok, status="dynamic-fails", reason="SIGSEGV")]),
    "static-fails": ("static-fails", 0, [dict(ok, status="static-fails", reason="SIGABRT")]),
    "no-cache": ("no-cache", 0, []),
    "load-fails": ("load-fails", 2, []),
    "not-grown": ("same-not-grown", 0, [ok]),
    "contradicts": ("same", 1, [ok]),
    "contradicts-too": ("differs", 0, [bad]),
    "not-run": ("not-run", 1, [dict(ok, status="not-run", reason="timeout")]),
    "skipped": ("skipped", 0, [dict(ok, status="skipped", reason="one stream")]),
    "unheard": ("splendid", 0, []),
}
if name == "once":
    marker = model + ".seen"
    if os.path.exists(marker):
        sys.exit(3)
    open(marker, "w").close()
if name in ("timeout", "forever"):
    time.sleep(60 if name == "timeout" else 3600)
if name == "crash":
    os.abort()
if name == "exit-3":
    sys.exit(3)
if name == "garbage":
    print("}{ not json")
    sys.exit(0)
if name == "silent":
    sys.exit(0)
status, code, checks = says.get(name, ("same", 0, [ok]))
why = "" if status == "same" else "why " + status
print("a line before the answer")
print(json.dumps({"model": model, "arch": "fake", "status": status, "reason": why, "checks": checks,
                  "grown": status == "same", "growths": [[256, 512]], "cells_start": 256, "cells_end": 512}))
sys.exit(code)
"""

COMPLETION = """
import os, sys, time
args = sys.argv[1:]
name = os.path.basename(args[args.index("-m") + 1]).removesuffix(".gguf").split("@")[0]
dynamic = "--kv-dynamic" in args or os.environ.get("LLAMA_ARG_KV_DYNAMIC") == "1" and name != "no-variable"
if name == "timeout":
    time.sleep(60)
if name == "static-fails" or (name == "dynamic-fails" and dynamic):
    print("GGML_ASSERT", file=sys.stderr)
    sys.exit(134)
if (dynamic and name != "not-grown") or name == "always-grows":
    print("llama_kv_cache: resizing KV cache from 256 to 512 cells", file=sys.stderr)
text = "" if name == "empty" else "once upon a time" + ("?" if dynamic and name == "differs" else "!")
runs = args[args.index("-f") + 1] + ".runs"
with open(runs, "a") as file:
    file.write("x")
if name == "never-ends" or name == "hasty" and os.path.getsize(runs) % 3:
    sys.stdout.write(text[:-1])
    sys.exit(0)
sys.stdout.write(text)
print("common_perf_print:       total time =    1181.10 ms /   585 tokens", file=sys.stderr)
"""

BENCH = """
import json, os, sys, time
args = sys.argv[1:]
name = os.path.basename(args[args.index("-m") + 1]).removesuffix(".gguf").split("@")[0]
dynamic = args[args.index("--kv-dynamic") + 1] == "1"
if name == "timeout":
    time.sleep(60)
if name == "static-fails" or (name == "dynamic-fails" and dynamic):
    sys.exit(1)
if dynamic and name != "not-grown":
    print("llama_kv_cache: resizing KV cache from 256 to 512 cells", file=sys.stderr)
print("unknown test" if name == "garbage" else json.dumps([{"avg_ts": 100.0}]))
"""

SERVER = """
import hashlib, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
args = sys.argv[1:]
if "--help" in args:
    sys.exit()
name = os.path.basename(args[args.index("-m") + 1]).removesuffix(".gguf").split("@")[0]
home = os.path.dirname(args[args.index("-m") + 1])
dynamic = "--kv-dynamic" in args
def starts():
    with open(os.path.join(home, name + ".starts"), "a+") as file:
        file.write("x")
        file.flush()
        return os.path.getsize(file.name)
start = starts()
if name == "dies" or (name == "dynamic-dies" and dynamic) or (name == "static-2-dies" and start == 3):
    print("error: no such model")
    sys.exit(1)
if name == "port-taken" and start < 3:
    print("couldn't bind to 127.0.0.1")
    sys.exit(1)
if name == "never-ready":
    time.sleep(60)
if (dynamic and name != "not-grown") or name == "always-grows":
    print("llama_kv_cache: resizing KV cache from 256 to 512 cells", flush=True)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def reply(self, data, code=200):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply({"status": "ok"})
    def do_POST(self):
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/slots"):
            if name == "slots-500":
                return self.reply({"error": "no such slot"}, 500)
            return self.reply({"n_saved": 7, "n_restored": 7} if name != "slot-lost" or not dynamic else
                              {"n_saved": 7, "n_restored": 0})
        if name == "http-500":
            return self.reply({"error": "context size exceeded"}, 500)
        if name == "nonsense":
            return self.reply(b"<html>")
        if name == "no-tokens":
            return self.reply({"content": "x"})
        seed = ask["prompt"]
        noise = {"flips": start % 2, "drifts": start, "rare": start == 2}.get(name, 0)
        if name == "differs" and dynamic and ask["id_slot"] == 2:
            noise = 1
        if name == "other-file" and start == 3 and seed.endswith("they went") and ask["id_slot"] == 3:
            noise = 1
        digest = hashlib.sha256((seed + "/" + str(noise)).encode()).hexdigest()
        self.reply({"content": digest, "tokens": [int(c, 16) for c in digest], "tokens_evaluated": len(seed.split()),
                    "truncated": False, "timings": {"cache_n": 0 if name == "reuse-lost" and dynamic else 1}})
port = int(args[args.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

GENERATOR = """
import os, sys
args = sys.argv[1:]
out = args[args.index("-o") + 1]
mode = os.environ.get("FAKE_TOYS", "same@a same@b")
if mode == "fails":
    print("GGML_ASSERT(n_layer >= 2) failed")
    sys.exit(134)
for stem in mode.split():
    open(os.path.join(out, stem + ".gguf"), "wb").write(stem.encode())
    print("saved", stem)
with open(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "generated"), "a") as log:
    log.write("once\\n")
"""


RPC_SERVER = """
import os, socket, sys
args = sys.argv[1:]
if os.environ.get("FAKE_RPC") == "dies":
    print("cannot allocate")
    sys.exit(1)
with socket.create_server(("127.0.0.1", int(args[args.index("-p") + 1]))) as server:
    while True:
        with server.accept()[0] as client:
            if client.recv(5) == b"abort":
                os.abort()
"""


KV_BENCH = """
import json, os, sys, time
args = sys.argv[1:]
def arg(name): return args[args.index(name) + 1]
fate = os.environ.get("FAKE_BENCH", "")
if fate == "slow":
    time.sleep(60)
if fate == "garbage":
    print("}{")
    sys.exit(0)
if fate == "crash":
    print("GGML_ASSERT", file=sys.stderr)
    sys.exit(134)
dynamic = arg("--kv-dynamic") == "on"
storage = os.environ.get("LLAMA_KV_DYNAMIC_STORAGE", "static")
n_ctx, cell, mib = int(arg("-c")), 65536, 1 << 20
depths = [int(d) for d in arg("-d").split(",")]
with open(os.environ["FAKE_BENCH_LOG"], "a") as log:
    other = " ".join(["", *arg("--other").split("/")[-2:-1], arg("--seed")]) if "--other" in args else ""
    log.write(storage + (" rounds" if "--rounds" in args else "") + other + "\\n")
doc = {"version": 2, "status": "ok", "reason": ""}
def usage(cells, live, grown, copied):
    return {"reserved": n_ctx * cell, "committed": cells * cell, "used": live * cell, "n_grow": grown, "n_shrink": 0,
            "n_bytes_copied": copied, "t_grow_us": grown * 3000, "t_grow_max_us": 3000 if grown else 0}
def point(name, depth, cells, grown):
    rss = (10 + 8) * mib + cells * cell
    peak = rss + (40 + (1000 if fate == "wasteful" else 0)) * mib * (storage == "copy")
    return {"name": name, "depth": depth, "rss": rss, "peak": peak,
            "usage": usage(cells, depth, grown, cells * cell * (storage == "copy"))}
def size(depth):
    return n_ctx if not dynamic else min(n_ctx, (depth + 255) // 256 * 256)
def memory():
    if "--budget" in args:
        held = int(arg("--budget")) * mib // cell
        points = [point("created", 0, size(1), 0), point("full", held, held, 1)]
        points[1]["type"] = "f16"
        if "--auto-quant" in args:
            points[1].update(type="q4_0", depth=2 * held + (1 if fate == "wasteful" else 0))
        if fate == "wasteful":
            points[1]["usage"]["committed"] += mib
        doc.update(n_layer=16, create_seconds=0.01, rss_before=10 * mib, points=points, growths=[])
        return
    points = [point("created", 0, size(1), 0)]
    points += [point("depth", depth, size(depth), (i + 1) * dynamic) for i, depth in enumerate(depths)]
    if "--retype" in args:
        points[-1].update({} if fate == "typeless" else {"type": "f16"})
        for type in arg("--retype").split(","):
            was, cells = points[-1], depths[-1] // (1 if type == "f16" else 2)
            now = dict(point(type, depths[-1], cells, 1), usage=usage(cells, cells, 1, 0))
            peak = max(was["rss"], now["rss"]) + (24 << 10) * (1 if fate != "wasteful" else 1 << 20)
            now.update(type=type, seconds=0.5, memcpy=0.25 if fate == "wasteful" else 0.4, peak=peak)
            points.append(now)
    points.append(point("after-clear", 1, size(1), len(depths) * dynamic))
    if fate == "no-rss":
        for p in points:
            p["rss"] = p["peak"] = -1
    if fate == "old":
        del points[0]["usage"]["n_shrink"]
    growths = [{"depth": d - 1, "seconds": 0.003, "memcpy": 0.0025, "commit": 0.00285} for d in depths if dynamic]
    doc.update(n_layer=16, create_seconds=0.01 if dynamic else 2.0, rss_before=10 * mib, points=points, growths=growths)
def turns():
    slow = 1.1 if fate == "slow-prompt" else 1.0
    def pair(i, kind, depth, n, base, test, grew=0):
        return {"round": i, "kind": kind, "depth": depth, "n_tokens": n, "base": base, "test": test, "n_grow": grew,
                "n_added": 256 * grew}
    pairs = []
    for i in range(int(arg("--rounds"))):
        pairs.append(pair(i, "create", 0, 0, 1.0, 1.0))
        for depth in depths:
            pairs += [pair(i, "prompt", depth, 64, 0.1, 0.1 * slow), pair(i, "prompt", depth, 64, 0.1, 0.102 * slow, 1)]
            pairs += [pair(i, "generate", depth, 1, 0.010, 0.0098), pair(i, "generate", depth, 1, 0.010, 0.015, 1)]
    doc["pairs"] = pairs
turns() if "--rounds" in args else memory()
if fate == "no-context":
    doc.update(status="fails", reason="the context cannot be created")
print(json.dumps(doc))
sys.exit(139 if fate == "dies-late" else 0 if doc["status"] == "ok" else 2)
"""


def program(path: Path, source: str) -> Path:
    """Write an executable file that runs a Python source."""
    path.write_text(f"#!{sys.executable}\n{source}", "utf-8")
    path.chmod(0o755)
    return path


def programs(directory: Path) -> Path:
    """Make a folder with all of the imitated programs."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in (
        ("kv-check", KV_CHECK),
        ("llama-completion", COMPLETION),
        ("llama-bench", BENCH),
        ("llama-server", SERVER),
        ("test-llama-archs", GENERATOR),
        ("ggml-rpc-server", RPC_SERVER),
    ):
        program(directory / name, source)
    return directory


def model(directory: Path, name: str) -> Path:
    """Make a model file. Its name selects what the imitated programs do."""
    path = directory / f"{name}.gguf"
    path.write_bytes(b"GGUF")
    return path

"""Stand-ins for the programs that verify runs: small Python scripts whose behaviour the model's file name decides."""

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
    sys.exit(0 if status == "ok" else 2)
print("llama_kv_cache: size =    1.00 MiB", file=sys.stderr)
if name.startswith("iswa"):
    print("llama_kv_cache_iswa: creating non-SWA KV cache", file=sys.stderr)
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
    "unheard": ("splendid", 0, []),
}
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
print("a line before the answer")
print(json.dumps({"model": model, "arch": "fake", "status": status, "reason": "why " + status, "checks": checks,
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
sys.stdout.write("" if name == "empty" else "once upon a time" + ("?" if dynamic and name == "differs" else "!"))
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
        server.accept()[0].close()
"""


def program(path: Path, source: str) -> Path:
    """An executable that runs this Python."""
    path.write_text(f"#!{sys.executable}\n{source}", "utf-8")
    path.chmod(0o755)
    return path


def programs(directory: Path) -> Path:
    """A bin directory with all of them."""
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
    """A model file whose name tells the fakes what to do."""
    path = directory / f"{name}.gguf"
    path.write_bytes(b"GGUF")
    return path

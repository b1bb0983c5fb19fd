"""Test kvtool verify --model with imitated programs.

The tests read the report, the JSON, and the errors that must be found before a model is loaded.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from kvtool import cli
from kvtool.verify import own_model
from tests import fakes
from tests.unit.verifying import document

KV_CHECK = """
import json, os, sys
args = sys.argv[1:]
name = os.path.basename(args[args.index("-m") + 1]).removesuffix(".gguf")
with open(os.path.join(os.path.dirname(sys.argv[0]), "runs"), "a") as log:
    log.write(" ".join(args) + "\\n")
if "--memory" in args:
    if name == "unknown":
        print("llama_model_load: error loading model: unknown model architecture: 'lxama'", file=sys.stderr)
        print(json.dumps({"status": "load-fails", "reason": "failed to load model"}))
        sys.exit(2)
    print(json.dumps({"status": "ok", "reserved": 180 << 20}))
    sys.exit(0)
print("llama_kv_cache_iswa: creating" if name == "window" else "llama_kv_cache: size = 1 MiB", file=sys.stderr)
checks = args[args.index("--checks") + 1]
bad = name == "differs" and "retype" in checks
check = {"name": checks, "status": "differs" if bad else "same", "values": 2000000, "reason": "", "first_diff": None}
if bad:
    check["first_diff"] = {"decode": 1, "row": 2, "index": 3, "static": 0.5, "dynamic": 0.25}
print(json.dumps({"status": check["status"], "grown": True, "checks": [check], "arch": "llama"}))
sys.exit(int(bad))
"""

SERVER = """
import hashlib, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
args = sys.argv[1:]
name = os.path.basename(args[args.index("-m") + 1]).removesuffix(".gguf")
dynamic = "--kv-dynamic" in args
with open(os.path.join(os.path.dirname(sys.argv[0]), "runs"), "a") as log:
    log.write("server " + " ".join(args) + "\\n")
if name == "dies" and dynamic:
    print("GGML_ASSERT", flush=True)
    sys.exit(134)
if dynamic and name != "flat":
    print("llama_kv_cache: resizing KV cache from 256 to 512 cells", flush=True)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def reply(self, data, code=200):
        body = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        cache = {"kv_cache": {"target": {"committed_bytes": 6 << 20}}} if dynamic else {}
        self.reply({"status": "ok", **cache})
    def do_POST(self):
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/slots"):
            return self.reply({"n_saved": 7, "n_restored": 7 if name != "lost" or not dynamic else 0})
        if self.path == "/requantize_kvcache":
            if name == "no-types":
                return self.reply({"error": "not a type of KV cells"}, 400)
            return self.reply({"ctk": ask["ctk"], "ctv": ask["ctv"]})
        said = hashlib.sha256(json.dumps(ask["messages"]).encode()).hexdigest()
        if name == "letter" and dynamic and len(ask["messages"]) == 3:
            said = said[:-1] + "!"
        timings = {"prompt_n": 100, "prompt_ms": 1000.0, "predicted_n": 48, "predicted_ms": 2000.0}
        self.reply({"choices": [{"message": {"content": said}}], "timings": timings})
port = int(args[args.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

KV_BENCH = """
import json
pairs = [{"kind": kind, "n_tokens": 64, "n_grow": grow, "base": 1.0, "test": 2.0 + 100 * grow}
         for kind in ("prompt", "generate") for grow in (0, 1)]
print(json.dumps({"status": "ok", "pairs": pairs}))
"""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, *, context: int = 8192, arch: str = "llama", cut: int = 0) -> Path:
    """Write a GGUF file with one tensor of 64 bytes."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 4)
    data += text("general.architecture") + struct.pack("<I", 8) + text(arch)
    data += text(f"{arch}.context_length") + struct.pack("<II", 4, context)
    data += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("two")
    data += text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<2f", 1, 2)
    data += text("token_embd.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    data += bytes(-len(data) % 32 + 64)
    path.write_bytes(data[: len(data) - cut])
    return path


@pytest.fixture
def bin_dir(here: Path) -> Path:
    made = fakes.programs(here / "bin")
    for name, source in (("kv-check", KV_CHECK), ("llama-server", SERVER), ("kv-bench", KV_BENCH)):
        fakes.program(made / name, source)
    return made


def run(bin_dir: Path, model: Path, *args: str) -> int:
    return cli.run(["verify", "--bin", str(bin_dir), "--model", str(model), *args])


def programs_run(bin_dir: Path) -> list[str]:
    return (bin_dir / "runs").read_text().splitlines() if (bin_dir / "runs").exists() else []


def findings(data: dict[str, Any]) -> dict[str, str]:
    return {found["details"]["title"]: found["status"] for found in data["models"][0]["findings"]}


def test_report_fits_one_screen(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bin_dir, gguf(tmp_path / "same.gguf")) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert len(lines) <= 24, captured.out
    assert "same.gguf: llama, memory class plain, -c 8192" in captured.out
    assert "dynamic equals static: 9 checks passed" in captured.out
    assert own_model.LIMITS["plain"] in captured.out
    rows = [line.split() for line in lines]
    assert ["KV", "cache", "after", "the", "start", "MiB", "180", "6.0"] in rows
    assert ["prompt,", "1", "thread", "tokens/s", "64.0", "32.0"] in rows, "calls with a growth are left out"
    assert "needs 0.68 GiB" in captured.err and "one after the other" in captured.err


def test_json_has_every_check(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bin_dir, gguf(tmp_path / "window.gguf"), "--json") == 0
    data = document(capsys)
    (model,) = data["models"]
    assert (model["arch"], model["memory_class"], model["context"]) == ("llama", "iSWA", 8192)
    assert list(findings(data).values()) == ["same"] * 9
    assert {pair["name"] for pair in model["memory"]} >= {"KV cache after the chat", "server's memory after the start"}


def test_one_program_runs_at_a_time(bin_dir: Path, tmp_path: Path) -> None:
    run(bin_dir, gguf(tmp_path / "same.gguf"), "-c", "2048")
    servers = [line for line in programs_run(bin_dir) if line.startswith("server")]
    assert len(servers) == 2 and "--kv-dynamic" not in servers[0] and "--kv-dynamic" in servers[1]
    assert all("-c 2048" in line for line in programs_run(bin_dir))


@pytest.mark.parametrize(
    ("name", "title", "status"),
    [
        ("differs", "f16 to q8_0 and back", "differs"),
        ("letter", "chat through llama-server", "differs"),
        ("lost", "slot saved and restored", "differs"),
        ("flat", "chat through llama-server", "not-grown"),
        ("dies", "chat through llama-server", "dynamic-fails"),
    ],
)
def test_difference_exits_8(
    bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, title: str, status: str
) -> None:
    assert run(bin_dir, gguf(tmp_path / f"{name}.gguf"), "--quick", "--json") == 8
    data = document(capsys)
    assert findings(data)[title] == status
    assert data["error"]["exit_code"] == 8


def test_types_refused_by_both_are_equal(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bin_dir, gguf(tmp_path / "no-types.gguf"), "--quick", "--json") == 0


def test_several_models_have_a_report_each(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = gguf(tmp_path / "window.gguf", context=2048)
    assert run(bin_dir, gguf(tmp_path / "same.gguf"), "--model", str(second), "--quick", "--json") == 0
    reports = document(capsys)["models"]
    assert [(model["memory_class"], model["context"]) for model in reports] == [("plain", 8192), ("iSWA", 2048)]


def test_draft_and_projector_reach_the_server(bin_dir: Path, tmp_path: Path) -> None:
    draft, sight = gguf(tmp_path / "draft.gguf"), gguf(tmp_path / "sight.gguf")
    more = ("--draft", str(draft), "--mmproj", str(sight), "-ngl", "7", "--quick")
    assert run(bin_dir, gguf(tmp_path / "same.gguf"), *more) == 0
    server = next(line for line in programs_run(bin_dir) if line.startswith("server"))
    assert f"-md {draft}" in server and f"--mmproj {sight}" in server and "-ngl 7" in server


# --- errors before anything is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cut", "words"),
    [("missing", None, "there is no model"), ("cut", 10, "truncated"), ("header", 150, "truncated")],
)
def test_bad_file_exits_2(
    bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, cut: int | None, words: str
) -> None:
    model = tmp_path / f"{name}.gguf"
    if cut is not None:
        gguf(model, cut=cut)
    assert run(bin_dir, model, "--json") == 2
    assert words in document(capsys)["error"]["what"]
    assert programs_run(bin_dir) == []


def test_other_file_type_exits_2(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "readme.gguf"
    model.write_text("about")
    assert run(bin_dir, model, "--json") == 2
    assert "not a GGUF file" in document(capsys)["error"]["what"]


def test_missing_shard_is_named(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bin_dir, gguf(tmp_path / "big-00001-of-00002.gguf"), "--json") == 2
    assert "big-00002-of-00002.gguf is missing" in document(capsys)["error"]["what"]


def test_unknown_architecture_exits_2(bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bin_dir, gguf(tmp_path / "unknown.gguf", arch="lxama"), "--json") == 2
    assert "architecture 'lxama'" in document(capsys)["error"]["why"]


def test_oversized_model_exits_2(
    bin_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_model, "available_memory", lambda: 1 << 30)
    assert run(bin_dir, gguf(tmp_path / "same.gguf"), "--json") == 2
    assert "does not fit into the memory" in document(capsys)["error"]["what"]
    assert all("--no-alloc" in line for line in programs_run(bin_dir)), "no weights were loaded"


@pytest.mark.parametrize("args", [("--draft", "x.gguf"), ("-c", "4096"), ("-ngl", "3")])
def test_options_of_model_need_model(bin_dir: Path, args: tuple[str, ...]) -> None:
    assert cli.run(["verify", "--bin", str(bin_dir), *args]) == 2


@pytest.mark.parametrize("args", [("--matrix",), ("--models", "q*"), ("--patch", "flag"), ("-c", "100")])
def test_model_refuses_other_choices(bin_dir: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    assert run(bin_dir, gguf(tmp_path / "same.gguf"), *args) == 2


def test_text_is_long_enough(tmp_path: Path) -> None:
    assert 60_000 < own_model.write_text(tmp_path / "text").stat().st_size < 120_000


def test_speed_is_known_if_the_cache_grew_in_every_call() -> None:
    pairs = [{"kind": "prompt", "n_tokens": 64, "n_grow": 1, "base": 2.0, "test": 4.0}]
    assert own_model._speeds(pairs, "prompt", 1) == (32.0, 16.0)
    assert own_model._speeds(pairs, "generate", 1) == (None, None)

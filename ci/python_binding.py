"""Run llama-cpp-python with the libraries of a build, with and without LLAMA_KV_DYNAMIC=1, and compare the texts.

    python ci/python_binding.py llama.cpp/build/cpu-release/bin llama.cpp/include/llama.h MODEL.gguf [WORK]

The script installs llama-cpp-python into WORK/venv, without the library that this package usually builds. It adds one
field of llama.h that this version of the package lacks to the package's structs. Then it compares all fields of the
structs with the header: if a field is missing, ctypes reads and writes each later field at a wrong place.

The exit code is 1 if a struct or a text differs.
"""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
CONTEXT = 8192
OURS = "kv_dynamic"  # the field that the patches add; it replaces upstream's padding, so no other field moves
STRUCTS = ("llama_model_params", "llama_context_params")
# Version 0.3.36 of llama-cpp-python does not have this field of llama.cpp b11549, which follows type_v. Without it,
# each later field, such as embeddings or offload_kqv, would be written 8 bytes too early.
BEFORE = '        ("type_v", ctypes.c_int),\n'
FIELD = '        ("moe_cache_size", ctypes.c_size_t),\n'
INSIDE = """
import json, re, sys
import llama_cpp
model, context, structs = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
def resident():
    found = re.search(r"^VmRSS:\\s+(\\d+)", open("/proc/self/status").read(), re.MULTILINE)
    return int(found[1]) / 1024
llm = llama_cpp.Llama(model, n_ctx=context, n_threads=1, seed=1, verbose=False)
start = resident()
text = "The river runs past the old mill, and the boy counts the boats. " * 24
asked = [text + "Then he", "A short history of bread:", text + "In the evening the miller"]
said = [llm.create_completion(prompt, max_tokens=64, temperature=0)["choices"][0]["text"] for prompt in asked]
fields = {name: [field for field, _ in getattr(llama_cpp, name)._fields_] for name in structs}
print(json.dumps({"texts": said, "start": start, "end": resident(), "fields": fields}))
"""


def header_fields(header: str, struct: str) -> list[str]:
    """Return the names of the fields of a struct, in their order."""
    found = re.search(rf"struct {struct} \{{(.*?)\n    \}};", header, re.DOTALL)
    if found is None:
        sys.exit(f"error: the header has no struct {struct}")
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", found[1], flags=re.DOTALL)
    return [re.findall(r"\w+", re.sub(r"\[[^]]*\]", "", line))[-1] for line in body.split(";") if line.strip()]


def install(work: Path) -> Path:
    """Install llama-cpp-python without its own library in WORK/venv. Return the path of the Python in WORK/venv."""
    python = work / "venv/bin/python"
    if not python.is_file():
        venv.create(work / "venv", with_pip=True)
    argv = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"llama-cpp-python=={VERSION}"]
    subprocess.run(argv, check=True, env={**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"})
    add_field(next((work / "venv").glob("lib/python3*/site-packages/llama_cpp/llama_cpp.py")))
    return python


def add_field(binding: Path) -> None:
    """Add the missing field to the context parameters of llama-cpp-python."""
    text = binding.read_text("utf-8")
    if FIELD not in text:
        binding.write_text(text.replace(BEFORE, BEFORE + FIELD, 1), "utf-8")


def run(python: Path, libraries: Path, model: Path, *, dynamic: bool) -> dict[str, Any]:
    """Load the model with llama-cpp-python. Return the generated texts and the resident memory."""
    env = {name: value for name, value in os.environ.items() if name != "LLAMA_KV_DYNAMIC"}
    env |= {"LLAMA_CPP_LIB_PATH": str(libraries.resolve()), **({"LLAMA_KV_DYNAMIC": "1"} if dynamic else {})}
    argv = [python, "-c", INSIDE, model, str(CONTEXT), *STRUCTS]
    done = subprocess.run(argv, check=True, env=env, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    libraries, header, model = map(Path, sys.argv[1:4])
    python = install(Path(sys.argv[4] if len(sys.argv) > 4 else "report/python-binding"))
    static, dynamic = (run(python, libraries, model, dynamic=on) for on in (False, True))
    text, wrong = header.read_text("utf-8"), 0
    for struct in STRUCTS:
        ours = [name for name in header_fields(text, struct) if name != OURS]
        theirs = [name for name in static["fields"][struct] if name != OURS]
        print(f"{struct}: {'the same fields' if ours == theirs else f'header {ours}, binding {theirs}'}")
        wrong += ours != theirs
    for number, (a, b) in enumerate(zip(static["texts"], dynamic["texts"], strict=True), 1):
        print(f"text {number}: {'equal' if a == b else f'{a!r} became {b!r}'}, {len(a)} characters")
        wrong += a != b or not a.strip()
    print(f"\n| llama-cpp-python {VERSION}, `n_ctx={CONTEXT}` | static | `LLAMA_KV_DYNAMIC=1` |\n|---|---:|---:|")
    for when, name in (("start", "after the start"), ("end", "after three texts")):
        print(f"| resident memory {name} | {static[when]:.0f} MiB | {dynamic[when]:.0f} MiB |")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

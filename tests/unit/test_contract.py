"""Compare the log lines and field names of the patched programs with kvtool/contract.py."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvtool import contract
from kvtool.top.reading import Budget, Conversations, Memory

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "cpp"
WRITERS = ("tools/kv-check/report.cpp", "tools/kv-check/memory.cpp", "tools/kv-bench/kv-bench.cpp")
# For each module that reads documents of kv-check and kv-bench, the other names that it reads.
READERS = {
    "kvtool/verify/checks.py": set(),
    "kvtool/verify/runner.py": set(),
    "kvtool/bench/runs.py": set(),
    "kvtool/bench/types.py": {"checks"},
}


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def log_lines() -> dict[str, str]:
    """Return the log lines of llama-kv-log.h, by the names of their macros."""
    found = dict(re.findall(r"^#define (\w+)\s+(.*)$", text("cpp/src/llama-kv-log.h"), re.MULTILINE))
    whole = {name: re.sub(r"LLAMA_KV_LOG_\w+", lambda macro: found[macro[0]], value) for name, value in found.items()}
    return {name: "".join(re.findall(r'"([^"]*)"', value)) for name, value in whole.items()}


def test_log_lines_are_equal() -> None:
    lines = log_lines()
    assert lines["LLAMA_KV_LOG_START"] == contract.START_LINE
    assert lines["LLAMA_KV_LOG_RESIZE"] == contract.RESIZE_LINE
    for name in ("START", "RESIZE"):
        assert lines[f"LLAMA_KV_LOG_{name}"].startswith(lines[f"LLAMA_KV_LOG_{name}_BEGIN"])


def test_log_lines_are_in_one_header() -> None:
    literal = re.compile(r'"[^"\n]*(?:dynamic KV cache: start|resizing KV cache from)')
    sources = [path for path in CPP.rglob("*") if path.suffix in (".cpp", ".h")]
    assert [path.name for path in sources if literal.search(path.read_text("utf-8"))] == ["llama-kv-log.h"]
    used = "".join(path.read_text("utf-8") for path in (CPP / "src").glob("*.cpp"))
    assert '"%s: " LLAMA_KV_LOG_START' in used and '"%s: " LLAMA_KV_LOG_RESIZE' in used


def test_line_pattern_finds_the_numbers() -> None:
    log = "x: resizing KV cache from 256 to 512 cells (1 MiB)\n"
    assert re.findall(contract.line_pattern(contract.RESIZE_LINE), log) == [("256", "512")]


def test_fields_are_equal() -> None:
    names = re.findall(r'constexpr const char \* \w+ += "(\w+)";', text("cpp/tools/kv-check/fields.h"))
    assert set(names) == contract.PROGRAM_FIELDS and len(names) == len(set(names))


@pytest.mark.parametrize("path", WRITERS)
def test_programs_write_fields_of_the_header(path: str) -> None:
    source = text(f"cpp/{path}")
    assert re.findall(r'\b(?:str|num|real|flag|null|begin_object|begin_array)\("', source) == []
    assert "field::status" in source


def test_every_field_is_written() -> None:
    sources = "".join(text(f"cpp/{path}") for path in WRITERS)
    used = {name.rstrip("_") for name in re.findall(r"\bfield::(\w+)", sources)}
    assert used == contract.PROGRAM_FIELDS


@pytest.mark.parametrize("path", READERS)
def test_kvtool_reads_only_fields_of_the_contract(path: str) -> None:
    names = set(
        re.findall(r"""(?:data|said|point|usage|growth|check|c|diff|was|now)(?:\.get\(|\[)"(\w+)\"""", text(path))
    )
    assert names and names - READERS[path] <= contract.PROGRAM_FIELDS


def test_server_fields_are_written_by_the_server() -> None:
    parts = "".join(path.read_text("utf-8") for path in sorted((CPP / "tools/server").glob("server-memory*")))
    for group, names in contract.SERVER_FIELDS.items():
        assert f'"{group}"' in parts
        assert [name for name in sorted(names) if f'"{name}"' not in parts] == []


def test_top_reads_only_server_fields() -> None:
    own = {"context", "more"}  # kvtool sets these itself
    assert {field.name for field in fields(Memory)} - own <= contract.SERVER_FIELDS["kv_cache"]
    assert {field.name for field in fields(Budget)} == contract.SERVER_FIELDS["kv_budget"]
    assert {field.name for field in fields(Conversations)} == contract.SERVER_FIELDS["conversations"]

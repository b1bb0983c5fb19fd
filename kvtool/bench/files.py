"""What --out writes: bench.md, bench.json, bench.csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from kvtool.bench.report import Benched, Table, tables, verdict
from kvtool.errors import DiskError

HOW = """\
Random weights with the cache geometry of a real model, everything else tiny: a decode call is much cheaper than the
real model's, so a growth weighs more here than it does there. Each process has one context; static, copy and in-place
take turns; every figure is the median over the repeats, ratios are made within a repeat.

The cache is filled without paying for attention over it: each batch is decoded as a sequence of its own and then given
to the one that is measured (see `kv-bench`'s README). Rows are computed, written and grown for as with any prompt.
Speed is measured with attention over the whole depth. *Resident* is what the process grew by since before the context
was created, compute buffers included. *Limit* is measured in the same process: for a growth in place, the commit of as
many fresh pages; for one by copy, `memcpy` of what it copied into fresh memory; *copy + zero* adds touching the rows
that are new.
"""


def write(out: Path, result: Benched, pictures: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write everything; the paths in the order written. pictures: by file name. Raises DiskError."""
    document = {k: v for k, v in result.to_json().items() if k not in ("bin_dir", "files")}  # paths of one machine
    contents = {
        "bench.md": markdown(result, [name for name in pictures if name.endswith(".svg")]).encode(),
        "bench.csv": table_csv(result).encode(),
        **pictures,
        # last, and with the others in it: who finds it finds all of them
        "bench.json": (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode(),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (out / name).write_bytes(data)
    except OSError as err:
        raise DiskError(f"cannot write to {out}", why=str(err), next_step="--out another directory") from err
    return tuple(out / name for name in contents)


def markdown(result: Benched, pictures: list[str]) -> str:
    """bench.md."""
    m = result.machine
    memory = f", {m.memory / 2**30:.0f} GiB" if m.memory else ""
    pages = f", transparent huge pages: {m.pages}" if m.pages else ""
    parts = [
        f"# kvtool bench, llama.cpp {result.tag}\n",
        f"`-c {result.n_ctx}`, {result.repeats} runs of each, {result.threads} thread(s), "
        f"on {m.processor}, {m.cores} cores{memory}, {m.system}{pages}. {verdict(result)}.\n",
        HOW,
        *(f"![{Path(name).stem}]({name})\n" for name in pictures),
        *(_markdown_table(table) for table in tables(result)),
    ]
    if result.skipped:
        parts.append("".join(f"- left out: {s.model} {s.mode}: {s.why}\n" for s in result.skipped))
    return "\n".join(parts)


def _markdown_table(table: Table) -> str:
    head = "| " + " | ".join(c.removeprefix(">") for c in table.columns) + " |"
    rule = "|" + "|".join("---:" if c.startswith(">") else "---" for c in table.columns) + "|"
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
    return "\n".join([f"## {table.title}\n", head, rule, *body]) + "\n"


def table_csv(result: Benched) -> str:
    """bench.csv: a row for each model, cache and depth; bytes and seconds."""
    rows = [asdict(d) for d in result.summary.depths]
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()

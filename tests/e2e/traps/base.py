"""Define a trap: a line, and the run that fails without the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.e2e.broken import Edit

CONTEXT = "src/llama-context.cpp"
CACHE = "src/llama-kv-cache.cpp"
DSV4 = "src/llama-kv-cache-dsv4.cpp"
DYNAMIC = "src/llama-kv-dynamic.cpp"
COMPUTE = "src/llama-kv-compute.cpp"
DYNAMIC_CACHE = "src/llama-kv-dynamic-cache.cpp"
COPIES_FILE = "src/llama-kv-copies.cpp"
CACHE_COPIES = "src/llama-kv-cache-copies.cpp"
PLANNED_ROWS = "src/llama-kv-planned-rows.cpp"
STATE_ROWS = "src/llama-kv-state-rows.cpp"
STORAGE = "src/llama-kv-storage-copy.cpp"
LAYOUT = "src/llama-kv-layout.cpp"
INPLACE = "src/llama-kv-storage-inplace.cpp"
GROWTH = "src/llama-kv-growth.cpp"
PAGES = "src/llama-kv-pages.cpp"
PAGES_HOST = "src/llama-kv-pages-host.cpp"
REGION = "src/llama-kv-region.cpp"
RETYPE = "src/llama-kv-retype.cpp"
CELL_TYPES = "src/llama-kv-cell-types.cpp"
CONVERT = "src/llama-kv-convert.cpp"
LINES = "src/llama-kv-lines.cpp"
FOREIGN_STATE = "src/llama-kv-foreign-state.cpp"
BUDGET = "src/llama-kv-budget-member.cpp"

# llama_kv_pages::assign(): the pages that are not needed now, or the new pages if not all of them fit (!res)
GIVE_BACK = "gone.each_run([&](size_t i0, size_t i1) { discard(i0, i1); });"

COPY = {"LLAMA_KV_DYNAMIC_STORAGE": "copy"}  # as on a device; without it host memory grows in place
# not upstream's toys: the pair of kvtool/verify/drafts.py, and a model with Qwen3.5-27B's cache
DRAFT = "gemma4"
LARGE = "large"


@dataclass(frozen=True)
class Run:
    """Describe one run of a program.

    `model` is a toy's name, or "" for a unit test. `args` are the arguments after the model.
    """

    model: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: str = "kv-check"

    @property
    def key(self) -> tuple[object, ...]:
        return (self.program, self.model, self.args, tuple(sorted(self.env.items())))


@dataclass(frozen=True)
class Trap:
    """Describe a line and the run that fails without it.

    `sees` is the expected change:

    - the name of a check of kv-check that is no longer "same"
    - "log: TEXT": the program's log contains the text
    - "status: WORD": kv-check's verdict for the whole run
    - "resident: BYTES", for kv-check --memory: the context uses more memory
    - "exit", for a unit test: it fails
    """

    name: str
    broken: Edit | tuple[Edit, ...]  # several edits if each line covers for the other
    run: Run
    sees: str

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (self.broken,) if isinstance(self.broken, Edit) else self.broken


def copies(model: str, checks: str, *args: str) -> Run:
    """Run kv-check on storage that grows by copy."""
    return Run(model, ("--quick", "--checks", checks, *args), COPY)


def inplace(model: str, checks: str, *args: str) -> Run:
    """Run kv-check on storage that grows in place, like host memory."""
    return Run(model, ("--quick", "--checks", checks, *args))


def unit(program: str) -> Run:
    return Run("", (), {}, program)

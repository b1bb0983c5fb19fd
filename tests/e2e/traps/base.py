"""Define a trap (a known mistake): the line that prevents it, and the run that fails without this line."""

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

# In llama_kv_pages::assign(): free the pages that are not needed now. If not all new pages fit (!res), free the new
# ones.
GIVE_BACK = "gone.each_run([&](size_t i0, size_t i1) { discard(i0, i1); });"

# grow by copy, as on a device; without this, a cache in host memory grows in place
COPY = {"LLAMA_KV_DYNAMIC_STORAGE": "copy"}
# These two are not test models of upstream: the pair of kvtool/verify/drafts.py, and a model with Qwen3.5-27B's cache.
DRAFT = "gemma4"
LARGE = "large"


@dataclass(frozen=True)
class Run:
    """Describe one run of a program.

    model: the name of a test model, "" for a unit test
    args: the arguments after the model
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
    """Describe a line, and the run that fails without it.

    `sees` describes what changes without the line:

    - the name of a check of kv-check that is not "same" any more
    - "log: TEXT": the log of the program contains the text
    - "status: WORD": the verdict of kv-check on the whole run
    - "resident: BYTES", for kv-check --memory: the context uses more memory than this
    - "exit", for a unit test: the test fails
    """

    name: str
    broken: Edit | tuple[Edit, ...]  # several edits if one line does the work of the other
    run: Run
    sees: str

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (self.broken,) if isinstance(self.broken, Edit) else self.broken


def copies(model: str, checks: str, *args: str) -> Run:
    """Return a run of kv-check with a cache that grows by copy."""
    return Run(model, ("--quick", "--checks", checks, *args), COPY)


def inplace(model: str, checks: str, *args: str) -> Run:
    """Return a run of kv-check with a cache that grows in place, as in host memory."""
    return Run(model, ("--quick", "--checks", checks, *args))


def unit(program: str) -> Run:
    return Run("", (), {}, program)

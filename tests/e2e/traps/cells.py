"""List traps (known mistakes) in the code for cells and rows.

Examples are a cache for which no rows are requested, cells that grow together with the rows, and a wrong context shift.
"""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import CACHE, DYNAMIC, DYNAMIC_CACHE, PLANNED_ROWS, Trap, copies, inplace


def small_cells(where: str) -> Edit:
    """Return an edit after which a cache starts with only 256 cells if the C++ condition `where` is true.

    The cells are resized when the cache is registered, before it is used.
    """
    old = "dyn->add_cache(this);"
    resize = f"for (auto & cells : kv.v_cells) {{ cells.resize({where} ? 256 : n_max); }}"
    return Edit(DYNAMIC_CACHE, old, f"{old} {resize}")


ROWS = (
    Trap(
        "the indexer of a hybrid model uses cells for which its own cache has no storage",
        Edit(DYNAMIC, "cache->follow(*other);", ""),
        copies("qwen4exp-moe", "prompt"),
        "prompt",
    ),
    Trap(
        "the compressed caches of DSV4 are written past the end of their storage",
        Edit(PLANNED_ROWS, "kv->dyn->planned.request(n);", ""),
        copies("deepseek4-moe", "rows"),
        "rows",
    ),
    Trap(
        "the rows of DSV4 have no cells, and a growth copies none of them",
        Edit(
            DYNAMIC_CACHE,
            "planned.is_in_use() ? planned.n_used_of_first(n_max_cells) : kv.v_cells[s].used_max_p1()",
            "kv.v_cells[s].used_max_p1()",
        ),
        copies("deepseek4-moe", "generate", "--fill", "2300", "-c", "8192"),
        "generate",
    ),
    Trap(
        "the row of DSV4's dummy writes is copied by a growth, and is no longer the last one",
        Edit(PLANNED_ROWS, "n_all < cache.n_max_cells ? n_all - 1 : cache.n_max_cells", "n_all"),
        copies("deepseek4-moe", "rows"),
        "rows",
    ),
    *(
        Trap(
            f"in place, the row of DSV4's dummy writes {what}, and is written without being taken",
            Edit(PLANNED_ROWS, "cache.requested.add(cache.n_max_cells - 1, cache.n_max_cells);", new),
            inplace("deepseek4-moe", "pages", "-c", "8192"),
            "pages",
        )
        for what, new in (("is not asked for", ""), ("is thought to be the first", "cache.requested.add(0, 1);"))
    ),
)

CELLS = (
    Trap(
        "the cells start small like the storage, so tokens use other cells than in the static cache",
        small_cells("dyn->is_enabled()"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "a window cache of full size starts small, overwrites masked cells and loses history",
        small_cells("dyn->is_enabled() && kv.n_swa > 0"),
        copies("gemma3-dense", "prompt", "--swa-full"),
        "prompt",
    ),
    *(
        Trap(
            f"context shift comes and goes with the size that the caches of {name} happen to have",
            Edit(file, f"{a}->get_size_max() == {b}->get_size_max()", f"{a}->get_size() == {b}->get_size()"),
            copies(model, "shift,keep", "-ub", "400"),
            "shift",
        )
        for name, file, a, b, model in (
            ("iSWA", "src/llama-kv-cache-iswa.cpp", "kv_base", "kv_swa", "gemma3-dense"),
            ("DSA-iSWA", "src/llama-kv-cache-dsa-iswa.cpp", "kv_dsa->get_mla()", "kv_swa", "dots3note-moe"),
        )
    ),
    Trap(
        "a copy to another stream defines the whole stream by the current size of the storage",
        Edit(CACHE, "p1 + 1 < (int) get_size_max()", "p1 + 1 < (int) get_size()"),
        copies("llama-dense", "copy-part,keep"),
        "copy-part",
    ),
)

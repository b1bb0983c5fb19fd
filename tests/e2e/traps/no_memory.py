"""List traps (known mistakes) when memory runs out."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    CACHE,
    CACHE_COPIES,
    COMPUTE,
    CONTEXT,
    COPY,
    DYNAMIC_CACHE,
    LAYOUT,
    PLANNED_ROWS,
    STATE_ROWS,
    STORAGE,
    Run,
    Trap,
    copies,
    inplace,
    unit,
)

LATE_COPY = Run("llama-dense", ("--quick", "--checks", "no-memory", "--seqs", "2", "--fail", "1+"))
LATE_COPY_OF_OTHERS = Run("llama-dense", ("--quick", "--checks", "no-memory", "--seqs", "3", "--fail", "1+"))
RANDOM = ("--quick", "--checks", "random", "--seqs", "3")

NO_MEMORY = (
    Trap(
        "a batch without memory leaves a stream with the head of another stream",
        Edit(CACHE, "it->v_heads_old[sinfo.strm[s]]", "it->v_heads_old[s]"),
        Run("qwen35-dense", (*RANDOM, "--seed", "9")),
        "random",
    ),
    Trap(
        "a batch without memory removes positions from a window",
        Edit(DYNAMIC_CACHE, "!pos_max.empty()", "false"),
        Run("gemma3-dense", (*RANDOM, "--seed", "9")),
        "random",
    ),
    Trap(
        "by copy, a growth that another cache reverts loses rows of a window",
        Edit(
            DYNAMIC_CACHE,
            "try_resize(growing->rows, growing->n_used, false);",
            "try_resize(growing->rows, std::vector<uint32_t>(growing->n_used.size()), false);",
        ),
        copies("gemma3-dense", "no-memory", "--fail", "3+", "--override", "gemma3.attention.sliding_window=1024"),
        "no-memory",
    ),
    Trap(
        "the copy after a waiting copy is also treated as waiting",
        Edit(
            CACHE_COPIES,
            "has_late = !pending.empty();",
            "has_late = has_late || !pending.empty();",
        ),
        inplace("llama-dense", "no-memory", "--seqs", "3", "--fail", "1+"),
        "no-memory",
    ),
    Trap(
        "rows of a batch without memory count as used",
        Edit(PLANNED_ROWS, "kv->dyn->planned.undo_request();", ""),
        inplace("deepseek4-moe", "no-memory", "--fail", "1+", "--fill", "1100", "-c", "8192"),
        "no-memory",
    ),
    Trap(
        "a copy to another stream exceeds the budget",
        Edit(
            CACHE_COPIES,
            "limit.fits_rows(cache, rows)",
            "true",
        ),
        Run("llama-dense", RANDOM),
        "random",
    ),
    Trap(
        "a sequence is saved while its copy waits for memory",
        Edit(CACHE_COPIES, "cache.storage().reads_below() || has_late", "cache.storage().reads_below()"),
        LATE_COPY,
        "no-memory",
    ),
    Trap(
        "no sequence is saved while the copy of another one waits for memory",
        Edit(CACHE_COPIES, "std::find(sdst.begin(), sdst.end(), seq_to_stream[seq_id]) != sdst.end()", "true"),
        LATE_COPY,
        "no-memory",
    ),
    Trap(
        "a state overwrites cells that a waiting copy has not read yet",
        Edit(
            STATE_ROWS,
            "dyn->any(is_late)",
            "false",
            after="const auto is_late = [&]",
        ),
        LATE_COPY,
        "no-memory",
    ),
    Trap(
        "a state refused because of a waiting copy zeroes cells that the copy has not read yet",
        Edit(STATE_ROWS, "cache.copies.is_late_in(sinfo.strm)", "false", after="llama_kv_state_rows::room("),
        LATE_COPY,
        "no-memory",
    ),
    Trap(
        "an obsolete copy is performed after a state was read into its destination",
        Edit(STATE_ROWS, "other->copies.drop_late();", ""),
        LATE_COPY,
        "no-memory",
    ),
    Trap(
        "a state is refused because of a waiting copy of other cells",
        Edit(CACHE_COPIES, "is_late() && (has_shift() || has(pending.ssrc) || has(pending.sdst))", "is_late()"),
        LATE_COPY_OF_OTHERS,
        "no-memory",
    ),
    Trap(
        "no memory is freed while a copy waits",
        Edit(
            DYNAMIC_CACHE,
            "planned.is_in_use() && (planned.n_used_of_first(n_max_cells) > 0 || !copies.is_empty())",
            "!copies.is_empty()",
        ),
        LATE_COPY_OF_OTHERS,
        "no-memory",
    ),
    Trap(
        "the source rows of a waiting copy are freed with its cells",
        Edit(DYNAMIC_CACHE, "res |= read;", ""),
        LATE_COPY_OF_OTHERS,
        "no-memory",
    ),
    Trap(
        "rows without cells are cleared before a waiting copy has read them",
        Edit(CACHE_COPIES, "seq_id >= 0 && is_late()", "false"),
        Run("deepseek4-moe", LATE_COPY.args),
        "no-memory",
    ),
    Trap(
        "a state without memory in a window leaves its part in the other cache",
        (
            Edit(STATE_ROWS, "cache.dyn->drop_seq(*seq_id_read);", ""),
            Edit(CONTEXT, "memory->clear(true);", "(void) 0;", after="::state_read_data("),
        ),
        Run(
            "gemma3-dense",
            ("--quick", "--checks", "no-memory", "--fail", "21+", "--override", "gemma3.attention.sliding_window=1024"),
        ),
        "no-memory",
    ),
    Trap(
        "a growth that fails partway leaves layers of two sizes",
        Edit(STORAGE, "shrink_layer(layers[j], n_old, n_used);", ""),
        copies("llama-dense", "no-memory", "--fail", "2+", "-fa", "off"),
        "no-memory",
    ),
    Trap(
        "a growth that fails partway keeps the memory that it had allocated",
        Edit(STORAGE, "move_layer(layers[j], n_old, n_used)", "false"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "rows after the live cells are not zero after a failed growth",
        Edit(
            LAYOUT,
            "memset(all + offs_dst + size_live, 0, size_full - size_live);",
            "memset(all + offs_dst + size_live, 0xff, size_full - size_live);",
        ),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "llama_decode() throws if the compute buffers cannot be allocated",
        Edit(
            COMPUTE,
            'LLAMA_LOG_WARN("%s: %s\\n", __func__, err.what());',
            "throw;",
            after="lctx.sched_reserve();",
        ),
        Run(
            "llama-dense", ("--quick", "--checks", "no-memory", "--fail", "1000000"), {**COPY, "KV_WATCH": "no-reserve"}
        ),
        "no-memory",
    ),
    Trap(
        "a growth whose compute buffers exceed the budget keeps its cells",
        Edit(DYNAMIC_CACHE, "try_resize(growing->rows, growing->n_used, false);", ""),
        copies("llama-dense", "random", "--seqs", "8", "--unified"),
        "random",
    ),
)

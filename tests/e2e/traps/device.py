"""List the traps of storage that grows in place on a device, where unmapped memory must not be accessed."""

from __future__ import annotations

from tests.e2e.broken import Edit
from tests.e2e.traps.base import (
    CONVERT,
    COPIES_FILE,
    DRAFT,
    DYNAMIC,
    DYNAMIC_CACHE,
    GIVE_BACK,
    GROWTH,
    INPLACE,
    LINES,
    PAGES,
    REGION,
    RETYPE,
    STATE_ROWS,
    Run,
    Trap,
    unit,
)

PAGES_OF_4K = ("--storage", "inplace", "--fake-device", "1024,4", "--device", "FAKE0")
DEVICES = unit("test-kv-storage-device")


def there(model: str, checks: str, *args: str) -> Run:
    """Run kv-check on a fake GPU, which ends a process that accesses unmapped memory."""
    return Run(model, ("--quick", "--checks", checks, *PAGES_OF_4K, *args))


def there_by_copy(model: str, checks: str) -> Run:
    """Run kv-check on the same GPU by copy, with the alignment of Vulkan for copies from and to quantized types."""
    return Run(model, ("--quick", "--checks", checks, "-fa", "on", *PAGES_OF_4K, "--storage", "copy"))


ONLY_F16 = ("--storage", "inplace", "--fake-device", "1024,4,f16", "--device", "FAKE0", "-fa", "on")
# 64 MiB, in which the use by other programs is counted
SMALL = ("--storage", "inplace", "--fake-device", "64,4", "--device", "FAKE0")
RANDOM = Run("llama-dense", ("--quick", "--checks", "random", *SMALL, "--seqs", "8", "--unified"))

DEVICE = (
    Trap(
        "on a device, a draft reads cells of its target together that the target never had in one batch",
        Edit(DYNAMIC_CACHE, "owner->request_windows(sinfos);", ""),
        there(DRAFT, "draft", "--seqs", "4"),
        "draft",
    ),
    Trap(
        "on a device, a state is saved of a sequence whose copy waits, and has no rows yet",
        Edit(STATE_ROWS, "dyn->copies.update();", "return;", after="::begin_write("),
        there("llama-dense", "uneven", "--seqs", "4"),
        "uneven",
    ),
    Trap(
        "on a device, streams that are read together have as many rows as each needs, and not as the longest one has",
        Edit(DYNAMIC_CACHE, "request_windows(sinfos);", "", after="if (rows->reads_below()) {"),
        there("llama-dense", "uneven", "--seqs", "4"),
        "uneven",
    ),
    Trap(
        "on a device, streams are in pages though attention runs elsewhere, on copies of what is around their rows",
        Edit(DYNAMIC, "!cache->restart_by_copy()", "false"),
        Run("llama-dense", ("--quick", "--checks", "prompt", *ONLY_F16, "-ctk", "q8_0", "-ctv", "q8_0", "--seqs", "4")),
        "prompt",
    ),
    Trap(
        "on a device, cells are to have a type that no kernel writes there",
        Edit(
            RETYPE,
            "!std::all_of(caches.begin(), caches.end(), "
            "[&](const auto * cache) { return cache->types->can_write(dyn.lctx.get_sched(), type_k, type_v); })",
            "false",
        ),
        Run("llama-dense", ("--quick", "--checks", "no-kernel", *ONLY_F16)),
        "no-kernel",
    ),
    Trap(
        "on a device, the rows end where those in use do, and not where the attention window does",
        Edit(GROWTH, "in_place && !has_windows", "in_place"),
        there("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "on a device, kernels read behind the last row of a quantized tensor",
        Edit(REGION, "mem.pages->add(res, offset, size + t.pad);", "mem.pages->add(res, offset, size);"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, kernels that take a head for a row read behind the last one",
        Edit(PAGES, "std::max(n_bytes_padding(t), n_bytes_padding(&block))", "n_bytes_padding(t)"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, a view over all of the storage is copied to where it is read, with rows that are not there",
        Edit(DYNAMIC_CACHE, "kv.n_stream > 1 || is_all", "kv.n_stream > 1"),
        there("qwen4exp-moe", "prompt", "-fa", "on", "-ctk", "iq4_nl"),
        "prompt",
    ),
    Trap(
        "on a device, rows go that are below others",
        Edit(INPLACE, "res.add(0, used.end());", ""),
        DEVICES,
        "exit",
    ),
    Trap(
        "on two devices, one gives back rows before the other has found that it has too little for the new ones",
        Edit(INPLACE, "both |= rows;", "both = rows;"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, types change with less memory than what is converted at a time takes",
        Edit(REGION, "n_least += (size + size_page - 1)/size_page;", ""),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, quantized rows are read from where no kernel begins",
        Edit(LINES, "256/std::gcd<int64_t, int64_t>(256, ggml_row_size(type, n))", "1"),
        there_by_copy("deepseek2-moe", "retype-generate"),
        "retype-generate",
    ),
    Trap(
        "on a device, quantized rows are written to where no kernel begins",
        Edit(CONVERT, "is_rows(to)", "false", after="idxs = nullptr;"),
        there_by_copy("deepseek2-moe", "retype-restore"),
        "retype-restore",
    ),
    Trap(
        "on a device, what is given back stays mapped",
        Edit(PAGES, GIVE_BACK, f"if (!res) {{ {GIVE_BACK} }}"),
        RANDOM,
        "random",
    ),
    Trap(
        "on a device, a growth that is refused keeps the rows that it had got",
        Edit(INPLACE, "if (res) {\n            cur = rows;\n        }", "cur = rows;"),
        RANDOM,
        "random",
    ),
    Trap(
        "a batch runs though its K-shift, whose graph needs more than those of batches, has found no memory",
        Edit(COPIES_FILE, "has_late_shift = true;", ""),
        RANDOM,
        "random",
    ),
    Trap(
        "a state has the positions of a K-shift that found no memory, and rows without it",
        Edit(COPIES_FILE, "(has_late_shift && cache->copies.has_shift(seq_id))", "false"),
        RANDOM,
        "random",
    ),
    Trap(
        "a batch that finds no memory ends as a fault of the device does, and not as in a full cache",
        Edit(DYNAMIC, "has_memory ? 0 : 1", "has_memory ? 0 : -2", after="llama_kv_dynamic::grow_batch("),
        RANDOM,
        "random",
    ),
)

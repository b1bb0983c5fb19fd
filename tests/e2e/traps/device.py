"""List traps (known mistakes) in a cache that grows in place on a device.

Memory of the device that is not mapped must not be accessed.
"""

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
    """Return a run of kv-check on a simulated GPU. If memory that is not mapped is accessed, the process ends."""
    return Run(model, ("--quick", "--checks", checks, *PAGES_OF_4K, *args))


def there_by_copy(model: str, checks: str) -> Run:
    """Return a run of kv-check on a simulated GPU, with growth by copy.

    The simulated GPU requires that copies of quantized types are aligned, as Vulkan does.
    """
    return Run(model, ("--quick", "--checks", checks, "-fa", "on", *PAGES_OF_4K, "--storage", "copy"))


ONLY_F16 = ("--storage", "inplace", "--fake-device", "1024,4,f16", "--device", "FAKE0", "-fa", "on")
# a device with 64 MiB. Other programs use a part of them
SMALL = ("--storage", "inplace", "--fake-device", "64,4", "--device", "FAKE0")
RANDOM = Run("llama-dense", ("--quick", "--checks", "random", *SMALL, "--seqs", "8", "--unified"))

DEVICE = (
    Trap(
        "on a device, a draft reads target cells together that were never in one batch",
        Edit(DYNAMIC_CACHE, "owner->request_windows(sinfos);", ""),
        there(DRAFT, "draft", "--seqs", "4"),
        "draft",
    ),
    Trap(
        "on a device, a state of a sequence is saved before its pending copy, without rows",
        Edit(STATE_ROWS, "dyn->copies.update();", "return;", after="::begin_write("),
        there("llama-dense", "uneven", "--seqs", "4"),
        "uneven",
    ),
    Trap(
        "on a device, streams that are read together have only their own rows, not those of the longest stream",
        Edit(DYNAMIC_CACHE, "request_windows(sinfos);", "", after="if (rows->reads_below()) {"),
        there("llama-dense", "uneven", "--seqs", "4"),
        "uneven",
    ),
    Trap(
        "on a device, streams are in pages although attention runs elsewhere, on copies with unmapped pages",
        Edit(DYNAMIC, "!cache->restart_by_copy()", "false"),
        Run("llama-dense", ("--quick", "--checks", "prompt", *ONLY_F16, "-ctk", "q8_0", "-ctv", "q8_0", "--seqs", "4")),
        "prompt",
    ),
    Trap(
        "on a device, cells change to a type that no kernel writes there",
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
        "on a device, the rows end at the last used row instead of the end of the attention window",
        Edit(GROWTH, "in_place && !has_windows", "in_place"),
        there("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "on a device, kernels read past the last row of a quantized tensor",
        Edit(REGION, "mem.pages->add(res, offset, size + t.pad);", "mem.pages->add(res, offset, size);"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, kernels that use a head as a row read past the last row",
        Edit(PAGES, "std::max(n_bytes_padding(t), n_bytes_padding(&block))", "n_bytes_padding(t)"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, a view of all of the storage is copied to another device, with unmapped rows",
        Edit(DYNAMIC_CACHE, "kv.n_stream > 1 || is_all", "kv.n_stream > 1"),
        there("qwen4exp-moe", "prompt", "-fa", "on", "-ctk", "iq4_nl"),
        "prompt",
    ),
    Trap(
        "on a device, rows below used rows are freed",
        Edit(INPLACE, "res.add(0, used.end());", ""),
        DEVICES,
        "exit",
    ),
    Trap(
        "on two devices, one frees rows before the allocation on the other fails",
        Edit(INPLACE, "both |= rows;", "both = rows;"),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, a change of types starts with less memory than one step needs",
        Edit(REGION, "n_least += (size + size_page - 1)/size_page;", ""),
        DEVICES,
        "exit",
    ),
    Trap(
        "on a device, quantized rows are read from an offset that kernels do not support",
        Edit(LINES, "256/std::gcd<int64_t, int64_t>(256, ggml_row_size(type, n))", "1"),
        there_by_copy("deepseek2-moe", "retype-generate"),
        "retype-generate",
    ),
    Trap(
        "on a device, quantized rows are written to an offset that kernels do not support",
        Edit(CONVERT, "is_rows(to)", "false", after="idxs = nullptr;"),
        there_by_copy("deepseek2-moe", "retype-restore"),
        "retype-restore",
    ),
    Trap(
        "on a device, freed pages stay mapped",
        Edit(PAGES, GIVE_BACK, f"if (!res) {{ {GIVE_BACK} }}"),
        RANDOM,
        "random",
    ),
    Trap(
        "on a device, a refused growth keeps the rows that it had allocated",
        Edit(INPLACE, "if (res) {\n            cur = rows;\n        }", "cur = rows;"),
        RANDOM,
        "random",
    ),
    Trap(
        "a batch runs although its K-shift found no memory for its larger graph",
        Edit(COPIES_FILE, "has_late_shift = true;", ""),
        RANDOM,
        "random",
    ),
    Trap(
        "a state has the positions of a K-shift that found no memory, but unshifted rows",
        Edit(COPIES_FILE, "(has_late_shift && cache->copies.has_shift(seq_id))", "false"),
        RANDOM,
        "random",
    ),
    Trap(
        "a batch without memory fails like a device error instead of a full cache",
        Edit(DYNAMIC, "has_memory ? 0 : 1", "has_memory ? 0 : -2", after="llama_kv_dynamic::grow_batch("),
        RANDOM,
        "random",
    ),
)

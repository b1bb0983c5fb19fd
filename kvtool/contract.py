"""List what kvtool reads from the patched programs: their log lines, and the fields of their JSON documents.

The C++ side is in cpp/src/llama-kv-log.h (log lines), cpp/tools/kv-check/fields.h (documents of kv-check and kv-bench)
and cpp/tools/server (documents of llama-server). tests/unit/test_contract.py fails if only one side changes.
"""

import re

# Log lines of the library, as formats of printf(). The library writes the name of a function before them.
START_LINE = "dynamic KV cache: start = %u cells"
RESIZE_LINE = "resizing KV cache from %u to %u cells"

# Fields of the JSON documents of kv-check and kv-bench.
PROGRAM_FIELDS = frozenset(
    {
        "arch",
        "base",
        "cells_end",
        "cells_start",
        "checks",
        "commit",
        "committed",
        "committed_cleared",
        "create_seconds",
        "decode",
        "decodes",
        "decodes_differ",
        "depth",
        "device",
        "device_before",
        "device_peak",
        "dynamic",
        "dynamic_start",
        "fa",
        "failed_allocations",
        "fallback",
        "first_diff",
        "flash_attn",
        "grow_seconds",
        "grown",
        "growths",
        "index",
        "kind",
        "kv_bytes",
        "kv_dynamic",
        "measured",
        "memcpy",
        "mode",
        "model",
        "n_added",
        "n_bytes_added",
        "n_bytes_copied",
        "n_cells",
        "n_cells_max",
        "n_cells_used",
        "n_ctx",
        "n_grow",
        "n_growths",
        "n_layer",
        "n_past",
        "n_shrink",
        "n_shrinks",
        "n_threads",
        "n_tokens",
        "n_ubatch",
        "name",
        "other",
        "pairs",
        "peak",
        "peak_exact",
        "points",
        "reason",
        "reserved",
        "round",
        "row",
        "rss",
        "rss_after",
        "rss_before",
        "rss_cleared",
        "rss_context",
        "rss_filled",
        "seconds",
        "seqs",
        "static",
        "status",
        "storage",
        "swa_full",
        "t_grow_max_us",
        "t_grow_us",
        "test",
        "type",
        "type_k",
        "type_v",
        "unified",
        "usage",
        "used",
        "values",
        "version",
    }
)
# fmt: on

# Fields of /props and /slots that only a patched llama-server has, by the name of the object that contains them.
SERVER_FIELDS = {
    "kv_cache": frozenset(
        {
            "reserved_bytes",
            "committed_bytes",
            "used_bytes",
            "cells_max",
            "cells",
            "cells_used",
            "grow_total",
            "shrink_total",
            "copied_bytes_total",
            "grow_seconds_total",
            "retype_total",
            "retype_seconds_total",
            "type_k",
            "type_v",
            "cells_shared",
        }
    ),
    "conversations": frozenset(
        {
            "limit_bytes",
            "entry_bytes",
            "checkpoint_bytes",
            "paused_bytes",
            "disk_bytes",
            "disk_limit_bytes",
            "entries",
            "disk_entries",
            "hits_total",
            "misses_total",
            "saved_tokens_total",
            "disk_hits_total",
            "disk_misses_total",
            "disk_saved_tokens_total",
        }
    ),
    "kv_budget": frozenset({"types", "bytes", "committed_bytes", "down_total", "up_total"}),
}
# fmt: on


def line_pattern(line: str) -> str:
    """Return a regular expression for a log line. Each number is a group."""
    return re.escape(line).replace("%u", r"(\d+)")

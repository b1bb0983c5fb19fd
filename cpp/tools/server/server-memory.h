#pragma once

// What /metrics and /slots say about the memory behind the context, from llama_get_memory_usage()

#include "server-common.h"

#include "llama.h"

#include <vector>

template <typename T> // server_task_result_metrics::metric_item
std::vector<T> server_memory_gauges(const llama_memory_usage & usage) {
    return {
        { "kv_cache_reserved_bytes",  "Memory of the KV cache and the recurrent states at full size",    (double) usage.reserved       },
        { "kv_cache_committed_bytes", "Memory of the KV cache and the recurrent states that is taken",   (double) usage.committed      },
        { "kv_cache_used_bytes",      "Memory of the KV cache and the recurrent states behind tokens",   (double) usage.used           },
        { "kv_cache_cells_max",       "Number of cells of the KV cache at full size",                    (double) usage.n_cells_max    },
        { "kv_cache_cells",           "Number of cells of the KV cache with memory",                     (double) usage.n_cells        },
        { "kv_cache_cells_used",      "Number of cells of the KV cache that hold a token",               (double) usage.n_cells_used   },
    };
}

template <typename T>
std::vector<T> server_memory_counters(const llama_memory_usage & usage) {
    return {
        { "kv_cache_grow_total",         "Number of times the KV cache has grown",                       (double) usage.n_grow         },
        { "kv_cache_shrink_total",       "Number of times the KV cache has given memory back",           (double) usage.n_shrink       },
        { "kv_cache_copied_bytes_total", "Bytes of the KV cache that were moved for that",               (double) usage.n_bytes_copied },
        { "kv_cache_grow_seconds_total", "Total time spent growing the KV cache",                        usage.t_grow_us/1.e6          },
    };
}

// of the context: all slots share it
inline json server_memory_json(const llama_memory_usage & usage) {
    return {
        { "reserved_bytes",  usage.reserved     },
        { "committed_bytes", usage.committed    },
        { "used_bytes",      usage.used         },
        { "cells_max",       usage.n_cells_max  },
        { "cells",           usage.n_cells      },
        { "cells_used",      usage.n_cells_used },
    };
}

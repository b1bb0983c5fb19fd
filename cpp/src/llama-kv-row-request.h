#pragma once

// Rows of one llama_kv_cache that the next batch needs and that do not exist yet (--kv-dynamic)
//
// A request only collects the rows. llama_kv_dynamic_cache::grow() allocates them. All functions run on the thread that uses the
// context.

#include "llama-kv-rows.h"

#include <cstdint>
#include <optional>

class llama_kv_dynamic_cache;

class llama_kv_row_request {
public:
    explicit llama_kv_row_request(const llama_kv_dynamic_cache & cache) : cache(cache) {}

    // request the rows [i0, i1) of stream s, or of all streams. If the cache is not dynamic, the second overload does nothing
    // If there is no host memory for the request, the next growth of the whole context fails, see llama_kv_dynamic::fail_request().
    void add(uint32_t s, uint32_t i0, uint32_t i1);
    void add(uint32_t i0, uint32_t i1);

    // request the rows of another cache's request
    void add(const llama_kv_row_request & other);

    void clear() { missing.reset(); }

    // check whether rows of this cache were requested
    bool has_rows() const { return missing.has_value(); }

    // check whether rows of this cache were requested, or whether the request of the context failed
    bool is_pending() const;

    // return the requested rows. Call this only if has_rows() is true
    const llama_kv_rows & rows() const { return *missing; }

private:
    const llama_kv_dynamic_cache & cache;

    std::optional<llama_kv_rows> missing;
};

#pragma once

#include "server-contexts.h"

#include "common.h"

#include <cstdint>

// The number of cells that the pool can have, within --kv-budget.
class server_pool_capacity {
public:
    // cells beyond the needed ones that a growth allocates or a shrink keeps
    static constexpr int32_t N_BLOCK = 512;

    server_pool_capacity(const common_params & params, const server_contexts & ctxs);

    // return all cells of the context, or the cells of the smallest types that fit into the budget
    // ignore_draft: do not subtract the draft's cells, which are freed together with the cells of their slots
    int32_t n_cells_max(bool ignore_draft = false) const;

    // return true if the budget can never hold n_tokens, where its cells are counted: not with a recurrent state
    bool is_too_small(int32_t n_tokens) const;
    bool is_too_small(int32_t n_tokens, int32_t n_max) const;

private:
    // return the size of a cell of the smallest types, relative to the current types
    double type_ratio() const;

    const common_params   & params;
    const server_contexts & ctxs;
};

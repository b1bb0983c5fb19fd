#pragma once

#include "server-contexts.h"
#include "server-conversations.h"

#include "common.h"

#include <cstdint>

// Computes how many cells the pool can have within --kv-budget.
class server_pool_capacity {
public:
    // number of cells by which a growth may exceed the needed cells, or which a shrink may keep
    static constexpr int32_t N_BLOCK = 512;

    server_pool_capacity(const common_params & params, const server_contexts & ctxs, const server_conversations & conversations);

    // return the maximum number of cells of the context. With a budget, this is the number of cells that fit into the budget
    // if the cells have the smallest types
    // ignore_draft: do not subtract the draft's cells, because they are freed together with the cells of their slots
    int32_t n_cells_max(bool ignore_draft = false) const;

    // return true if the budget can never hold n_tokens tokens. With a recurrent state, cells are not counted, and the result is
    // false
    // n_max: result of n_cells_max()
    bool is_too_small(int32_t n_tokens) const;
    bool is_too_small(int32_t n_tokens, int32_t n_max) const;

private:
    // return the size of a cell of the smallest types, as a fraction of the size of a current cell
    double type_ratio() const;

    const common_params        & params;
    const server_contexts      & ctxs;
    const server_conversations & conversations;
};

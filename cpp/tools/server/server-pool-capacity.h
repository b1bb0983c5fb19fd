#pragma once

#include "server-contexts.h"
#include "server-conversations.h"

#include "common.h"

#include <cstdint>

// Computes how many cells the pool can have within --kv-budget.
class server_pool_capacity {
public:
    // maximum number of cells that a growth adds, or that a shrink keeps, in addition to the needed cells
    static constexpr int32_t N_BLOCK = 512;

    server_pool_capacity(const common_params & params, const server_contexts & ctxs, const server_conversations & conversations);

    // return the maximum number of cells of the target's context. With a budget, this is the number of cells of the smallest
    // types that fit into the budget
    // ignore_draft: true: the bytes of the draft's cells count as free, because the draft's cells of a slot are freed together
    //               with its other cells
    int32_t n_cells_max(bool ignore_draft = false) const;

    // return true if the budget can never hold n_tokens tokens. If the model has a recurrent state, return false without
    // counting cells
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

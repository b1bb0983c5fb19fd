// Checks of a budget, within which cells change to smaller types (llama_memory_budget_init()).
//
// The comparison is within one run, because a static cache has no budget. Each check compares a context with a budget and a
// context without a budget, in which the check makes the same change of types before the same batch. The answers must be equal
// bit for bit.

#include "scenarios-types.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace {

using memory_budget = std::unique_ptr<llama_memory_budget, decltype(&llama_memory_budget_free)>;

struct answer {
    int32_t            rc;
    cell_types         types; // types of the cells after the batch
    std::vector<float> logits;
};

memory_budget make_budget(size_t n_bytes, const std::vector<ggml_type> & ladder) {
    return { llama_memory_budget_init(n_bytes, ladder.data(), ladder.size()), llama_memory_budget_free };
}

session_params with_budget(session_params sp, const memory_budget & budget) {
    kv_check_set_budget(sp, budget.get());
    return sp;
}

answer fill(const side & s, session & c, uint32_t n) {
    answer res = { c.try_fill(n), c.types(), {} };

    const float * row = res.rc == 0 ? llama_get_logits_ith(c.ctx, -1) : nullptr;
    if (row != nullptr) {
        res.logits.assign(row, row + s.n_vocab);
    }
    return res;
}

// return those of the types f16, q8_0 and q4_0 with which a context of this model can be created
std::vector<ggml_type> make_ladder(const side & s, const session_params & sp) {
    std::vector<ggml_type> res;
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        if (session_can_create(s, session_with_types(sp, { type, type }))) {
            res.push_back(type);
        }
    }
    return res;
}

size_t rung(const std::vector<ggml_type> & ladder, const cell_types & types) {
    const auto it = std::find(ladder.begin(), ladder.end(), types.k);
    if (types.k != types.v || it == ladder.end()) {
        throw check_failed("the types are " + to_string(types) + ", which are not in the ladder");
    }
    return it - ladder.begin();
}

struct sizes {
    size_t n_caches;  // about a third of the full size of the caches in the first type. all of it, if they do not grow
    size_t n_compute; // growth of the compute buffers, which does not depend on the types
};

sizes measure(side & s, const session_params & sp, const std::vector<ggml_type> & ladder, uint32_t n_batch, uint32_t n) {
    const memory_budget none = make_budget(0, {});

    session c(s, with_budget(sp, none), "measured");

    const auto n_budget = [&] { return llama_memory_budget_get_usage(none.get()).committed; };

    const size_t n_states = llama_get_memory_usage(c.ctx).committed - n_budget(); // recurrent states, which the budget does not count
    const auto   n_caches = [&] { return llama_get_memory_usage(c.ctx).committed - n_states; };

    std::vector<size_t> all = { n_caches() };
    for (uint32_t i = 0; i < n; i += n_batch) {
        c.try_fill(n_batch);
        all.push_back(n_caches());
    }
    const auto third = std::find_if(all.begin(), all.end(), [&](size_t size) { return size > all.front() && size >= all.back()*3/10; });

    size_t n_compute = n_budget() - n_caches();
    for (const ggml_type type : ladder) {
        c.try_retype({ type, type });
        n_compute = std::max(n_compute, n_budget() - n_caches());
    }
    return { third == all.end() ? all.back() : *third, n_compute };
}

// change the types to `to`, in as many steps as the budget needed (n_down). More steps would lose more precision
void retype_by_hand(session & c, const std::vector<ggml_type> & ladder, const cell_types & to, uint32_t n_down) {
    size_t i = rung(ladder, c.types());
    while (i + n_down < rung(ladder, to)) {
        ++i; // this step was combined with the next one
    }
    while (i < rung(ladder, to)) {
        ++i;
        if (c.try_retype({ ladder[i], ladder[i] }) != LLAMA_MEMORY_TYPE_OK) {
            throw check_failed("the reference change to " + to_string(c.types()) + " is refused");
        }
    }
}

// decode until all n cells are used, or until the budget refuses a batch, and compare each answer
// is_tight: the budget has no room for larger compute buffers. So a change to smaller types may not make enough room, because
// the compute buffers can grow by more bytes than the change frees
void step_down(
        side & s, session & is, session & other, const memory_budget & budget, bool is_tight, const std::vector<ggml_type> & ladder, uint32_t n_batch, uint32_t n) {
    // with growth by copy, a growth can still fail after a change of types that should make enough room. The types then change
    // again in the same batch
    const bool in_place = is.is_in_place();

    uint32_t i = 0;
    for (; i < n; i += n_batch) {
        const cell_types before = is.types();
        const uint32_t   n_rung = llama_memory_budget_get_usage(budget.get()).n_down;
        const answer     cur    = fill(s, is, n_batch);
        const auto       usage  = llama_memory_budget_get_usage(budget.get());

        const std::string at = "at cell " + std::to_string(i) + ", with " + to_string(cur.types) + ": ";

        if (usage.committed > usage.n_bytes) {
            throw check_failed(at + std::to_string(usage.committed) + " bytes are used of a budget of " + std::to_string(usage.n_bytes));
        }
        if (rung(ladder, cur.types) < rung(ladder, before)) {
            throw check_failed(at + "a change to a larger type while cells are in use");
        }
        if (cur.rc != 0) {
            if (cur.rc != 1 || (!is_tight && rung(ladder, cur.types) + 1 != ladder.size())) {
                throw check_failed(at + "the batch returns " + std::to_string(cur.rc));
            }
            break;
        }
        if (in_place && usage.n_down - n_rung > 1) {
            throw check_failed(at + "two steps down although one was enough");
        }
        retype_by_hand(other, ladder, cur.types, usage.n_down - n_rung);
        if (fill(s, other, n_batch).logits != cur.logits) {
            throw check_failed(at + "the answer differs from that after the reference change");
        }
    }

    const uint32_t n_down = llama_memory_budget_get_usage(budget.get()).n_down;
    const std::string name = is_tight ? "tight " : "";
    s.out.measure(name + "rungs", n_down);
    s.out.measure(name + "cells", i);
    if (n_down >= ladder.size()) {
        throw check_failed(std::to_string(n_down) + " steps down for " + std::to_string(ladder.size()) + " types");
    }
}

// copy a sequence to another stream, although the budget has no room for the copy in the current types
void copy_beyond(side & s, session_params sp, const std::vector<ggml_type> & ladder) {
    const uint32_t n = 1000; // the batch needs as many cells as a growth adds

    trace_writer out(nullptr);
    side         nowhere(s, out); // without a trace, because a static cache has nothing to compare

    sp.n_seqs  = 2;
    sp.unified = false;
    sp.n_cells = 4096;

    const auto copy_and_go_on = [&](session & c) {
        c.cp(0, 1);
        const int32_t rc = c.fill_order({ 1 });
        return answer { rc, c.types(), c.logits() };
    };

    const memory_budget none = make_budget(0, {});
    session free(nowhere, with_budget(sp, none), "copied");
    free.fill_seq(0, n);
    const size_t n_before = llama_memory_budget_get_usage(none.get()).committed;
    copy_and_go_on(free);
    const size_t n_after  = llama_memory_budget_get_usage(none.get()).committed;

    const memory_budget budget = make_budget((n_before + n_after)/2, ladder);
    session is   (nowhere, with_budget(sp, budget), "copied, budget");
    session other(nowhere, sp, "copied, by hand");

    is.fill_seq(0, n);
    other.fill_seq(0, n);

    const answer cur   = copy_and_go_on(is);
    const auto   usage = llama_memory_budget_get_usage(budget.get());

    if (usage.committed > usage.n_bytes) {
        throw check_failed("copied, " + std::to_string(usage.committed) + " bytes are used of a budget of " + std::to_string(usage.n_bytes));
    }
    if (cur.rc != 0 || (n_after > n_before && rung(ladder, cur.types) == 0)) {
        throw check_failed("copied, the batch returns " + std::to_string(cur.rc) + ", with " + to_string(cur.types));
    }
    if (n_after == n_before && rung(ladder, cur.types) > 0) {
        throw check_failed("copied, the cells change to " + to_string(cur.types) + " for a copy that needs no memory");
    }
    retype_by_hand(other, ladder, cur.types, usage.n_down);
    if (copy_and_go_on(other).logits != cur.logits) {
        throw check_failed("copied, the answer differs from that after the reference change");
    }
    s.out.measure("copied rungs", usage.n_down);
}

} // namespace

static void kv_check_retype_budget(side & s) {
    session_params sp = kv_check_base(s);

    const std::vector<ggml_type> ladder = make_ladder(s, sp);
    if (s.is_recurrent || ladder.size() < 2) {
        throw check_skipped("the model has no cells that could change");
    }
    sp.types = { ladder[0], ladder[0] };

    const uint32_t n_batch = 10;
    const uint32_t n       = s.params.n_ctx > 0 || s.params.fallback ? kv_check_n_fill(s.params) : 1000; // enough cells for two steps
    {
        session c(s, sp, "plain");
        if (c.types().k == GGML_TYPE_COUNT) {
            throw check_skipped("the types of these cells cannot change: this upstream does not support it, or there are no cells");
        }
        c.fill(n_batch);
        c.fill(n - n_batch); // without a budget: if the model fails here, this is a failure of upstream
    }

    const sizes measured = measure(s, sp, ladder, n_batch, n);

    s.out.event(TRACE_OURS, "", 0);

    for (const bool is_tight : { false, true }) {
        const memory_budget budget = make_budget(measured.n_caches + (is_tight ? 0 : measured.n_compute), ladder);

        session is   (s, with_budget(sp, budget), is_tight ? "tight" : "budget");
        session other(s, sp, "by hand");
        if (s.dynamic) {
            step_down(s, is, other, budget, is_tight, ladder, n_batch, n);
        } else { // a static cache does not grow, so it cannot exceed a budget
            for (uint32_t i = 0; i < n; i += n_batch) {
                is.try_fill(n_batch);
            }
        }

        // an empty cache returns to its first types, even after a refused change
        if (is.try_retype({ GGML_TYPE_Q4_K, GGML_TYPE_Q4_K }) == LLAMA_MEMORY_TYPE_OK) {
            throw check_failed("an impossible type is reported as possible");
        }
        is.clear(true);
        if (!(is.types() == sp.types)) {
            throw check_failed("empty, the types are " + to_string(is.types()));
        }
        is.fill(60);
        is.generate(2);

        // a context that is freed releases exactly its share of the budget
        const auto   n_taken = [&] { return llama_memory_budget_get_usage(budget.get()).committed; };
        const size_t n_alone = n_taken();
        {
            const session second(s, with_budget(sp, budget), "second");
        }
        if (n_taken() != n_alone) {
            throw check_failed("after a context was created and freed, " + std::to_string(n_taken()) + " bytes are used instead of " + std::to_string(n_alone));
        }
    }

    // Skip the copy in two cases. A model with few positions cannot use so many cells. For minimax-m3,
    // llama_context::sched_reserve() reserves too little for a batch of one sequence with several streams. So the compute buffers
    // grow within the batch, which a budget cannot foresee.
    if (s.dynamic && !s.params.fallback && s.arch != "minimax-m3") {
        copy_beyond(s, sp, ladder);
    }
}

static const kv_check_registration scenarios({
    { "retype-budget",   kv_check_retype_budget,   "retype-budget", false },
});

#pragma once

// What the projector and the draft model take of --kv-budget while they are loaded.
//
// A draft on demand takes only what is free: it is worth less than any of these.
//
// Of server_context_impl (impl_t), included there once the slots are defined. Before one of them is loaded there must be
// room. What is given up for it, in this order: a draft that came on demand (for the projector), the cells of idle slots, those that
// slots that have not started have of before, the precision of those that are left.

#include "server-common.h"
#include "server-refusal.h"

#include "llama-kv.h"
#include "llama.h"

#include <cstddef>
#include <functional>

template <typename impl_t>
class server_budget {
public:
    explicit server_budget(impl_t & impl) : impl(impl) {}

    // load_model(), at its end: returns false if what is loaded leaves no room for the caches
    bool init() {
        if (!budget()) {
            return true;
        }

        n_bytes_mctx  = 0;
        n_bytes_draft = 0;
        llama_memory_budget_set_other(budget(), 0, nullptr);

        try {
            impl.mctx.set_on_bytes([this](size_t n_bytes) {
                set("multimodal projector", n_bytes_mctx, n_bytes, [this]() {
                    impl.draft_make_room();
                    return true;
                });
            });
            impl.draft_set_on_bytes([this](size_t n_bytes) {
                set("draft model", n_bytes_draft, n_bytes, [this]() { return impl.draft_may_take_others(); });
            });
        } catch (const server_refusal & e) {
            SRV_ERR("%s\n", e.what());
            return false;
        }

        while (!keep(false, true) && (impl.draft_let_go() || impl.mctx.let_go())) {
        }
        if (is_passed()) {
            const auto usage = llama_memory_budget_get_usage(budget());

            SRV_ERR("--kv-budget is %.2f MiB, and the KV cache begins with %.2f MiB\n", usage.n_bytes/1024.0/1024.0, usage.committed/1024.0/1024.0);
            return false;
        }

        return true;
    }

    // what is taken already, as a context begins with cells: returns false if it stays above the budget
    // others: idle slots may give up their cells, smaller: those that are left may take the next types
    bool keep(bool others, bool smaller) {
        while (is_passed() && others && (impl.clear_idle_slot() || impl.pool_clear_started())) {
        }
        for (auto * ctx : { impl.ctx_tgt, impl.ctx_dft }) {
            if (is_passed() && smaller && ctx) {
                llama_memory_budget_set_other(budget(), n_bytes_mctx + n_bytes_draft, ctx);
            }
        }

        return !is_passed();
    }

    // is there something that came on demand, and goes again for the cells?
    bool has_spare() const {
        return impl.draft_is_on_demand() || impl.mctx.is_spare();
    }

    // main loop: the first of it goes. returns false if there is none, or somebody uses it
    bool drop_spare() {
        return impl.draft_make_room() || impl.mctx.give_way();
    }

private:
    // is more taken than there is?
    bool is_passed() {
        const auto usage = budget() ? llama_memory_budget_get_usage(budget()) : llama_memory_budget_usage {};

        return usage.n_bytes > 0 && usage.committed > usage.n_bytes;
    }

    // throws server_refusal: then it is as before, but for the cells of idle slots
    // make_room: what goes first, returns false if nothing else may
    void set(const char * what, size_t & n_bytes, size_t n_bytes_new, const std::function<bool()> & make_room) {
        const size_t n_bytes_old = n_bytes;

        const auto try_set = [&](llama_context * ctx) {
            n_bytes = n_bytes_new;
            if (llama_memory_budget_set_other(budget(), n_bytes_mctx + n_bytes_draft, ctx)) {
                return true;
            }
            n_bytes = n_bytes_old;
            return false;
        };

        const bool is_less = n_bytes_new <= n_bytes_old;

        bool has_room = try_set(is_less ? impl.ctx_tgt : nullptr);
        if (is_less && impl.ctx_dft) {
            try_set(impl.ctx_dft);
        }

        const auto usage = llama_memory_budget_get_usage(budget());
        if (!has_room && n_bytes_new <= usage.n_bytes && make_room()) {
            has_room = try_set(nullptr);
            while (!has_room && (impl.clear_idle_slot() || impl.pool_clear_started())) {
                has_room = try_set(nullptr);
            }
            has_room = has_room || try_set(impl.ctx_tgt) || (impl.ctx_dft && try_set(impl.ctx_dft));
        }

        impl.memory.update(impl.ctx_tgt, impl.ctx_dft);

        if (!has_room) {
            throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, string_format("the budget has no room for the %s: %zu bytes, %zu of %zu are taken",
                    what, n_bytes_new, usage.committed, usage.n_bytes));
        }
    }

    llama_memory_budget * budget() {
        return impl.params_base.kv_budget.get();
    }

    size_t n_bytes_mctx  = 0;
    size_t n_bytes_draft = 0;

    impl_t & impl;
};

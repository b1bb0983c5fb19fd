#include "server-budget.h"

#include "server-common.h"
#include "server-memory.h"
#include "server-refusal.h"

#include "llama.h"

server_budget::server_budget(
        const common_params & params, const server_contexts & ctxs, server_memory_policy & policy,
        server_draft & draft, server_projector & projector, server_memory_stats & stats)
    : params(params), ctxs(ctxs), policy(policy), draft(draft), projector(projector), stats(stats) {}

bool server_budget::init() {
    if (!budget()) {
        return true;
    }
    if (params.cache_ram_budget && !server_memory_is_host(params)) {
        SRV_ERR("%s\n", "--cache-ram budget: the cells are in the memory of a device, and conversations are in RAM, so that one limit cannot "
                "serve both. set --cache-ram MIB, or keep the cells in RAM with --no-kv-offload");
        return false;
    }

    n_bytes_projector = 0;
    n_bytes_draft     = 0;
    llama_memory_budget_set_other(budget(), 0, nullptr);

    draft.set_fits([this](bool may_take_others) { return fits(may_take_others, may_take_others); });

    try {
        projector.set_on_bytes([this](size_t n_bytes) {
            set("multimodal projector", n_bytes_projector, n_bytes, [this](const fits_t & fits) {
                policy.drop_spare_draft();
                return policy.make_room_for_component(fits, true, true);
            });
        });
        draft.set_on_bytes([this](size_t n_bytes) {
            set("draft model", n_bytes_draft, n_bytes, [this](const fits_t & fits) {
                return draft.may_take_others() && policy.make_room_for_component(fits, true, true);
            });
        });
    } catch (const server_refusal & e) {
        SRV_ERR("%s\n", e.what());
        return false;
    }

    // If the caches do not fit into the budget, free the draft. If they still do not fit, free the projector. A component that
    // must always be loaded is not freed. Components are freed here when the server wakes up and the budget has less room than
    // at the start of the server.
    while (!fits(false, true) && (draft.stay_unloaded() || projector.stay_unloaded())) {
    }
    if (is_exceeded()) {
        const auto usage = llama_memory_budget_get_usage(budget());

        SRV_ERR("--kv-budget is %.2f MiB, and the KV cache begins with %.2f MiB\n", usage.n_bytes/1024.0/1024.0, usage.committed/1024.0/1024.0);
        return false;
    }

    return true;
}

bool server_budget::fits(bool may_clear, bool may_shrink) {
    return policy.make_room_for_component([this](llama_context * ctx) {
        llama_memory_budget_set_other(budget(), n_bytes_projector + n_bytes_draft, ctx); // also reclaims conversations
        return !is_exceeded();
    }, may_clear, may_shrink);
}

bool server_budget::is_exceeded() const {
    const auto usage = budget() ? llama_memory_budget_get_usage(budget()) : llama_memory_budget_usage {};

    return usage.n_bytes > 0 && usage.committed > usage.n_bytes;
}

void server_budget::set(const char * what, size_t & n_bytes, size_t n_bytes_new, const std::function<bool(const fits_t &)> & make_room) {
    const size_t n_bytes_old = n_bytes;

    const auto try_set = [&](llama_context * ctx) {
        n_bytes = n_bytes_new;
        if (llama_memory_budget_set_other(budget(), n_bytes_projector + n_bytes_draft, ctx)) {
            return true;
        }
        n_bytes = n_bytes_old;
        return false;
    };

    const bool is_less = n_bytes_new <= n_bytes_old;

    bool has_room = try_set(is_less ? ctxs.ctx_tgt : nullptr);
    if (is_less && ctxs.ctx_dft) {
        try_set(ctxs.ctx_dft);
    }

    const auto usage = llama_memory_budget_get_usage(budget());
    if (!has_room && n_bytes_new <= usage.n_bytes) {
        has_room = make_room(try_set);
    }

    stats.update(ctxs.ctx_tgt, ctxs.ctx_dft);

    if (!has_room) {
        throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, string_format("the budget has no room for the %s: %zu bytes, %zu of %zu are taken",
                what, n_bytes_new, usage.committed, usage.n_bytes));
    }
}

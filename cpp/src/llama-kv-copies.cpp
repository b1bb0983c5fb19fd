#include "llama-kv-copies.h"

#include "llama-context.h"
#include "llama-kv-dynamic-cache.h"
#include "llama-kv-dynamic.h"

#include <utility>

void llama_kv_copies::update() {
    dyn.lctx.sched_reserve(); // a reservation may be due. it must run now, because the update does not expect another scheduler
    dyn.lctx.memory_update(false);
    dyn.synchronize();
}

bool llama_kv_copies::finish_copies() {
    // change the cells to smaller types, and try the copies again, until there is memory for all copies
    while (dyn.any([](const auto * cache) { return cache->copies.is_late(); })) {
        if (!dyn.limit().step_down()) {
            dyn.forget();
            return false;
        }
        update();
    }

    return true;
}

bool llama_kv_copies::finish_update() {
    if (!finish_copies()) {
        return false;
    }

    // change the cells to smaller types, and try the shift again, until there is memory for its graph
    while (dyn.is_enabled() && has_late_shift && dyn.any([](const auto * cache) { return cache->copies.has_shift(); })) {
        if (!dyn.limit().step_down()) {
            return false;
        }
        has_late_shift = false;
        update();
    }
    has_late_shift = false;

    if (std::exchange(has_shifted, false)) {
        dyn.limit().fit_compute();
    }

    return true;
}

void llama_kv_copies::begin_shift() {
    // count the bytes, which can throw, only before the first range of rows. After a range was shifted, nothing may throw
    if (!std::exchange(has_shifted, true)) {
        dyn.limit().begin_account();
    }
}

void llama_kv_copies::set_late_shift() {
    has_late_shift = true;
    dyn.compute.set_lost();
}

bool llama_kv_copies::is_pending(llama_seq_id seq_id) const {
    return dyn.any([&](const auto * cache) {
        return cache->copies.has_copy(seq_id) || (has_late_shift && cache->copies.has_shift(seq_id));
    });
}

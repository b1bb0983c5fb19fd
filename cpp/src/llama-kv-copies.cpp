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
    // change to smaller types as long as a copy finds no memory
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

    // change to smaller types as long as the shift finds no memory for its graph
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
    // count the bytes only before the first range: after a range was shifted, nothing may throw
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

#pragma once

// Slots that nobody uses give their memory back after a while (--kv-idle-release).
//
// A part of server_context_impl (impl_t), included there once the slots are defined. What is on a device goes to --cache-ram, where
// that is on. In host memory that would be the same memory once more: it is forgotten, and the prompt cache with it when nobody
// has used any slot for that long.

#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

template <typename impl_t>
class server_idle {
protected:
    // main loop, now and then
    void idle_release() {
        const int64_t t_max = self().params_base.kv_idle_release*int64_t(1000*1000);
        if (t_max < 0) {
            return;
        }

        const int64_t t_now = ggml_time_us();

        auto & slots = self().slots;
        t_since.resize(slots.size(), t_now);

        for (auto & slot : slots) {
            auto & t = t_since[slot.id];

            // also one that was restored from a file has its time
            const bool is_empty = slot.prompt.n_tokens() == 0;

            t = slot.is_processing() || is_empty ? t_now : std::max(t, slot.t_last_used);
            t_busy = std::max(t_busy, slot.is_processing() ? t_now : slot.t_last_used);
            if (t_now - t >= t_max && !is_empty && !slot.is_processing()) {
                release(slot);
            }
        }

        auto & cache = self().prompt_cache;
        if (t_now - t_busy >= t_max && cache && !cache->states.empty() && self().pool_is_in_ram()) {
            SRV_INF("idle, dropping the prompt cache, %zu prompts\n", cache->states.size());
            cache->states.clear();
#ifdef __GLIBC__
            malloc_trim(0); // it keeps freed blocks of some MiB
#endif
        }
    }

private:
    void release(server_slot & slot) {
        SLT_INF(slot, "idle, giving back the cells of %d tokens\n", slot.prompt.n_tokens());

        if (!self().pool_is_in_ram()) {
            self().pool_save(slot);
        }
        slot.prompt_clear();

        self().memory.update(self().ctx_tgt, self().ctx_dft, true);
    }

    std::vector<int64_t> t_since; // by slot: when it was last seen in use, or empty

    int64_t t_busy = 0; // when one was

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }
};

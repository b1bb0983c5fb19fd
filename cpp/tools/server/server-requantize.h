#pragma once

#include "server-common.h"
#include "server-contexts.h"
#include "server-memory-stats.h"
#include "server-queue.h"
#include "server-slot.h"

#include "llama.h"

#include <cstddef>

// Change the types of a live KV cache: POST /requantize_kvcache {"ctk": TYPE, "ctv": TYPE, "ctkd": TYPE, "ctvd": TYPE}
//
// The change is made between two batches. Slots may be generating: positions and cells stay.
class server_requantize {
public:
    server_requantize(const server_contexts & ctxs, server_slots & slots, server_memory_stats & stats, server_queue & queue_tasks);

    // main loop: change the types, and return the response. throw server_refusal if that fails. nothing has changed then, unless
    // the device has failed
    json run(const json & body);

    // main loop, before a task and before a batch is made: clear the slots whose cells are lost
    // a device that fails during a change of types loses all cells. slots with tokens in a batch end there (llama_decode()
    // returns -3), the others process their prompts again
    void clear_lost();

    // the same for a slot whose prompt begins: while a batch is made, other prompts are read and media are decoded
    void clear_lost(int id_slot);

private:
    // types of the cells of a context
    struct types_t {
        ggml_type k = GGML_TYPE_COUNT; // COUNT: the context has no KV cells
        ggml_type v = GGML_TYPE_COUNT;

        static types_t of(const llama_context * ctx);

        // return these types, overridden by the types of the request. throw server_refusal
        types_t with(const json & body, const char * key_k, const char * key_v) const;

        bool is_none() const { return k == GGML_TYPE_COUNT; }

        bool operator==(const types_t & other) const { return k == other.k && v == other.v; }
    };

    // types and bytes of all contexts
    struct state_t {
        types_t tgt;
        types_t dft;

        size_t n_bytes = 0;

        json to_json() const;
    };

    state_t state() const;

    // change the types of a context. throw server_refusal
    // whose: "draft " or "", for the message
    void set(llama_context * ctx, const types_t & from, const types_t & to, const char * whose);

    const server_contexts & ctxs;
    server_slots          & slots;
    server_memory_stats   & stats;
    server_queue          & queue_tasks;
};

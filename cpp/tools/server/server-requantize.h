#pragma once

#include "server-common.h"
#include "server-contexts.h"
#include "server-memory-stats.h"
#include "server-queue.h"
#include "server-slot.h"

#include "llama.h"

#include <cstddef>

// Changes the types of a KV cache in use: POST /requantize_kvcache {"ctk": TYPE, "ctv": TYPE, "ctkd": TYPE, "ctvd": TYPE}
//
// The change is made between two batches. Slots may be generating, because positions and cells stay the same.
class server_requantize {
public:
    server_requantize(const server_contexts & ctxs, server_slots & slots, server_memory_stats & stats, server_queue & queue_tasks);

    // change the types, and return the response. Call this on the main loop
    // throw server_refusal if the change fails. Nothing has changed then, unless the device has failed.
    json run(const json & body);

    // clear the slots whose cells were lost. The main loop calls this before a task and before a batch is made
    // If a device fails during a change of types, all cells are lost. Slots with tokens in a batch end, because llama_decode()
    // returns -3. The other slots process their prompts again.
    void clear_lost();

    // do the same for one slot, before its prompt is processed. Its cells can also be lost while a batch is made, because the
    // server restores prompts and decodes media at that time
    void clear_lost(int id_slot);

private:
    // types of the cells of a context
    struct types_t {
        ggml_type k = GGML_TYPE_COUNT; // GGML_TYPE_COUNT means: the context has no KV cells
        ggml_type v = GGML_TYPE_COUNT;

        static types_t of(const llama_context * ctx);

        // return the types of the request. A type that is not in the request stays the same. throw server_refusal if a type is unknown
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

    // change the types of a context. throw server_refusal if that fails
    // whose: "draft " or "", for the error message
    void set(llama_context * ctx, const types_t & from, const types_t & to, const char * whose);

    const server_contexts & ctxs;
    server_slots          & slots;
    server_memory_stats   & stats;
    server_queue          & queue_tasks;
};

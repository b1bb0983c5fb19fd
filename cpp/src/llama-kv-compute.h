#pragma once

// Compute buffers of one llama_context, which grow together with its KV caches (--kv-dynamic)
//
// A graph over larger caches needs larger compute buffers. The scheduler of the context owns the compute buffers. If the
// scheduler finds no memory for larger compute buffers, the existing compute buffers are lost, too. The context then needs a
// new scheduler.
//
// Compute buffers never shrink by themselves.
//
// This class is a friend of llama_context. The other classes of the dynamic KV cache access the context through this class.

#include "ggml-backend.h"

#include <cstddef>

struct llama_context;

class llama_kv_compute {
public:
    explicit llama_kv_compute(llama_context & lctx) : lctx(lctx) {}

    llama_kv_compute(const llama_kv_compute &) = delete;
    llama_kv_compute & operator=(const llama_kv_compute &) = delete;

    // check whether the context trains. Then its scheduler and its types must not change
    bool is_training() const;

    ggml_abort_callback abort_callback()      const;
    void *              abort_callback_data() const;

    // wait for the graphs of this context that may use the storage
    // This is not llama_context::synchronize(), which would count the tokens of the batch that is being prepared as evaluated.
    void synchronize() const;

    // build the graph for the largest batch, and split it over the backends. null: there is no memory
    // split_only: do not allocate compute buffers for the graph
    ggml_cgraph * build_graph(bool split_only);

    // drop all graphs that were built so far, so that none of them runs again
    void drop_graphs();

    // check whether the compute buffers must grow, because the caches have grown
    bool is_too_small() const { return too_small; }
    void set_too_small(bool val) { too_small = val; }

    // check whether the scheduler has lost its compute buffers, because it found no memory for larger ones
    bool is_lost() const { return lost; }
    void set_lost() { lost = true; }

    // reserve compute buffers for the current caches. returns false if there is no memory
    bool reserve_graph();

    // reserve compute buffers for the current caches, if they are too small
    // last: this is the last attempt. If it fails, reserve everything again with a new scheduler, and if that fails, without
    //       pipeline parallelism (llama_context::sched_reserve())
    // returns false if there is no memory
    bool reserve(bool last);

    // replace the scheduler by a scheduler without compute buffers. Do not call this during training, because training keeps a
    // pointer to the old scheduler
    void create_sched();

    // replace the scheduler, and reserve compute buffers for the current caches
    // If there is no memory for that, each graph allocates its own compute buffers.
    void reset_sched();

    // bytes of the compute buffers
    size_t n_bytes() const;

private:
    llama_context & lctx;

    bool too_small = false;
    bool lost      = false;
};

#pragma once

// Compute buffers of one llama_context, which follow its KV caches (--kv-dynamic)
//
// A graph over larger caches needs larger compute buffers. The scheduler of the context has them: a reservation that finds no
// memory costs the scheduler the buffers that it had, and the context needs a new scheduler.
//
// Compute buffers keep the size that they have grown to.
//
// This class is the friend of llama_context: the other classes of the dynamic KV cache reach the context through it.

#include "ggml-backend.h"

#include <cstddef>

struct llama_context;

class llama_kv_compute {
public:
    explicit llama_kv_compute(llama_context & lctx) : lctx(lctx) {}

    llama_kv_compute(const llama_kv_compute &) = delete;
    llama_kv_compute & operator=(const llama_kv_compute &) = delete;

    // the context trains: its scheduler and its types stay
    bool is_training() const;

    ggml_abort_callback abort_callback()      const;
    void *              abort_callback_data() const;

    // wait for the graphs of this context that may use the storage
    // not llama_context::synchronize(), which would count the tokens of the batch that is being prepared as evaluated
    void synchronize() const;

    // build the graph for the worst case, with its compute buffers or only split over the backends. null: no memory
    ggml_cgraph * build_graph(bool split_only);

    // drop all graphs that were built so far: none of them may run again
    void drop_graphs();

    // check whether the caches have outgrown the compute buffers
    bool is_too_small() const { return too_small; }
    void set_too_small(bool val) { too_small = val; }

    // the scheduler has lost its compute buffers
    bool is_lost() const { return lost; }
    void set_lost() { lost = true; }

    // reserve compute buffers for the caches as they are. returns false when there is no memory
    bool reserve_graph();

    // the same if they are too small
    // last: if need be from scratch, and without pipeline parallelism
    bool reserve(bool last);

    // replace the scheduler by one without compute buffers. not while the context trains, which keeps the scheduler
    void create_sched();

    // the same, and reserve compute buffers for the current caches if there is memory. otherwise, each graph allocates its own
    void reset_sched();

    // bytes of the compute buffers
    size_t n_bytes() const;

private:
    llama_context & lctx;

    bool too_small = false;
    bool lost      = false;
};

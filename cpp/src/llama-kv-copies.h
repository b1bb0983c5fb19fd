#pragma once

// Pending stream copies and K-shifts of all caches of one llama_context (--kv-dynamic)
//
// llama_memory_seq_cp() between streams, and llama_memory_seq_add(), are done before the next batch. In place they can need memory.
// A copy or a shift that finds none is late: it waits for the next batch, which does not run before it is done. The part of
// one cache is llama_kv_cache_copies.

#include "llama.h"

class llama_kv_dynamic;

class llama_kv_copies {
public:
    explicit llama_kv_copies(llama_kv_dynamic & dyn) : dyn(dyn) {}

    // make the pending copies and shifts
    void update();

    // do the late copies, in smaller types if the limit has any. returns false when there is still no memory for them
    bool finish_copies();

    // do the late copies and shifts, before a batch is placed: to undo the placement would lose a shift that waits after a copy
    // throws std::bad_alloc
    bool finish_update();

    // a shift is about to run, of any cache
    void begin_shift();

    // the shift found no memory for its graph
    void set_late_shift();

    // check whether a copy, or a late shift, of the sequence or of all (-1) is still to be done
    bool is_pending(llama_seq_id seq_id) const;

private:
    llama_kv_dynamic & dyn;

    bool has_shifted    = false; // since the last batch
    bool has_late_shift = false;
};

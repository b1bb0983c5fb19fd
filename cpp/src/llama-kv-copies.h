#pragma once

// Pending stream copies and K-shifts of all caches of one llama_context (--kv-dynamic)
//
// llama_memory_seq_cp() between streams, and llama_memory_seq_add(), only record a copy or a shift. The copies and shifts are
// made before the next batch. With storage in place, a copy or a shift can need memory. A copy or a shift that finds no memory
// is late: it stays pending, and no batch runs before it is done.
//
// llama_kv_cache_copies does this work for one cache.

#include "llama.h"

class llama_kv_dynamic;

class llama_kv_copies {
public:
    explicit llama_kv_copies(llama_kv_dynamic & dyn) : dyn(dyn) {}

    // make the pending copies and shifts, as far as there is memory
    void update();

    // make the late copies. If memory is missing, first change the cells to smaller types, if the limit allows that
    // returns false if there is still no memory for a copy
    bool finish_copies();

    // make the late copies and shifts. Call this before llama_kv_cache::prepare() chooses the cells of a batch
    // prepare() also restores the old cells, and a shift that still waits for a copy is lost with that. So no shift may wait
    // when prepare() is called.
    // throws std::bad_alloc
    bool finish_update();

    // note that a K-shift of one of the caches is about to run
    void begin_shift();

    // note that a K-shift must wait, because there was no memory for its graph
    void set_late_shift();

    // check whether a copy to the stream of this sequence is pending (see llama_kv_cache_copies::has_copy()), or a late shift
    // of this sequence. -1: of any sequence
    bool is_pending(llama_seq_id seq_id) const;

private:
    llama_kv_dynamic & dyn;

    bool has_shifted    = false; // a shift has run since the last batch
    bool has_late_shift = false;
};

#pragma once

// Sequences whose cells were lost because a device failed in the middle of a change of types
//
// llama_decode() refuses a batch that continues such a sequence. It accepts the sequence again after the sequence was removed or
// restored, or if it begins at position 0.

#include "llama-cparams.h"

#include "llama.h"

#include <bitset>

class llama_batch_allocr;
struct llama_context;

class llama_kv_lost_seqs {
public:
    // clear the memory of the context, and remember the sequences that had cells
    void lose(llama_context & lctx);

    // allow a sequence again that was removed as a whole. -1: all sequences
    void forget(llama_seq_id seq_id);

    // note that a sequence is a copy of another one. A copy of a lost sequence is lost, too
    void copy(llama_seq_id seq_id_src, llama_seq_id seq_id_dst);

    // check whether the batch continues a lost sequence
    // A sequence that begins at 0 in the batch, or that was restored, is not lost any more.
    bool uses_lost_seq(const llama_context & lctx, const llama_batch_allocr & balloc);

private:
    std::bitset<LLAMA_MAX_SEQ> seqs;
};

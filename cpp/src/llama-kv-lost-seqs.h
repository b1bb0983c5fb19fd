#pragma once

// Sequences whose cells were lost with a device that failed in the middle of a change of types: llama_decode() refuses a batch
// that continues one of them, until the sequence is removed or restored, or begins at 0

#include "llama-cparams.h"

#include "llama.h"

#include <bitset>

class llama_batch_allocr;
struct llama_context;

class llama_kv_lost_seqs {
public:
    // clear the memory of the context, and note the sequences that had cells
    void lose(llama_context & lctx);

    // a sequence that was removed as a whole (-1: all of them) may be used again
    void forget(llama_seq_id seq_id);

    // a copy of a lost sequence is lost, too
    void copy(llama_seq_id seq_id_src, llama_seq_id seq_id_dst);

    // check whether the batch continues a lost sequence. a sequence that starts at 0 in the batch, or was restored, is not lost any more
    bool uses_lost_seq(const llama_context & lctx, const llama_batch_allocr & balloc);

private:
    std::bitset<LLAMA_MAX_SEQ> seqs;
};

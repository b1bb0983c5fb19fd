#pragma once

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <cstdint>

// The models and contexts of the server, as references to the members of the server context.
// The members change when the server sleeps or wakes up, and when a draft is loaded or unloaded.
struct server_contexts {
    llama_model   * & model_tgt;
    llama_context * & ctx_tgt;
    llama_model   * & model_dft; // null if there is no draft model
    llama_context * & ctx_dft;   // null if there is no draft

    common_context_seq_rm_type & ctx_tgt_seq_rm_type;
    common_context_seq_rm_type & ctx_dft_seq_rm_type;

    const int32_t & n_swa; // size of the target's attention window (SWA). 0 means: no window

    common_speculative_ptr             & spec;
    common_speculative_init_result_ptr & spec_init;

    // return true if a sequence can be cut after any token without restoring a checkpoint
    bool can_cut_anywhere() const {
        return n_swa == 0 && ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_PART;
    }
};

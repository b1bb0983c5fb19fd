#include "llama-kv-lost-seqs.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"

#include <algorithm>

void llama_kv_lost_seqs::lose(llama_context & lctx) {
    const auto & cparams = lctx.get_cparams();

    for (uint32_t s = 0; s < (cparams.kv_unified ? LLAMA_MAX_SEQ : cparams.n_seq_max); ++s) {
        seqs[s] = seqs[s] || lctx.get_memory()->seq_pos_max(s) >= 0;
    }

    lctx.get_memory()->clear(true);
}

void llama_kv_lost_seqs::forget(llama_seq_id seq_id) {
    if (seq_id < 0) {
        seqs.reset();
    } else if ((size_t) seq_id < seqs.size()) {
        seqs.reset(seq_id);
    }
}

void llama_kv_lost_seqs::copy(llama_seq_id seq_id_src, llama_seq_id seq_id_dst) {
    if (std::max<uint32_t>(seq_id_src, seq_id_dst) < seqs.size() && seqs[seq_id_src]) {
        seqs.set(seq_id_dst);
    }
}

bool llama_kv_lost_seqs::uses_lost_seq(const llama_context & lctx, const llama_batch_allocr & balloc) {
    for (uint32_t s = 0; seqs.any() && s < seqs.size(); ++s) {
        const llama_pos p0 = balloc.seq_pos_min(s);

        if (!seqs[s] || p0 < 0) {
            continue;
        }

        if (p0 > 0 && lctx.get_memory()->seq_pos_max(s) < 0) {
            LLAMA_LOG_ERROR("%s: the cells of sequence %u were lost when the device failed\n", __func__, s);
            return true;
        }

        seqs.reset(s); // it begins again at 0, or was restored
    }

    return false;
}

// Sequences whose cells went with a device that failed in the middle of a change of types: llama_decode() refuses what goes on with
// one of them, until it is removed or restored, or begins at 0

#include "llama-kv-dynamic.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"

#include <algorithm>

void llama_kv_dynamic::lose_cells() {
    const auto & cparams = lctx->cparams;

    for (uint32_t s = 0; s < (cparams.kv_unified ? LLAMA_MAX_SEQ : cparams.n_seq_max); ++s) {
        seqs_lost[s] = seqs_lost[s] || lctx->memory->seq_pos_max(s) >= 0;
    }

    lctx->memory->clear(true);
}

bool llama_kv_dynamic::goes_on_lost(const llama_batch_allocr & balloc) {
    for (uint32_t s = 0; seqs_lost.any() && s < seqs_lost.size(); ++s) {
        const llama_pos p0 = balloc.seq_pos_min(s);

        if (!seqs_lost[s] || p0 < 0) {
            continue;
        }

        if (p0 > 0 && lctx->memory->seq_pos_max(s) < 0) {
            LLAMA_LOG_ERROR("%s: the cells of sequence %u were lost when the device failed\n", __func__, s);
            return true;
        }

        seqs_lost.reset(s); // it begins anew, or was restored
    }

    return false;
}

void llama_kv_dynamic::follow_copy(const llama_memory_i * mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst) {
    const auto dyn = mem->kv_dynamic.lock();

    if (dyn && std::max<uint32_t>(seq_id_src, seq_id_dst) < dyn->seqs_lost.size() && dyn->seqs_lost[seq_id_src]) {
        dyn->seqs_lost.set(seq_id_dst);
    }
}

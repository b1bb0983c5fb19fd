// The cells of a batch that is tried, and taken back

#include "llama-kv-dynamic-cache.h"

#include <algorithm>
#include <array>
#include <vector>

llama_kv_cache::slot_info llama_kv_dynamic_cache::with_purged(llama_kv_cache::slot_info sinfo) const {
    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & cells = kv.v_cells[sinfo.strm[s]];

        // as llama_kv_cache::apply_ubatch(): the last position of each sequence that is overwritten
        std::array<llama_pos, LLAMA_MAX_SEQ> pos_max;
        pos_max.fill(-1);

        std::vector<llama_seq_id> seq_ids;

        for (const uint32_t idx : sinfo.idxs[s]) {
            for (llama_seq_id seq_id = 0; seq_id < LLAMA_MAX_SEQ && !cells.is_empty(idx); ++seq_id) {
                if (cells.seq_has(idx, seq_id)) {
                    if (pos_max[seq_id] < 0) {
                        seq_ids.push_back(seq_id);
                    }
                    pos_max[seq_id] = std::max(pos_max[seq_id], cells.pos_get(idx));
                }
            }
        }

        for (uint32_t i = 0; i < cells.used_max_p1() && !seq_ids.empty(); ++i) {
            const bool is_purged = !cells.is_empty(i) && std::any_of(seq_ids.begin(), seq_ids.end(), [&](llama_seq_id seq_id) {
                return cells.seq_has(i, seq_id) && cells.pos_get(i) <= pos_max[seq_id];
            });

            if (is_purged) {
                sinfo.idxs[s].push_back(i);
            }
        }
    }

    return sinfo;
}

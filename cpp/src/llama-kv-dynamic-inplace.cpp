// What llama_kv_cache does where its storage is in place, and giving memory back, in place or by copy

#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-compat.h"
#include "llama-kv-dynamic.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

// the blocks that are always there
static llama_kv_blocks dyn_blocks_start(const llama_kv_inplace & inplace, const llama_kv_growth & growth) {
    auto res = inplace.make_blocks();

    for (auto & stream : res) {
        for (uint32_t ib = 0; ib*inplace.n_block() < growth.start(); ++ib) {
            stream[ib] = true;
        }
    }

    return res;
}

bool llama_kv_cache::dyn_is_host(bool offload) const {
    const char * LLAMA_KV_DYNAMIC_STORAGE = getenv("LLAMA_KV_DYNAMIC_STORAGE");
    if (LLAMA_KV_DYNAMIC_STORAGE && strcmp(LLAMA_KV_DYNAMIC_STORAGE, "copy") == 0) {
        return false;
    }

    // one layout for all layers: a single one on a device and all of them grow by copy
    for (uint32_t il = 0; offload && il < llama_kv_compat_n_layer(hparams, 0); ++il) {
        if (hparams.has_kv(il) && ggml_backend_dev_buffer_type(model.dev_layer(il)) != ggml_backend_cpu_buffer_type()) {
            return false;
        }
    }

    return true;
}

ggml_backend_buffer_t llama_kv_cache::dyn_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    // the type of the buffers stays as it is: states that are kept on a device are found by it
    const auto alloc_to_copy = [&] {
        return buft == ggml_backend_cpu_buffer_type() ?
            llama_kv_pages_alloc(ctx, dyn->created) : ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    };

    if (!dyn || (!dyn->is_inplace && dyn->n_cells == dyn->n_max)) {
        return ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    }

    if (!dyn->is_inplace) {
        return alloc_to_copy();
    }

    std::vector<llama_kv_inplace::tensor> tensors;
    for (const auto & layer : layers) {
        tensors.push_back({ layer.k, false });
        if (layer.v) {
            tensors.push_back({ layer.v, v_trans });
        }
    }

    const llama_kv_growth growth = dyn->policy();

    dyn->inplace = llama_kv_inplace::create(ctx, tensors, growth.block());
    if (!dyn->inplace) {
        LLAMA_LOG_WARN("%s: no address range for the full KV cache, it grows by copy\n", __func__);
        dyn_to_copy(ctx);

        return alloc_to_copy();
    }

    if (!dyn->inplace->assign(dyn_blocks_start(*dyn->inplace, growth))) {
        ggml_backend_buffer_free(dyn->inplace->buffer());
        return nullptr;
    }

    LLAMA_LOG_INFO("%s: KV memory reserved = %8.2f MiB, committed = %8.2f MiB\n", __func__,
            dyn->inplace->n_bytes_reserved()/1024.0/1024.0, dyn->inplace->n_bytes_committed()/1024.0/1024.0);

    return dyn->inplace->buffer();
}

// the tensors have no memory yet: give them the size that a cache that grows by copy starts with
void llama_kv_cache::dyn_to_copy(ggml_context * ctx) {
    dyn->is_inplace = false;
    dyn->n_cells    = dyn->policy().start();

    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        const size_t i_stream = t->view_src ? t->view_offs/t->nb[2] : 0;

        t->ne[1] = dyn->n_cells;
        t->nb[2] = t->nb[1]*t->ne[1];
        t->nb[3] = t->nb[2]*t->ne[2];

        t->view_offs = i_stream*t->nb[2];
    }
}

// a block that was given out gets its pages, and the last run of them some more, as the growth policy says
bool llama_kv_cache::dyn_commit() {
    auto & inplace = *dyn->inplace;

    const auto unite = [](llama_kv_blocks a, const llama_kv_blocks & b) {
        for (size_t s = 0; s < a.size(); ++s) {
            for (size_t ib = 0; ib < a[s].size(); ++ib) {
                a[s][ib] = a[s][ib] || b[s][ib];
            }
        }
        return a;
    };

    const llama_kv_growth growth = dyn->policy();

    auto ahead = dyn->wanted;
    for (auto & stream : ahead) {
        size_t i1 = stream.size();
        while (i1 > 0 && !stream[i1 - 1]) {
            i1--;
        }

        size_t i0 = i1;
        while (i0 > 0 && stream[i0 - 1]) {
            i0--;
        }

        if (i0 < i1) {
            const uint32_t n_block = inplace.n_block();
            const uint32_t n_next  = growth.next(std::min<uint32_t>(i0*n_block, dyn->n_max), std::min<uint32_t>(i1*n_block, dyn->n_max));
            for (size_t ib = i1; ib*n_block < n_next; ++ib) {
                stream[ib] = true;
            }
        }
    }

    const uint32_t n_cur      = inplace.n_cells(inplace.blocks());
    const auto     smallest   = unite(inplace.blocks(), dyn->wanted);
    const auto     next       = unite(smallest, ahead);

    for (const auto & blocks : { next, smallest }) {
        const uint32_t n = inplace.n_cells(blocks);

        LLAMA_LOG_INFO("%s: resizing KV cache from %u to %u cells\n", __func__, n_cur, n);

        if (inplace.assign(blocks)) {
            dyn->dyn->count_grow(0);
            return true;
        }

        LLAMA_LOG_WARN("%s: not enough memory for %u cells\n", __func__, n);

        if (blocks == smallest) {
            break;
        }
    }

    return false;
}

bool llama_kv_cache::dyn_clear(llama_seq_id seq_id) {
    if (!dyn) {
        return false;
    }

    if (seq_id < 0) {
        dyn->n_rows_used = 0;
    }

    if (dyn->storage && seq_id < 0) {
        dyn->dyn->synchronize();
        dyn->storage->clear();
        return true;
    }

    if (!dyn->inplace) {
        return false;
    }

    dyn->dyn->synchronize();

    const uint32_t n_cur = dyn->inplace->n_cells(dyn->inplace->blocks());

    const auto start = dyn->dyn->is_max() ? dyn->inplace->blocks() : dyn_blocks_start(*dyn->inplace, dyn->policy());

    auto gone = dyn->inplace->make_blocks();
    auto rest = dyn->inplace->blocks();
    for (uint32_t s = 0; s < n_stream; ++s) {
        if (seq_id < 0 || s == (uint32_t) seq_id) {
            gone[s].assign(dyn->inplace->n_blocks(), true);
            for (uint32_t ib = 0; ib < dyn->inplace->n_blocks(); ++ib) {
                rest[s][ib] = rest[s][ib] && start[s][ib];
            }
        }
    }

    // what goes back is zero when it comes again. what shares a page with cells that stay does not go, be it freed before
    dyn->inplace->assign(rest);
    dyn->inplace->set_zero(gone);

    if (dyn->inplace->n_cells(rest) < n_cur) {
        dyn->dyn->count_shrink(0);
    }

    return true;
}

bool llama_kv_cache::dyn_copy_stream(uint32_t ssrc, uint32_t sdst) {
    if (!dyn || !dyn->inplace) {
        return false;
    }

    // in their order: what waits behind one that failed may be a copy of it
    bool res = sc_info.empty();

    try {
        res = res && dyn->inplace->copy_stream(ssrc, sdst);
    } catch (const std::bad_alloc &) {
        res = false;
    }

    if (!res) {
        LLAMA_LOG_WARN("%s: not enough memory to copy a sequence, the next batch tries again\n", __func__);

        sc_info.ssrc.push_back(ssrc);
        sc_info.sdst.push_back(sdst);

        dyn->has_late_copy = true;
        dyn->dyn->set_failed();
    }

    return true;
}

llama_kv_cache::row_ranges llama_kv_cache::dyn_shift_rows() const {
    row_ranges res;

    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE) {
        return res;
    }

    if (!dyn || !dyn->inplace) {
        res.emplace_back(0, (int64_t) get_size()*n_stream);
        return res;
    }

    for (uint32_t s = 0; s < n_stream; ++s) {
        for (const auto & [i0, i1] : dyn->inplace->runs(s)) {
            const int64_t ir = (int64_t) s*get_size() + i0;

            if (!res.empty() && res.back().first + res.back().second == ir) {
                res.back().second += i1 - i0;
            } else {
                res.emplace_back(ir, i1 - i0);
            }
        }
    }

    return res;
}

void llama_kv_cache::dyn_begin_shift(ggml_backend_sched_t sched, const row_ranges::value_type & rows) {
    // the input of the previous range is about to be overwritten
    if (rows.second < (int64_t) get_size()*n_stream) {
        ggml_backend_sched_synchronize(sched);
    }

    dyn_rows = rows;
}

void llama_kv_cache::dyn_set_shift(int32_t * data, int64_t ir, int32_t shift) const {
    if (ir >= dyn_rows.first && ir < dyn_rows.first + dyn_rows.second) {
        data[ir - dyn_rows.first] = shift;
    }
}

//
// give memory back
//

void llama_kv_cache::dyn_release() {
    // a copy that found no memory and that nobody waits for any more
    if (std::exchange(dyn->has_late_copy, false)) {
        stream_copy_info rest;
        for (size_t i = sc_info.ssrc.size(); i-- > 0; ) {
            const uint32_t sdst = sc_info.sdst[i];
            if (v_cells[sdst].get_used() > 0 || std::find(rest.ssrc.begin(), rest.ssrc.end(), sdst) != rest.ssrc.end()) {
                rest.ssrc.insert(rest.ssrc.begin(), sc_info.ssrc[i]);
                rest.sdst.insert(rest.sdst.begin(), sdst);
            }
        }
        sc_info = std::move(rest);
        dyn->has_late_copy = !sc_info.empty();
    }

    // copies of streams that are still to be done can be of cells that are free by now
    if (dyn->dyn->is_max() || !sc_info.empty() || (dyn->has_rows && dyn->n_rows_used > 0)) {
        return;
    }

    if (dyn->inplace) {
        dyn_release_blocks();
        return;
    }

    if (!dyn->storage) {
        return;
    }

    const std::vector<uint32_t> n_used = dyn_n_used();

    const uint32_t n_keep = *std::max_element(n_used.begin(), n_used.end());
    const uint32_t n_next = dyn->policy().shrink(dyn->n_cells, n_keep, dyn->n_peak);

    if (n_next >= dyn->n_cells) {
        return;
    }

    dyn_shrink(n_next, n_used);

    dyn->n_need = 0;
    dyn->n_peak = n_keep;
}

void llama_kv_cache::dyn_release_blocks() {
    auto & inplace = *dyn->inplace;

    const llama_kv_growth growth = { dyn->n_max*n_stream, dyn->n_pad, 0, true };

    const uint32_t n_cur = inplace.n_cells(inplace.blocks());

    uint32_t n_used = 0;
    for (uint32_t s = 0; s < n_stream; ++s) {
        n_used += v_cells[s].get_used();
    }

    // before the cells are looked at one by one: even if the cells in use were all next to each other
    if (growth.shrink(n_cur, n_used, n_cur) == n_cur) {
        return;
    }

    auto keep = dyn_blocks_start(inplace, dyn->policy());
    for (uint32_t s = 0; s < n_stream; ++s) {
        const uint32_t n = v_cells[s].used_max_p1();
        for (uint32_t i = 0; i < n; ++i) {
            if (!v_cells[s].is_empty(i)) {
                keep[s][i/inplace.n_block()] = true;
            }
        }
    }

    // what was given out but not committed stays so: such a cell has nothing in it
    for (uint32_t s = 0; s < n_stream; ++s) {
        for (uint32_t ib = 0; ib < inplace.n_blocks(); ++ib) {
            keep[s][ib] = keep[s][ib] && inplace.blocks()[s][ib];
        }
    }

    const uint32_t n_keep = inplace.n_cells(keep);
    if (growth.shrink(n_cur, n_keep, n_cur) == n_cur) {
        return;
    }

    LLAMA_LOG_INFO("%s: resizing KV cache from %u to %u cells\n", __func__, n_cur, n_keep);

    dyn->dyn->synchronize();

    inplace.assign(keep);
    dyn->dyn->count_shrink(0);
}

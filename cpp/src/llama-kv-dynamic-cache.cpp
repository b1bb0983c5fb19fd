#include "llama-kv-dynamic-cache.h"

#include "llama-impl.h"
#include "llama-kv-dynamic.h"
#include "llama-kv-graph.h"
#include "llama-kv-log.h"
#include "llama-kv-pages.h"
#include "llama-kv-usage.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <utility>

llama_kv_dynamic_cache::llama_kv_dynamic_cache(llama_kv_cache & kv, uint32_t n_max, bool offload) :
    dyn(llama_kv_dynamic::current()),
    owner(kv.other ? kv.other->dyn.get() : nullptr),
    n_max_cells(n_max),
    requested(*this),
    copies(*this, kv, kv.hparams, kv.sc_info, kv.v_cells, kv.seq_to_stream),
    planned(*this, kv.seq_to_stream, kv.n_stream),
    state(*this),
    kv(kv), offload(offload),
    rows(llama_kv_storage_create_fixed(kv.n_stream, n_max, kv.v_trans, kv.ctxs_bufs)) {
    if (owner) {
        if (dyn && owner->dyn) {
            owner->dyn->add_reader(dyn);
        }
    } else if (dyn) {
        dyn->add_cache(this);
    }
}

llama_kv_dynamic_cache::~llama_kv_dynamic_cache() {
    if (dyn) {
        dyn->remove_cache(this);
    }
}

//
// the storage
//

bool llama_kv_dynamic_cache::can_grow() const {
    if (!dyn || !dyn->is_enabled() || owner) {
        return false;
    }

    // With --split-mode tensor, the backend keeps a part of each tensor on every device. It identifies the parts by the address
    // of the tensor, which a growth would change.
    if (kv.model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        LLAMA_LOG_WARN("%s: the KV cache cannot grow with --split-mode tensor, it takes its full size\n", __func__);
        return false;
    }

    return true;
}

// create a storage in place. null: not possible for this memory, or not wanted
// All layers use the same kind of storage. If the memory of one layer has no pages, all layers grow by copy.
std::unique_ptr<llama_kv_storage> llama_kv_dynamic_cache::create_inplace() const {
    const char *      LLAMA_KV_DYNAMIC_STORAGE = getenv("LLAMA_KV_DYNAMIC_STORAGE");
    const std::string wanted                   = LLAMA_KV_DYNAMIC_STORAGE ? LLAMA_KV_DYNAMIC_STORAGE : "";

    if (wanted == "copy") {
        return nullptr;
    }
    if (LLAMA_KV_DYNAMIC_STORAGE && wanted != "inplace") {
        LLAMA_LOG_WARN("%s: LLAMA_KV_DYNAMIC_STORAGE=%s is neither copy nor inplace, and is ignored\n", __func__, wanted.c_str());
    }

    bool readable_uncommitted = true;

    for (uint32_t il = 0; offload && il < kv.hparams.n_layer_all; ++il) {
        if (kv.hparams.has_kv(il)) {
            ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(kv.model.dev_layer(il));

            if (llama_kv_pages::page_size(buft) == 0) {
                return nullptr;
            }
            readable_uncommitted = readable_uncommitted && llama_kv_pages::readable_uncommitted(buft);
        }
    }

    // In device memory, use this storage only if the user asks for it, because it has not run on a GPU yet.
    // Never use it there with transposed V: one page of a device has elements of a million rows, so a few rows would commit all
    // memory.
    if (!readable_uncommitted && (wanted != "inplace" || kv.v_trans)) {
        return nullptr;
    }

    return llama_kv_storage_create_inplace(kv.n_stream, n_max_cells, kv.n_pad, kv.v_trans, readable_uncommitted, kv.ctxs_bufs);
}

std::vector<llama_kv_storage::layer> llama_kv_dynamic_cache::layers() const {
    std::vector<llama_kv_storage::layer> res;
    for (const auto & l : kv.layers) {
        res.push_back({ l.k, l.v, l.k_stream, l.v_stream, l.il });
    }

    return res;
}

std::vector<llama_kv_storage::layer> llama_kv_dynamic_cache::layers_of(ggml_context * ctx) const {
    std::vector<llama_kv_storage::layer> res;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        for (const auto & l : kv.layers) {
            if (l.k == t) {
                res.push_back({ l.k, l.v, l.k_stream, l.v_stream, l.il });
            }
        }
    }

    return res;
}

ggml_backend_buffer_t llama_kv_dynamic_cache::alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const auto layers = layers_of(ctx);

    // A cache that shares the layers of another context has no other layers, so it allocates no tensors. Layers of its own
    // would have to grow, and change their types, together with the shared layers. This is not supported.
    if (owner && owner->is_dynamic()) {
        LLAMA_LOG_ERROR("%s: layers beside those of another context, whose KV cache grows\n", __func__);
        return nullptr;
    }

    // choose the kind of storage when the first buffer of the cache is allocated, and use it for the other buffers, too. Do not
    // choose again after restart_by_copy(), which may have chosen a storage of fixed size
    if (kv.ctxs_bufs.empty() && can_grow()) {
        auto inplace = dyn->any([&](const auto * other) { return other->has_size_like(*this); }) ? nullptr : create_inplace();
        auto copy    = llama_kv_storage_create_copy(kv.n_stream, n_max_cells, kv.n_pad, kv.v_trans, kv.ctxs_bufs);

        if (inplace && inplace->can_grow()) {
            set_storage(std::move(inplace));
            by_copy = std::move(copy);
        } else if (copy->can_grow()) {
            set_storage(std::move(copy));
        }
    }

    ggml_backend_buffer_t res = rows->alloc(ctx, buft, layers);
    if (!res && by_copy) {
        LLAMA_LOG_WARN("%s: no addresses for the full KV cache in place, or no memory for its start\n", __func__);

        // other caches of this shape must also switch to storage by copy, because one graph reads them all and needs one size
        const auto follows = [&](auto * other) { return !other->by_copy || !has_size_like(*other) || other->restart_by_copy(); };

        if (restart_by_copy() && std::all_of(dyn->caches().begin(), dyn->caches().end(), follows)) {
            res = rows->alloc(ctx, buft, layers);
        }
    }

    return res;
}

void llama_kv_dynamic_cache::set_storage(std::unique_ptr<llama_kv_storage> from) {
    rows = std::move(from);

    LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_START ", max = %u cells, grows %s\n", __func__,
            rows->rows().size(), n_max_cells*kv.n_stream, rows->has_size() ? "by copy" : "in place");
}

bool llama_kv_dynamic_cache::restart_by_copy() {
    const auto before = std::move(rows); // destroyed after its buffers

    if (by_copy->can_grow()) {
        set_storage(std::move(by_copy));
    } else {
        rows = llama_kv_storage_create_fixed(kv.n_stream, n_max_cells, kv.v_trans, kv.ctxs_bufs);
        by_copy.reset();
    }

    for (auto & [ctx, buf] : kv.ctxs_bufs) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buf.get());

        for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
            t->buffer = nullptr;
            t->data   = nullptr;
        }
        buf.reset(); // free the old buffer, which holds no data yet, before the new buffer is allocated

        buf.reset(rows->alloc(ctx.get(), buft, layers_of(ctx.get())));
        if (!buf) {
            return false;
        }
    }

    return true;
}

bool llama_kv_dynamic_cache::same_shape(const llama_kv_dynamic_cache & other) const {
    return &other != this && other.n_max_cells == n_max_cells && other.kv.n_stream == kv.n_stream;
}

bool llama_kv_dynamic_cache::mirrors(const llama_kv_dynamic_cache & other) const {
    return same_shape(other) && is_dynamic() && other.is_dynamic();
}

bool llama_kv_dynamic_cache::has_size_like(const llama_kv_dynamic_cache & other) const {
    return same_shape(other) && is_dynamic() && rows->has_size();
}

bool llama_kv_dynamic_cache::reads_gaps_elsewhere(ggml_cgraph * gf) const {
    const auto views = llama_kv_views_read_elsewhere(gf, layers());

    return std::any_of(views.begin(), views.end(), [&](const ggml_tensor * view) {
        const ggml_tensor * t = view->view_src;

        // check whether the view covers all rows. The views that attention reads do not: their second dimension is the heads
        const bool is_all = view->op == GGML_OP_VIEW && view->ne[1] == t->ne[1]*t->ne[2];

        return kv.n_stream > 1 || is_all;
    });
}

//
// requests
//

llama_kv_cache::slot_info llama_kv_dynamic_cache::with_purged(llama_kv_cache::slot_info sinfo) const {
    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        const auto & cells = kv.v_cells[sinfo.strm[s]];

        // find the last position of each sequence that the slot overwrites. llama_kv_cache::apply_ubatch() finds it in the same
        // way, and purges all positions of the sequence up to it
        std::map<llama_seq_id, llama_pos> pos_max;

        for (const uint32_t idx : sinfo.idxs[s]) {
            for (llama_seq_id seq_id = 0; seq_id < LLAMA_MAX_SEQ && !cells.is_empty(idx); ++seq_id) {
                if (cells.seq_has(idx, seq_id)) {
                    auto & pos = pos_max.emplace(seq_id, -1).first->second;

                    pos = std::max(pos, cells.pos_get(idx));
                }
            }
        }

        for (uint32_t i = 0; i < cells.used_max_p1() && !pos_max.empty(); ++i) {
            const bool is_purged = !cells.is_empty(i) && std::any_of(pos_max.begin(), pos_max.end(), [&](const auto & cur) {
                return cells.seq_has(i, cur.first) && cells.pos_get(i) <= cur.second;
            });

            if (is_purged) {
                sinfo.idxs[s].push_back(i);
            }
        }
    }

    return sinfo;
}

void llama_kv_dynamic_cache::request(const slot_info_vec_t & sinfos) {
    // Request the attention windows in the storage of the target, if this cache belongs to a draft that reads the target's
    // cells. One batch of the draft may read several streams. The target may have used these streams in different batches, so
    // their windows can have rows without memory.
    if (dyn && owner && owner->dyn && owner->rows->reads_below()) {
        owner->requested.clear();
        owner->request_windows(sinfos);

        if (owner->requested.is_pending() && !owner->dyn->grow()) {
            dyn->fail_request();
        }
    }

    if (!is_dynamic()) {
        return;
    }

    // drop the rows that were requested when an earlier attempt to place this batch failed
    requested.clear();

    for (const auto & sinfo : sinfos) {
        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            for (const uint32_t idx : sinfo.idxs[s]) {
                n_peak = std::max(n_peak, idx + 1);
                requested.add(sinfo.strm[s], idx, idx + 1);
            }
        }
    }

    if (rows->reads_below()) {
        request_windows(sinfos);
    }
}

// request all rows of the attention window
// In each stream of a ubatch, the window has the number of rows of the longest stream. This number includes the rows of this
// ubatch and of the earlier ubatches of the batch.
void llama_kv_dynamic_cache::request_windows(const slot_info_vec_t & sinfos) {
    uint32_t end = 0;

    for (const auto & sinfo : sinfos) {
        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            end = std::max(end, kv.v_cells[sinfo.strm[s]].used_max_p1());

            for (const uint32_t idx : sinfo.idxs[s]) {
                end = std::max(end, idx + 1);
            }
        }

        for (size_t s = 0; s < sinfo.n_stream(); ++s) {
            requested.add(sinfo.strm[s], 0, end);
        }
    }
}

void llama_kv_dynamic_cache::follow(const llama_kv_dynamic_cache & other) {
    if (mirrors(other)) {
        requested.add(other.requested);
    }
}

void llama_kv_dynamic_cache::clear_state(llama_seq_id seq_id) {
    kv.state_clear(seq_id);
}

bool llama_kv_dynamic_cache::clear(llama_seq_id seq_id) {
    if (copies.clear_later(seq_id)) {
        return true;
    }

    planned.clear(seq_id);

    if (!dyn || !dyn->is_enabled()) {
        return false;
    }

    dyn->synchronize();

    try {
        const uint32_t n_rows = rows->rows().size();

        const bool res = rows->clear(seq_id);

        if (rows->rows().size() < n_rows) {
            dyn->usage.count_shrink(0);
        }

        return res;
    } catch (const std::bad_alloc &) {
        return false; // the caller clears the cells, and no memory is freed
    }
}

//
// growing
//

llama_kv_rows llama_kv_dynamic_cache::next_rows(bool ahead) const {
    if (!rows->has_size()) {
        return rows->next(requested.rows(), ahead, size_cell());
    }

    // compute the bytes of one row, over all streams of all caches with this number of cells. Such caches grow by the same
    // steps, because graphs are built over them together
    size_t n_bytes_row = 0;

    for (const auto * cache : dyn->caches()) {
        if (cache->n_max_cells == n_max_cells) {
            n_bytes_row += cache->size_cell()*cache->kv.n_stream;
        }
    }

    return rows->next(requested.rows(), ahead, n_bytes_row);
}

llama_kv_rows llama_kv_dynamic_cache::rows_after_growth(bool ahead) const {
    return requested.has_rows() ? next_rows(ahead) : rows->rows();
}

bool llama_kv_dynamic_cache::is_ahead() const {
    try {
        return requested.has_rows() && !(next_rows(true) == next_rows(false));
    } catch (const std::bad_alloc &) {
        return false;
    }
}

bool llama_kv_dynamic_cache::try_resize(const llama_kv_rows & to, const std::vector<uint32_t> & n_used, bool is_growth) {
    const bool res = rows->try_resize(to, n_used);

    if (rows->moved()) {
        dyn->set_moved(is_growth && res);
    }

    return res;
}

bool llama_kv_dynamic_cache::grow(bool ahead) {
    if (!requested.has_rows()) {
        return true;
    }

    try {
        const auto to = next_rows(ahead);

        LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_RESIZE "\n", __func__, rows->rows().size(), to.size());

        growing = growth { rows->rows(), n_used(), rows->n_bytes_copied() };

        if (try_resize(to, growing->n_used, true)) {
            return true;
        }

        LLAMA_LOG_WARN("%s: not enough memory for %u cells\n", __func__, to.size());
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_WARN("%s: not enough host memory to grow the KV cache\n", __func__);
    }

    growing.reset();

    return false;
}

void llama_kv_dynamic_cache::undo_growth() {
    if (!growing) {
        return;
    }

    try {
        try_resize(growing->rows, growing->n_used, false);
    } catch (const std::bad_alloc &) { // the cache keeps more rows than it had before
    }

    growing.reset();
}

void llama_kv_dynamic_cache::commit_growth() {
    if (growing) {
        dyn->usage.count_copied(rows->n_bytes_copied() - growing->n_bytes_copied);

        n_peak = requested.rows().end();
    }
}

void llama_kv_dynamic_cache::forget() {
    requested.clear();
    growing.reset();
}

//
// shrinking
//

std::vector<uint32_t> llama_kv_dynamic_cache::n_used() const {
    std::vector<uint32_t> res(kv.n_stream);

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        res[s] = planned.is_in_use() ? planned.n_used_of_first(n_max_cells) : kv.v_cells[s].used_max_p1();
    }

    // A pending copy of a stream reads its source before the next batch. So the rows of the source stay, even if their cells are
    // free by now.
    copies.each_reversed([&](uint32_t ssrc, uint32_t sdst) {
        res[ssrc] = std::max(res[ssrc], res[sdst]);
    });

    return res;
}

llama_kv_rows llama_kv_dynamic_cache::used_rows() const {
    auto res = rows->rows().none();

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const auto & cells = kv.v_cells[s];

        for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
            if (!cells.is_empty(i)) {
                res.add(s, i, i + 1);
            }
        }
    }

    // add the rows that a pending copy will read
    copies.each_reversed([&](uint32_t ssrc, uint32_t sdst) {
        auto read = res.none();
        read.set_stream(ssrc, res, sdst);
        res |= read;
    });

    return res;
}

llama_kv_rows llama_kv_dynamic_cache::rows_after_shrink() const {
    if (!is_dynamic() || (planned.is_in_use() && (planned.n_used_of_first(n_max_cells) > 0 || !copies.is_empty()))) {
        return rows->rows();
    }

    uint32_t n_cells = 0;
    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        n_cells += kv.v_cells[s].get_used();
    }

    // first check the number of cells in use, because the check of each cell takes longer
    return rows->may_shrink(n_cells, n_peak) ? rows->rest(used_rows(), n_peak) : rows->rows();
}

void llama_kv_dynamic_cache::release(const std::vector<llama_kv_dynamic_cache *> & caches) {
    struct shrink {
        llama_kv_dynamic_cache * cache;
        llama_kv_rows            rows;
        std::vector<uint32_t>    n_used;
    };
    std::vector<shrink> shrinks;

    for (auto * cache : caches) {
        cache->copies.drop_late();
    }

    // compute all new sizes before the first cache shrinks. If the computation throws std::bad_alloc, no cache has shrunk yet,
    // so caches that must have the same size still have the same size
    for (auto * cache : caches) {
        auto rows = cache->rows_after_shrink();
        for (const auto * other : caches) {
            if (cache->mirrors(*other) && cache->rows->has_size()) {
                rows.add(0, other->rows_after_shrink().end());
            }
        }

        if (rows.size() < cache->rows->rows().size()) {
            shrinks.push_back({ cache, std::move(rows), cache->n_used() });
        }
    }

    for (const auto & [cache, rows, n_used] : shrinks) {
        LLAMA_LOG_INFO("%s: " LLAMA_KV_LOG_RESIZE "\n", __func__, cache->rows->rows().size(), rows.size());

        cache->dyn->synchronize();

        const size_t n_copied = cache->rows->n_bytes_copied();

        cache->try_resize(rows, n_used, false);

        cache->dyn->usage.count_shrink(cache->rows->n_bytes_copied() - n_copied);

        cache->n_peak = *std::max_element(n_used.begin(), n_used.end());
    }
}

//
// contents
//

std::pair<ggml_type, ggml_type> llama_kv_dynamic_cache::cell_types() const {
    const auto & layer = kv.layers.front();

    return { layer.k->type, layer.v ? layer.v->type : layer.k->type };
}

bool llama_kv_dynamic_cache::has_cells(uint32_t s) const {
    return s < kv.n_stream && kv.v_cells[s].get_used() > 0;
}

size_t llama_kv_dynamic_cache::size_cell() const {
    size_t res = 0;

    for (const auto & layer : kv.layers) {
        res += layer.k->nb[1] + (layer.v ? layer.v->nb[1] : 0);
    }

    return res;
}

llama_memory_usage llama_kv_dynamic_cache::usage() const {
    llama_memory_usage res = {};

    res.n_cells_max = n_max_cells*kv.n_stream;
    res.n_cells     = rows->rows().size();

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        res.n_cells_used += planned.is_in_use() ? planned.n_used(s) : kv.v_cells[s].get_used();
    }

    res.reserved  = res.n_cells_max*size_cell();
    res.committed = llama_kv_sum_bytes(kv);
    res.used      = res.n_cells_used*size_cell();

    return res;
}

llama_seq_cells llama_kv_dynamic_cache::seq_cells(llama_seq_id seq_id, size_t & bytes) const {
    llama_seq_cells res = {};

    const uint32_t s = kv.seq_to_stream[seq_id];

    const auto & cells = kv.v_cells[s];
    const size_t size  = size_cell();

    // rows without cells (DSV4) are divided among the sequences of the stream
    const uint32_t n_seqs = kv.n_seq_max/kv.n_stream;

    bytes += planned.is_in_use() ? llama_kv_share(planned.n_used(s)*size, n_seqs, seq_id % n_seqs) : 0;

    bool is_run = false;

    for (uint32_t i = cells.used_min(); i < cells.used_max_p1(); ++i) {
        const bool is_own = cells.seq_has(i, seq_id);

        if (is_own) {
            const size_t n = cells.seq_count(i);

            // number of sequences of this cell whose ids are smaller than seq_id
            size_t n_before = 0;
            for (llama_seq_id other = 0; n > 1 && other < seq_id; ++other) {
                n_before += cells.seq_has(i, other);
            }

            res.n_cells++;
            res.n_shared += n > 1;
            res.n_runs   += !is_run;

            bytes += n > 1 ? llama_kv_share(size, n, n_before) : size;
        }

        is_run = is_own;
    }

    return res;
}

//
// llama_kv_cache
//

uint32_t llama_kv_cache::get_size_max() const {
    return v_cells[seq_to_stream[0]].size();
}

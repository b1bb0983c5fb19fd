#include "llama-kv-dynamic.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache.h"
#include "llama-kv-compat.h"
#include "llama-kv-limits.h"
#include "llama-memory.h"
#include "llama-model.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

bool llama_kv_dynamic_default() {
    const char * LLAMA_KV_DYNAMIC = getenv("LLAMA_KV_DYNAMIC");

    return LLAMA_KV_DYNAMIC && *LLAMA_KV_DYNAMIC && strcmp(LLAMA_KV_DYNAMIC, "0") != 0;
}

//
// llama_kv_dynamic
//

static thread_local std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic_cur;

// growths in this process. not per context, because a context can use the storage of another one
static std::atomic<uint64_t> n_moves_all { 0 };

// those that are enabled, to be found by their memory
static std::mutex                      dyn_mutex;
static std::vector<llama_kv_dynamic *> dyn_all;

llama_kv_dynamic::llama_kv_dynamic(llama_context * lctx, bool enabled) : lctx(lctx), enabled(enabled) {
}

llama_kv_dynamic::~llama_kv_dynamic() {
    if (counters.n_grow > 0) {
        LLAMA_LOG_INFO("%s: the KV cache has grown %u times in %.2f ms (longest %.2f ms, %.2f MiB copied) and shrunk %u times\n", __func__,
                counters.n_grow, counters.t_grow_us/1e3, counters.t_grow_max_us/1e3, counters.n_bytes_copied/1024.0/1024.0, counters.n_shrink + has_shrunk);
    }

    const std::lock_guard<std::mutex> lock(dyn_mutex);
    dyn_all.erase(std::remove(dyn_all.begin(), dyn_all.end(), this), dyn_all.end());
}

llama_kv_dynamic::release_scope::~release_scope() {
    llama_kv_dynamic * dyn = nullptr;
    {
        const std::lock_guard<std::mutex> lock(dyn_mutex);
        for (auto * cur : dyn_all) {
            if (cur->mem == mem) {
                dyn = cur;
            }
        }
    }

    if (!dyn) {
        return;
    }

    try {
        for (auto * kv : dyn->caches) {
            kv->dyn_release();
        }
    } catch (const std::exception & err) { // none leaves a destructor
        LLAMA_LOG_WARN("%s: no KV memory goes back: %s\n", __func__, err.what());
    }

    dyn->counters.n_shrink += std::exchange(dyn->has_shrunk, false);
}

llama_kv_dynamic::scope::scope(std::shared_ptr<llama_kv_dynamic> dyn) :
    prev(std::exchange(llama_kv_dynamic_cur, std::move(dyn))) {
}

llama_kv_dynamic::scope::~scope() {
    const auto dyn = std::exchange(llama_kv_dynamic_cur, std::move(prev));

    if (dyn && dyn->enabled) {
        const std::lock_guard<std::mutex> lock(dyn_mutex);
        dyn->mem = dyn->lctx->get_memory();
        dyn_all.push_back(dyn.get());
    }
}

std::shared_ptr<llama_kv_dynamic> llama_kv_dynamic::current() {
    return llama_kv_dynamic_cur;
}

bool llama_kv_dynamic::is_enabled() const {
    return enabled;
}

void llama_kv_dynamic::add(llama_kv_cache * kv) {
    caches.push_back(kv);
}

void llama_kv_dynamic::remove(llama_kv_cache * kv) {
    caches.erase(std::remove(caches.begin(), caches.end(), kv), caches.end());
}

void llama_kv_dynamic::add_reader(const std::shared_ptr<llama_kv_dynamic> & reader) {
    // each shared cache adds its own, and a draft comes and goes
    readers.erase(std::remove_if(readers.begin(), readers.end(), [&](const std::weak_ptr<llama_kv_dynamic> & cur) {
        return cur.expired() || cur.lock() == reader;
    }), readers.end());

    readers.push_back(reader);
}

void llama_kv_dynamic::request() {
    is_pending = true;
}

bool llama_kv_dynamic::pending() const {
    return is_pending;
}

bool llama_kv_dynamic::grow() {
    is_pending = false;

    bool res = !std::exchange(is_failed, false);

    // every cache is asked, also after a failure: the requests have to go
    for (auto * kv : caches) {
        res = kv->dyn_grow(res) && res;
    }

    if (is_short) {
        try {
            even_out(res);
            is_short = false;
        } catch (const std::bad_alloc &) {
            res = false; // still short, the next one tries again
        }
    }

    return res;
}

void llama_kv_dynamic::set_failed() {
    is_failed = true;

    request();
}

bool llama_kv_dynamic::give_back(bool is_given) try {
    bool res = false;

    for (auto * kv : caches) {
        const uint32_t n_cells = kv->get_size();

        kv->dyn_even_out(0, is_given);

        res = res || kv->get_size() < n_cells;
    }

    return res;
} catch (const std::bad_alloc &) {
    return false;
}

void llama_kv_dynamic::set_short() {
    is_short = true;
}

void llama_kv_dynamic::even_out(bool is_given) {
    for (auto * kv : caches) {
        uint32_t n_cells = kv->get_size();

        for (const auto * other : caches) {
            if (other->get_size_max() == kv->get_size_max()) {
                n_cells = std::min(n_cells, other->get_size());
            }
        }

        kv->dyn_even_out(n_cells, is_given);
    }
}

bool llama_kv_dynamic::grow_max() {
    for (auto * kv : caches) {
        kv->dyn_request(kv->get_size_max());
    }

    is_grown = grow();

    return is_grown;
}

bool llama_kv_dynamic::is_max() const {
    return is_grown;
}

size_t llama_kv_dynamic::n_bytes_cell(uint32_t n_max) const {
    size_t res = 0;

    for (const auto * kv : caches) {
        if (kv->get_size_max() == n_max) {
            res += kv->dyn_usage().reserved/n_max;
        }
    }

    return res;
}

void llama_kv_dynamic::synchronize() const {
    if (lctx->get_sched()) {
        ggml_backend_sched_synchronize(lctx->get_sched());
    }

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->synchronize();
        }
    }
}

void llama_kv_dynamic::set_moved() {
    drop_graphs();

    is_resized = true;

    for (const auto & reader : readers) {
        if (const auto dyn = reader.lock()) {
            dyn->is_resized = true;
            dyn->request();
        }
    }
}

void llama_kv_dynamic::drop_graphs() {
    n_moves_all.fetch_add(1);
}

bool llama_kv_dynamic::resized() {
    return std::exchange(is_resized, false);
}

bool llama_kv_dynamic::moved() {
    const uint64_t n = n_moves_all.load();

    return std::exchange(n_moves, n) != n;
}

//
// llama_kv_dynamic_cache
//

llama_kv_dynamic_cache::llama_kv_dynamic_cache(llama_kv_cache * kv, std::shared_ptr<llama_kv_dynamic> dyn) :
    kv(kv), dyn(std::move(dyn)) {
    this->dyn->add(kv);
}

llama_kv_dynamic_cache::~llama_kv_dynamic_cache() {
    dyn->remove(kv);
}

void llama_kv_dynamic_cache::set_rows(uint32_t n_rows) {
    has_rows    = true;
    n_rows_used = std::max(n_rows_used, std::min(n_rows, n_max));

    if (inplace) {
        want(n_max - 1, n_max);
    }
}

llama_kv_growth llama_kv_dynamic_cache::policy() const {
    if (is_inplace) {
        return { n_max, n_pad, inplace ? inplace->n_bytes_cell() : 0, true };
    }

    llama_kv_growth res = { n_max, n_pad, 0 };

    const char * LLAMA_KV_DYNAMIC_STEP = getenv("LLAMA_KV_DYNAMIC_STEP");
    if (LLAMA_KV_DYNAMIC_STEP) {
        res.n_bytes_step = (size_t) atoll(LLAMA_KV_DYNAMIC_STEP);
    }

    return res;
}

void llama_kv_dynamic_cache::want(uint32_t s, uint32_t i0, uint32_t i1) {
    if (wanted.empty() || !is_wanted) {
        wanted = inplace->make_blocks();
    }

    // whole blocks
    for (uint32_t i = i0; i < std::min(i1, n_max); i = (i/inplace->n_block() + 1)*inplace->n_block()) {
        if (!inplace->has(s, i)) {
            wanted[s][i/inplace->n_block()] = true;

            is_wanted = true;
            dyn->request();
        }
    }
}

void llama_kv_dynamic_cache::want(uint32_t i0, uint32_t i1) {
    for (uint32_t s = 0; s < inplace->n_stream(); ++s) {
        want(s, i0, i1);
    }
}

//
// llama_context
//

bool llama_context::kv_dynamic_grow() {
    const llama_kv_dynamic::timer timer(*kv_dynamic);

    if (!kv_dynamic->grow()) {
        LLAMA_LOG_WARN("%s: failed to grow the KV cache, it keeps its size\n", __func__);
        return false;
    }

    if (!kv_dynamic->resized()) {
        return true; // in place
    }

    const uint32_t n_seqs    = cparams.n_seq_max;
    const uint32_t n_tokens  = std::min(cparams.n_ctx, cparams.n_ubatch);
    const uint32_t n_outputs = llama_kv_compat_n_outputs(cparams, n_tokens, 0);

    const auto reserve = [&] {
        const auto mctx = memory->init_full();

        if (llama_kv_limits_fail_alloc() || !graph_reserve(n_tokens, n_seqs, n_outputs, mctx.get())) {
            return false;
        }

        for (size_t i = 0; i < backend_ptrs.size(); ++i) {
            backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(sched.get(), backend_ptrs[i]);
        }

        return true;
    };

    // the worst-case graph is larger now
    try {
        if (reserve()) {
            return true;
        }

        // cells ahead of need take what the compute buffers lack
        if (kv_dynamic->give_back(true) && reserve()) {
            return true;
        }

        // from scratch, and without pipeline parallelism if need be
        sched_need_reserve = true;
        if (!llama_kv_limits_fail_alloc()) {
            sched_reserve();

            return true;
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for the larger KV cache\n", __func__);

    // the cells that the batch was given go as well, so that what was possible before still is
    kv_dynamic->give_back(false);

    // the scheduler may have lost its buffers: go on with an empty one, which gives each graph what it needs
    sched_need_reserve = false;
    sched.reset(ggml_backend_sched_new(backend_ptrs.data(), backend_buft.data(), backend_ptrs.size(),
                graph_max_nodes(n_tokens), cparams.pipeline_parallel, cparams.op_offload));

    // the cache of experts, which not every upstream has, sees the copies of the scheduler
    const auto set_copy_callback = [&](auto * lctx) -> decltype((void) lctx->sched_copy_experts) {
        ggml_backend_sched_set_copy_callback(sched.get(), lctx->sched_copy_experts, lctx);
    };
    if constexpr (std::is_invocable_v<decltype(set_copy_callback), llama_context *>) {
        set_copy_callback(this);
    }

    kv_dynamic->drop_graphs();

    try {
        if (!reserve()) {
            LLAMA_LOG_WARN("%s: failed to reserve the compute buffers for what is left of the KV cache\n", __func__);
        }
    } catch (const std::exception & err) {
        LLAMA_LOG_WARN("%s: %s\n", __func__, err.what());
    }

    return false;
}

//
// llama_kv_cache
//

void llama_kv_cache::dyn_share(llama_kv_cache & other) {
    dyn_other = &other;

    if (const auto cur = llama_kv_dynamic::current(); cur && other.dyn) {
        other.dyn->dyn->add_reader(cur);
    }
}

uint32_t llama_kv_cache::dyn_init(uint32_t kv_size, bool offload) {
    const auto cur = llama_kv_dynamic::current();

    if (!cur || dyn_other) {
        return kv_size;
    }

    dyn = std::make_unique<llama_kv_dynamic_cache>(this, cur);

    dyn->n_max   = kv_size;
    dyn->n_pad   = n_pad;
    dyn->n_cells = kv_size;

    // when only measuring (--fit), the maximum is what has to fit
    if (!cur->is_enabled() || hparams.no_alloc) {
        return kv_size;
    }

    // this backend keeps a part of each tensor on every device and knows them by the address of the tensor they came from
    // (LLAMA_SPLIT_MODE_TENSOR, which not every upstream has)
    if (model.split_mode() > LLAMA_SPLIT_MODE_ROW) {
        LLAMA_LOG_WARN("%s: the KV cache cannot grow with --split-mode tensor, it takes its full size\n", __func__);
        return kv_size;
    }

    dyn->is_inplace = dyn_is_host(offload); // the policy depends on it

    const uint32_t n_start = dyn->policy().start();
    if (n_start >= kv_size) {
        dyn->is_inplace = false;
        return kv_size;
    }

    LLAMA_LOG_INFO("%s: dynamic KV cache: start = %u cells, max = %u cells, grows %s\n", __func__,
            n_start, kv_size, dyn->is_inplace ? "in place" : "by copy");

    if (dyn->is_inplace) {
        return kv_size;
    }

    dyn->n_cells = n_start;

    return n_start;
}

uint32_t llama_kv_cache::get_size_max() const {
    return v_cells[seq_to_stream[0]].size();
}

uint32_t llama_kv_cache::dyn_size() const {
    if (dyn_other) {
        return dyn_other->dyn_size();
    }

    return dyn && !layers.empty() ? dyn->n_cells : get_size_max();
}

bool llama_kv_cache::dyn_request(uint32_t n_cells) {
    if (!dyn) {
        return true;
    }

    if (dyn->inplace) {
        dyn->want(0, n_cells);
        return true; // nothing that a plan contains is going to change
    }

    // a request that cannot be met must not stay pending: decode() would try forever
    n_cells = std::min(n_cells, dyn->n_max);

    dyn->n_peak = std::max(dyn->n_peak, n_cells);

    if (n_cells > dyn->policy().usable(dyn->n_cells) && !layers.empty()) {
        dyn->n_need = std::max(dyn->n_need, n_cells);
        dyn->dyn->request();
    }

    return !dyn->dyn->pending();
}

// cells of a stream that a slot reaches
static uint32_t dyn_n_cells(const std::vector<std::vector<uint32_t>> & idxs) {
    uint32_t res = 0;

    for (const auto & stream : idxs) {
        for (const uint32_t idx : stream) {
            res = std::max(res, idx + 1);
        }
    }

    return res;
}

void llama_kv_cache::dyn_request(const slot_info_vec_t & sinfos) {
    if (dyn && dyn->inplace) {
        for (const auto & sinfo : sinfos) {
            for (size_t s = 0; s < sinfo.n_stream(); ++s) {
                for (const uint32_t idx : sinfo.idxs[s]) {
                    dyn->want(sinfo.strm[s], idx, idx + 1);
                }
            }
        }
        return;
    }

    if (!dyn || (dyn->n_cells == dyn->n_max && !dyn->storage)) {
        return;
    }

    dyn->n_given = 0;

    for (const auto & sinfo : sinfos) {
        const uint32_t n_cells = dyn_n_cells(sinfo.idxs);

        dyn->n_given = std::max(dyn->n_given, n_cells);

        dyn_request(n_cells);
    }
}

// The last row of a cache that has rows takes dummy writes. Upstream reads rows that are not visible yet and relies on zeros
// there, so the last row has to stay out of the attention window, which is padded to 256.
static uint32_t dyn_rows_size(uint32_t n_rows) {
    return GGML_PAD(n_rows, 256u) + 1;
}

bool llama_kv_dynamic_plan(
        llama_kv_cache & window,
        const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows,
        const std::vector<llama_ubatch> & ubatches) {
    llama_pos pos_max = -1;
    for (const auto & ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            pos_max = std::max(pos_max, ubatch.pos[i]);
        }
    }

    // in place, it has the full size from the start and takes what it needs as any other
    bool res = window.get_size() == window.get_size_max() || window.dyn_request(window.get_size_max());

    for (const auto & [kv, ratio] : rows) {
        res = kv->dyn_request_rows((pos_max + 1)/ratio) && res;
    }

    return res;
}

bool llama_kv_dynamic_commit(llama_kv_cache & kv) {
    if (!kv.dyn || !kv.dyn->is_inplace || !kv.dyn->dyn->pending()) {
        return true;
    }

    const llama_kv_dynamic::timer timer(*kv.dyn->dyn);

    return kv.dyn->dyn->grow();
}

bool llama_kv_cache::dyn_request_rows(uint32_t n_rows) {
    if (dyn) {
        dyn->set_rows(n_rows);
    }

    return dyn_request(dyn_rows_size(n_rows));
}

uint32_t llama_kv_cache::dyn_n_rows(uint32_t n_rows) const {
    if (dyn && dyn->inplace) {
        return std::min(n_rows, dyn->n_rows_used);
    }

    return dyn && dyn->n_cells < dyn->n_max ? std::min(n_rows, dyn->n_cells - 1) : n_rows;
}

bool llama_kv_cache::dyn_grow(bool enable) {
    if (dyn->inplace) {
        const bool is_wanted = std::exchange(dyn->is_wanted, false);

        try {
            return !is_wanted || (enable && dyn_commit());
        } catch (const std::bad_alloc &) {
            return false;
        }
    }

    const uint32_t n_need = std::exchange(dyn->n_need, 0);

    if (n_need <= dyn->policy().usable(dyn->n_cells)) {
        return true;
    }

    return enable && try_resize(n_need);
}

llama_kv_dynamic_room llama_kv_cache::dyn_reserve(llama_io_read_i & io, const slot_info & sinfo) {
    if (dyn && dyn->inplace) {
        dyn_request(slot_info_vec_t { sinfo });

        const llama_kv_dynamic::timer timer(*dyn->dyn);

        return { dyn_grow(true) ? get_size() : 0 };
    }

    return { dyn_reserve(io, dyn_n_cells(sinfo.idxs)) ? get_size() : 0 };
}

llama_kv_dynamic_room llama_kv_cache::dyn_room(const slot_info & sinfo) const {
    if (!dyn || !dyn->inplace) {
        return { dyn_n_cells(sinfo.idxs) <= get_size() ? get_size() : 0 };
    }

    for (size_t s = 0; s < sinfo.n_stream(); ++s) {
        for (const uint32_t idx : sinfo.idxs[s]) {
            if (!dyn->inplace->has(sinfo.strm[s], idx)) {
                return { 0 };
            }
        }
    }

    return { get_size() };
}

bool llama_kv_cache::dyn_reserve_rows(llama_io_read_i & io, uint32_t n_rows) {
    if (n_rows > get_size_max()) {
        return false;
    }

    if (dyn) {
        dyn->set_rows(n_rows);
        n_rows = std::min(dyn_rows_size(n_rows), dyn->n_max);
    }

    if (dyn && dyn->inplace) {
        dyn->want(0, n_rows);

        const llama_kv_dynamic::timer timer(*dyn->dyn);

        return dyn_grow(true);
    }

    return dyn_reserve(io, n_rows);
}

bool llama_kv_cache::dyn_reserve(llama_io_read_i & io, uint32_t n_cells) {
    if (n_cells <= (dyn ? dyn->policy().usable(dyn->n_cells) : get_size())) {
        return true;
    }

    const llama_kv_dynamic::timer timer(*dyn->dyn);

    // rows that were read but not written yet have offsets in the current layout
    io.flush();

    if (!try_resize(n_cells)) {
        return false;
    }

    // the compute buffers follow with the next batch
    dyn->dyn->request();

    return true;
}

std::vector<uint32_t> llama_kv_cache::dyn_n_used() const {
    std::vector<uint32_t> res(n_stream);

    for (uint32_t s = 0; s < n_stream; ++s) {
        res[s] = dyn->has_rows ? std::min(dyn->n_rows_used, dyn_n_rows(dyn->n_cells)) : v_cells[s].used_max_p1();
    }

    // a copy of a stream waits for the next batch: what it reads stays, though the cells may be free by now
    for (size_t i = sc_info.ssrc.size(); i-- > 0; ) {
        res[sc_info.ssrc[i]] = std::max(res[sc_info.ssrc[i]], res[sc_info.sdst[i]]);
    }

    return res;
}

bool llama_kv_cache::try_resize(uint32_t n_cells) {
    if (n_cells <= (dyn ? dyn->policy().usable(dyn->n_cells) : get_size())) {
        return true;
    }

    if (!dyn || n_cells > dyn->n_max) {
        return false;
    }

    try {
        if (!dyn->storage) {
            auto storage = std::make_unique<llama_kv_storage>(ctxs_bufs, dyn->n_cells, v_trans);

            for (const auto & layer : layers) {
                storage->add_layer(layer.k, layer.v, layer.k_stream, layer.v_stream, dyn->created.get());
            }

            // nothing below throws: a storage has all layers, or there is none
            storage->own(std::move(dyn->created));
            dyn->storage = std::move(storage);
        }

        const std::vector<uint32_t> n_used = dyn_n_used();

        llama_kv_growth growth = dyn->policy();
        growth.n_bytes_cell = dyn->dyn->n_bytes_cell(dyn->n_max);

        const uint32_t n_next     = growth.next    (dyn->n_cells, n_cells);
        const uint32_t n_smallest = growth.smallest(n_cells);

        dyn->dyn->synchronize();

        // also when it fails: a layer may have a new buffer
        dyn->dyn->set_moved();

        for (const uint32_t n : { n_next, n_smallest }) {
            LLAMA_LOG_INFO("%s: resizing KV cache from %u to %u cells\n", __func__, dyn->n_cells, n);

            const size_t n_copied = dyn->storage->n_bytes_copied();

            if (dyn->storage->try_resize(n, n_used)) {
                dyn->dyn->count_grow(dyn->storage->n_bytes_copied() - n_copied);
                dyn->n_cells = n;
                dyn->n_peak  = n_cells;
                return true;
            }

            LLAMA_LOG_WARN("%s: not enough memory for %u cells\n", __func__, n);

            dyn->dyn->set_short();

            if (n == n_smallest) {
                break;
            }
        }
    } catch (const std::bad_alloc &) {
        LLAMA_LOG_WARN("%s: not enough host memory for %u cells\n", __func__, n_cells);

        dyn->dyn->set_short();
    }

    return false;
}

void llama_kv_cache::dyn_even_out(uint32_t n_cells, bool is_given) {
    if (!dyn || !dyn->storage || dyn->has_rows) {
        return;
    }

    const std::vector<uint32_t> n_used = dyn_n_used();

    uint32_t n_keep = *std::max_element(n_used.begin(), n_used.end());
    if (is_given) {
        n_keep = std::max(n_keep, dyn->n_given);
    }

    n_cells = std::max({ n_cells, dyn->policy().smallest(n_keep), dyn->policy().start() });

    if (n_cells < dyn->n_cells) {
        dyn_shrink(n_cells, n_used);
    }
}

void llama_kv_cache::dyn_shrink(uint32_t n_cells, const std::vector<uint32_t> & n_used) {
    LLAMA_LOG_INFO("%s: resizing KV cache from %u to %u cells\n", __func__, dyn->n_cells, n_cells);

    const size_t n_copied = dyn->storage->n_bytes_copied();

    dyn->dyn->synchronize();
    dyn->dyn->set_moved();
    dyn->storage->shrink(n_cells, n_used);
    dyn->dyn->count_shrink(dyn->storage->n_bytes_copied() - n_copied);

    dyn->n_cells = n_cells;
}

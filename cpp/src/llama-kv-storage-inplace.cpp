// Storage whose rows are committed and freed in place, at fixed addresses. LLAMA_KV_DYNAMIC_STORAGE=copy forces growth by copy.
// LLAMA_KV_DYNAMIC_STORAGE=inplace allows this storage in device memory, too.
//
// Each stream has its own set of rows, in blocks:
//   - In host memory (llama-kv-pages.h), the set can contain any blocks, with holes in the middle.
//   - If some of the memory is on a device, each stream has the rows [0, n). The reason is that kernels read all rows of the
//     attention window, masked or not, in all streams of a batch. So a row in use needs all rows below it, and a block is as
//     large as the padding of the window. There can be one more block at the end, for dummy writes. When rows are freed, a
//     shorter stream keeps its rows up to the end of the longest stream, because a later batch reads both streams together.

#include "llama-kv-storage.h"

#include "llama-impl.h"
#include "llama-kv-region.h"

#include "ggml-backend.h"

#include <algorithm>
#include <new>

namespace {

class storage_inplace : public llama_kv_storage {
public:
    storage_inplace(uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, bool readable_uncommitted, buffers_t & bufs) :
        llama_kv_storage(n_stream, { n_rows, n_pad, 0, true, LLAMA_KV_GROWTH_STEP_BYTES, !readable_uncommitted }),
        v_trans(v_trans), readable_uncommitted(readable_uncommitted), bufs(bufs) {
        cur = start;
    }

    ggml_backend_buffer_t alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers_ctx) override {
        GGML_ASSERT(llama_kv_pages::page_size(buft) > 0 && (readable_uncommitted <= llama_kv_pages::readable_uncommitted(buft)));

        if (!add_part(ctx, buft, layers_ctx)) {
            for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
                t->buffer = nullptr;
                t->data   = nullptr;
            }
            return nullptr;
        }

        show();

        auto & mem = parts.back()->mem;

        LLAMA_LOG_INFO("%s: %10s KV memory reserved = %8.2f MiB, committed = %8.2f MiB\n", __func__,
                ggml_backend_buft_name(buft), mem.pages->size()/1024.0/1024.0, mem.pages->n_bytes_committed()/1024.0/1024.0);

        return mem.buf.release();
    }

    bool has(uint32_t s, uint32_t i) const override {
        return cur.has(s, i);
    }

    bool reads_below() const override {
        return !readable_uncommitted;
    }

    // return the current rows and the needed rows. ahead: also some rows after the last needed run of each stream
    llama_kv_rows next(const llama_kv_rows & need, bool ahead, size_t n_bytes_row) const override {
        auto policy = growth;
        policy.n_bytes_cell = n_bytes_row;

        auto res = cur;
        res |= need;

        for (uint32_t s = 0; ahead && s < cur.n_stream(); ++s) {
            uint32_t first = 0;
            uint32_t end   = 0;

            need.each_run(s, [&](uint32_t i0, uint32_t i1) {
                first = i0;
                end   = i1;
            });

            if (end > 0) {
                res.add(s, first, policy.next(first, end));
            }
        }

        return res;
    }

    bool may_shrink(uint32_t n_used, uint32_t n_peak) const override {
        (void) n_peak;

        const uint32_t n_cur = cur.size();

        auto policy = growth; // all streams together decide whether rows are freed
        policy.n_max *= cur.n_stream();

        return policy.shrink(n_cur, n_used, n_cur) < n_cur;
    }

    llama_kv_rows rest(const llama_kv_rows & used, uint32_t n_peak) const override {
        auto res = start;
        res |= used;
        if (!readable_uncommitted) {
            res.add(0, used.end());
        }
        res &= cur; // a row that does not exist is empty, and need not be committed

        return may_shrink(res.size(), n_peak) ? res : cur;
    }

    bool try_resize(const llama_kv_rows & rows, const std::vector<uint32_t> & n_used) override {
        (void) n_used;

        // commit all missing rows first, and then free rows, so that a failure changes nothing
        auto both = cur;
        both |= rows;

        const bool res = both == cur || commit(both);

        if (res) {
            cur = rows;
        }
        if (!res || !(both == cur)) {
            commit(cur);
        }

        show();

        return res;
    }

    size_t n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const override {
        size_t res = 0;
        for (const auto & part : parts) {
            res += part->n_bytes(rows, type_k, type_v);
        }

        return res;
    }

    bool clear(int32_t s) override {
        auto gone = cur.none();
        auto rest = cur;

        for (uint32_t i = 0; i < cur.n_stream(); ++i) {
            if (s < 0 || i == (uint32_t) s) {
                gone.add(i, 0, growth.n_max);
                rest.set_stream(i, start, i);
            }
        }
        rest &= cur;

        // Freed pages are zero when they are committed again. A page with rows that stay is not freed, so set its other rows to
        // zero.
        try_resize(rest, {});
        set_zero(gone);

        return true;
    }

    bool copy_stream(uint32_t ssrc, uint32_t sdst) override {
        // A static cache copies the whole stream. So rows that the source does not have must become zero in the copy, also in
        // pages that they share with copied rows.
        auto gone = cur.none();
        auto here = cur.none();
        gone.add(sdst, 0, growth.n_max);
        here.set_stream(sdst, cur, ssrc);
        gone -= here;

        auto from = cur.none();
        from.set_stream(ssrc, cur, ssrc);

        set_zero(gone);

        for (const auto & part : parts) {
            part->copy_stream(from, ssrc, sdst);
        }

        return true;
    }

    // prepare each part in one of two ways:
    //   - set_types() converts the rows inside of their own memory. Nothing must be prepared.
    //   - set_types() moves the rows to other addresses. Reserve these addresses, and commit the pages that must exist before the
    //     conversion starts. set_types() frees the pages of converted rows before it converts the next rows.
    bool prepare_types(ggml_type type_k, ggml_type type_v, const std::vector<uint32_t> & n_used) override {
        try {
            bool is_larger = false;

            for (const auto & part : parts) {
                for (const auto & l : part->layers) {
                    is_larger |= is_wider(l, type_k, type_v);
                }
            }

            next_type_k = type_k;
            next_type_v = type_v;
            next_n_used = n_used;
            next_none   = cur.none();

            const auto prepare = [&](const auto & part) {
                if (part->can_convert_inside(type_k, type_v)) {
                    next_parts.push_back(nullptr);
                    return true;
                }

                next_parts.push_back(part->like(type_k, type_v));

                const auto & to = next_parts.back();

                return to && (is_larger ? to->commit(cur) : to->commit_ahead(*part, cur));
            };

            if (std::all_of(parts.begin(), parts.end(), prepare)) {
                return true;
            }
        } catch (const std::bad_alloc &) {
        }

        forget_types();

        return false;
    }

    bool set_types(const llama_kv_convert & convert) override {
        is_moved = true;

        bool res = true;

        for (size_t i = 0; i < parts.size(); ++i) {
            if (!next_parts[i]) {
                parts[i]->convert_inside(next_type_k, next_type_v, res ? cur : next_none, next_n_used, convert);
                continue;
            }

            res = res && parts[i]->convert_to(*next_parts[i], cur, next_n_used, convert);

            next_parts[i]->take_over(*parts[i], bufs);
            parts[i] = std::move(next_parts[i]);
        }

        // commit rows that exist but are empty
        for (const auto & part : parts) {
            res = res && part->take(cur);
        }

        if (!res) {
            std::swap(cur, next_none);
            commit(cur);
        }

        show();

        forget_types();

        return res;
    }

    void forget_types() override { next_parts.clear(); }

private:
    // add a buffer, and commit the rows that exist at the start. returns false if there is no memory
    bool add_part(ggml_context * ctx, ggml_backend_buffer_type_t buft, const std::vector<layer> & layers) try {
        auto region = llama_kv_region::create(ctx, buft, layers, v_trans);

        if (!region || !region->commit(start)) {
            return false;
        }

        parts.push_back(std::move(region));

        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }

    bool commit(const llama_kv_rows & to) {
        try {
            return std::all_of(parts.begin(), parts.end(), [&](const auto & part) { return part->commit(to); });
        } catch (const std::bad_alloc &) {
            return false;
        }
    }

    // set the size that each buffer reports to its committed bytes
    void show() const {
        for (const auto & part : parts) {
            part->show();
        }
    }

    // set rows to zero, also rows that do not exist: they can share pages with rows that exist
    void set_zero(const llama_kv_rows & rows) {
        for (const auto & part : parts) {
            part->set_zero(rows);
        }
    }

    const bool v_trans;
    const bool readable_uncommitted;

    buffers_t & bufs;

    std::vector<std::unique_ptr<llama_kv_region>> parts; // one for each buffer

    // data from prepare_types() for set_types()
    std::vector<std::unique_ptr<llama_kv_region>> next_parts; // the parts in their new types. null: convert inside
    ggml_type                                     next_type_k = GGML_TYPE_COUNT;
    ggml_type                                     next_type_v = GGML_TYPE_COUNT;
    std::vector<uint32_t>                         next_n_used;
    // an empty set of rows, which set_types() uses if it fails. It is created in advance, because there may be no memory for it
    // at that time
    llama_kv_rows                                 next_none = cur.none();
};

} // namespace

std::unique_ptr<llama_kv_storage> llama_kv_storage_create_inplace(
        uint32_t n_stream, uint32_t n_rows, uint32_t n_pad, bool v_trans, bool readable_uncommitted, llama_kv_storage::buffers_t & bufs) {
    return std::make_unique<storage_inplace>(n_stream, n_rows, n_pad, v_trans, readable_uncommitted, bufs);
}

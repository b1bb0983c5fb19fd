#include "llama-kv-pages.h"

#include "llama-kv-fault.h"

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "../ggml/src/ggml-backend-impl.h" // for the size of a buffer, which no public function sets

#include <algorithm>
#include <new>

size_t llama_kv_pages::page_size(ggml_backend_buffer_type_t buft) {
    return readable_uncommitted(buft) ? llama_kv_pages_size_host() : llama_kv_pages_size_device(buft);
}

bool llama_kv_pages::readable_uncommitted(ggml_backend_buffer_type_t buft) {
    return buft == ggml_backend_cpu_buffer_type();
}

llama_kv_pages::llama_kv_pages(char * base, size_t n_bytes, size_t size_page) :
    base(base), n_bytes(n_bytes), size_page(size_page), committed(n_bytes/size_page) {
}

llama_kv_set llama_kv_pages::make_set() const {
    return llama_kv_set(n_bytes/size_page);
}

void llama_kv_pages::add(llama_kv_set & set, size_t offset, size_t size) const {
    if (size > 0) {
        set.add(offset/size_page, (offset + size - 1)/size_page + 1);
    }
}

bool llama_kv_pages::assign(const llama_kv_set & set) {
    auto missing = set;
    auto extra   = committed;

    missing -= committed;
    extra   -= set;

    // nothing is allocated from here on

    const size_t n_missing = missing.count();

    if (n_missing > 0 && !has_memory(n_missing*size_page)) {
        return false;
    }

    bool res = true;

    missing.each_run([&](size_t i0, size_t i1) { res = res && !llama_kv_fault_alloc() && commit(i0, i1); });

    // if a commit failed, discard all missing pages. Discarding a page that was not committed is harmless
    const auto & gone = res ? extra : missing;

    gone.each_run([&](size_t i0, size_t i1) { discard(i0, i1); });

    if (res) {
        committed = set;
    }

    return res;
}

bool llama_kv_pages::take(size_t offset, size_t size) {
    const size_t end = size > 0 ? (offset + size - 1)/size_page + 1 : 0;

    bool res = true;

    committed.each_run(offset/size_page, end, false, [&](size_t i0, size_t i1) {
        res = res && commit_late(i0, i1);

        if (res) {
            committed.add(i0, i1);
        }
    });

    return res;
}

void llama_kv_pages::give(size_t offset, size_t size) {
    committed.each_run((offset + size_page - 1)/size_page, (offset + size)/size_page, true, [&](size_t i0, size_t i1) {
        discard(i0, i1);
        committed.remove(i0, i1);
    });
}

void llama_kv_pages::vacate(size_t offset, size_t size) {
    const size_t end = offset + size;
    const size_t i0  = (offset + size_page - 1)/size_page;
    const size_t i1  = end/size_page;

    if (i0 > i1) { // the bytes are inside of one page
        zero(offset, size);
        return;
    }

    zero(offset, i0*size_page - offset);
    zero(i1*size_page, end - i1*size_page);

    if (i0 < i1) {
        discard(i0, i1);
        committed.remove(i0, i1);
    }
}

void llama_kv_pages::set_zero(size_t offset, size_t size) {
    const size_t end = offset + size;

    committed.each_run(offset/size_page, (end + size_page - 1)/size_page, true, [&](size_t i0, size_t i1) {
        const size_t first = std::max(offset, i0*size_page);

        zero(first, std::min(end, i1*size_page) - first);
    });
}

//
// the buffer
//

void llama_kv_paged_buffer::show(ggml_backend_buffer_t buf, const llama_kv_pages & pages) {
    buf->size = pages.n_bytes_committed();
}

void llama_kv_paged_buffer::shrink(ggml_backend_buffer_t buf, size_t n_bytes) {
    buf->size -= n_bytes;
}

size_t llama_kv_pages_n_bytes_padding(ggml_backend_buffer_type_t buft, const ggml_tensor * t) {
    // Without flash attention, a kernel uses a head as a row. The shorter a row is, the more bytes after the row are read. So
    // also check the shortest row: one quantization block of ggml_blck_size() elements.
    ggml_tensor block = {};
    block.type = t->type;
    std::fill(block.ne, block.ne + GGML_MAX_DIMS, 1);
    std::fill(block.nb, block.nb + GGML_MAX_DIMS, ggml_type_size(t->type));
    block.ne[0] = ggml_blck_size(t->type);

    const auto n_bytes_padding = [&](const ggml_tensor * rows) { return ggml_backend_buft_get_alloc_size(buft, rows) - ggml_nbytes(rows); };

    return std::max(n_bytes_padding(t), n_bytes_padding(&block));
}

llama_kv_paged_buffer llama_kv_pages_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft) try {
    const size_t size_page = llama_kv_pages::page_size(buft);

    const auto size_of = [&](const ggml_tensor * t) {
        return t->view_src ? 0 : (ggml_nbytes(t) + llama_kv_pages_n_bytes_padding(buft, t) + size_page - 1)/size_page*size_page;
    };

    size_t size = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        size += size_of(t);
    }

    llama_kv_paged_buffer res = llama_kv_pages::readable_uncommitted(buft) ?
            llama_kv_pages_reserve_host(size) : llama_kv_pages_reserve_device(buft, size);
    if (!res.buf) {
        return {};
    }

    char * addr = res.pages->data();
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src) {
            ggml_backend_view_init(t);
        } else {
            ggml_backend_tensor_alloc(res.buf.get(), t, addr);
        }
        addr += size_of(t);
    }

    return res;
} catch (const std::bad_alloc &) {
    return {};
}

ggml_backend_buffer_t llama_kv_alloc_zero(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool in_pages) {
    if (in_pages && llama_kv_pages::readable_uncommitted(buft)) {
        return llama_kv_pages_alloc(ctx, buft).buf.release();
    }

    ggml_backend_buffer_t res = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    if (res) {
        ggml_backend_buffer_clear(res, 0);
    }

    return res;
}

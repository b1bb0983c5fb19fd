// Pages of a device: an implementation of llama-kv-pages.h that uses ggml-pages.h

#include "llama-kv-pages.h"

#include "llama-kv-limits.h"

#include "ggml-backend.h"

#if __has_include("ggml-pages.h")

#include "ggml-pages.h"

namespace {

class device_pages : public llama_kv_pages {
public:
    // buf: a buffer that pages_i has created. The destructor does not free it
    device_pages(const ggml_backend_pages_i * pages_i, ggml_backend_buffer_t buf, size_t size_page) :
        llama_kv_pages((char *) ggml_backend_buffer_get_base(buf), ggml_backend_buffer_get_size(buf), size_page), pages_i(pages_i), buf(buf) {}

    size_t n_bytes_committed() const override {
        return pages_i->n_bytes_mapped(buf);
    }

    void copy(size_t offset_src, size_t offset_dst, size_t size) override {
        ggml_tensor src = bytes(offset_src, size);
        ggml_tensor dst = bytes(offset_dst, size);

        ggml_backend_tensor_copy(&src, &dst);
    }

protected:
    bool has_memory(size_t size) const override {
        return llama_kv_limits_have(ggml_backend_buffer_get_type(buf), size);
    }

    bool commit(size_t i0, size_t i1) override {
        return pages_i->map(buf, i0*size_page, (i1 - i0)*size_page);
    }

    // If the driver cannot unmap a page, the page still counts as committed. It must not be used, like an unmapped page.
    void discard(size_t i0, size_t i1) override {
        pages_i->unmap(buf, i0*size_page, (i1 - i0)*size_page);
    }

    void zero(size_t offset, size_t size) override {
        ggml_tensor t = bytes(offset, size);

        ggml_backend_tensor_memset(&t, 0, 0, size);
    }

private:
    // return the bytes [offset, offset + size) of the buffer as a tensor. The function allocates no memory
    ggml_tensor bytes(size_t offset, size_t size) const {
        ggml_tensor res = {};

        res.type   = GGML_TYPE_I8;
        res.buffer = buf;
        res.data   = base + offset;

        res.ne[0] = size;
        res.ne[1] = res.ne[2] = res.ne[3] = 1;
        res.nb[0] = 1;
        res.nb[1] = res.nb[2] = res.nb[3] = size;

        return res;
    }

    const ggml_backend_pages_i * const pages_i;
    const ggml_backend_buffer_t        buf;
};

} // namespace

// return the functions for pages of the device. null: the device has no pages
static const ggml_backend_pages_i * pages_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    ggml_backend_reg_t reg = dev ? ggml_backend_dev_backend_reg(dev) : nullptr;

    const auto get = reg ? (ggml_backend_pages_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_pages") : nullptr;

    return get ? get() : nullptr;
}

size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t buft) {
    const ggml_backend_pages_i * pages_i = pages_of(buft);

    return pages_i ? pages_i->page_size(buft) : 0;
}

llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t buft, size_t size) {
    const ggml_backend_pages_i * pages_i = pages_of(buft);

    ggml_backend_buffer_ptr buf(pages_i->reserve(buft, size));
    if (!buf) {
        return {};
    }

    auto pages = std::make_shared<device_pages>(pages_i, buf.get(), pages_i->page_size(buft));

    return { std::move(buf), std::move(pages) };
}

#else // an installed ggml (LLAMA_USE_SYSTEM_GGML) may be upstream's, which has no ggml-pages.h

size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t) {
    return 0;
}

llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t, size_t) {
    return {};
}

#endif

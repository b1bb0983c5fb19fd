#include "llama-kv-region.h"

#include "llama-kv-fault.h"
#include "llama-kv-layout.h"

#include "ggml-backend.h"

#include <algorithm>
#include <utility>

std::unique_ptr<llama_kv_region> llama_kv_region::create(ggml_context * ctx, ggml_backend_buffer_type_t buft, layers_t layers, bool v_trans) {
    std::unique_ptr<llama_kv_region> res(new llama_kv_region(buft, v_trans));

    res->mem = llama_kv_pages_alloc(ctx, buft);
    if (!res->mem.buf) {
        return nullptr;
    }

    res->buf    = res->mem.buf.get();
    res->layers = std::move(layers);

    for (const auto & l : res->layers) {
        res->strips.push_back(res->make_strip(l.k, l.k->type, false));
        if (l.v) {
            res->strips.push_back(res->make_strip(l.v, l.v->type, true));
        }
    }

    return res;
}

std::unique_ptr<llama_kv_region> llama_kv_region::like(ggml_type type_k, ggml_type type_v) const {
    ggml_context_ptr ctx_new(llama_kv_fault_alloc() ? nullptr : ggml_init({ 2*layers.size()*ggml_tensor_overhead(), nullptr, true }));
    if (!ctx_new) {
        return nullptr;
    }

    const auto add = [&](const ggml_tensor * t, ggml_type type) {
        return t ? ggml_set_name(ggml_new_tensor_3d(ctx_new.get(), type, t->ne[0], t->ne[1], t->ne[2]), t->name) : nullptr;
    };

    layers_t layers_new;
    for (const auto & l : layers) {
        ggml_tensor * k_new = add(l.k, type_k);
        layers_new.push_back({ k_new, add(l.v, type_v), {}, {} });
    }

    auto res = create(ctx_new.get(), buft, std::move(layers_new), v_trans);
    if (res) {
        res->ctx = std::move(ctx_new);
    }

    return res;
}

void llama_kv_region::take_over(llama_kv_region & from, llama_kv_storage::buffers_t & bufs) {
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l  = from.layers[i];
        const auto & to = layers[i];

        llama_kv_storage::set_layout(l, v_trans, [&](ggml_tensor * t, bool) { llama_kv_adopt(t, t == l.k ? to.k : to.v); });
    }

    for (auto & [_, own] : bufs) {
        if (own.get() == from.buf) {
            own = std::move(mem.buf);
            break;
        }
    }

    layers = std::move(from.layers);
    ctx.reset();
}

llama_kv_region::strip llama_kv_region::make_strip(const ggml_tensor * t, ggml_type type, bool is_v) const {
    ggml_tensor as = *t;
    llama_kv_set_type(&as, type);

    const bool trans = is_v && v_trans;

    return {
        /*.offset =*/ size_t((char *) t->data - mem.pages->data()),
        /*.size   =*/ trans ? as.nb[0] : as.nb[1],
        /*.n      =*/ trans ? size_t(t->ne[0]) : 1,
        /*.n_rows =*/ size_t(t->ne[1]),
        /*.pad    =*/ llama_kv_pages_n_bytes_padding(buft, &as),
    };
}

template <typename F>
void llama_kv_region::each(const llama_kv_rows & rows, F && f) const {
    for (uint32_t s = 0; s < rows.n_stream(); ++s) {
        rows.each_run(s, [&](uint32_t i0, uint32_t i1) {
            for (const auto & t : strips) {
                for (size_t j = 0; j < t.n; ++j) {
                    f(t, t.at(s, j, i0), (i1 - i0)*t.size);
                }
            }
        });
    }
}

size_t llama_kv_region::n_pages(const strip & t, const llama_kv_rows & rows) const {
    const size_t size_page = mem.pages->page_size();

    size_t res  = 0;
    size_t last = 0; // after the last page that was counted

    for (uint32_t s = 0; s < rows.n_stream(); ++s) {
        for (size_t j = 0; j < t.n; ++j) {
            rows.each_run(s, [&](uint32_t i0, uint32_t i1) {
                const size_t p0 = std::max(last, t.at(s, j, i0)/size_page);

                last = std::max(last, (t.at(s, j, i1) + t.pad - 1)/size_page + 1);
                res += last - std::min(last, p0);
            });
        }
    }

    return res;
}

size_t llama_kv_region::n_bytes(const llama_kv_rows & rows, ggml_type type_k, ggml_type type_v) const {
    // pages of different tensors are counted separately, because each tensor starts on a page of its own
    size_t res = 0;
    for (const auto & l : layers) {
        res += n_pages(make_strip(l.k, type_k, false), rows) + (l.v ? n_pages(make_strip(l.v, type_v, true), rows) : 0);
    }

    return res*mem.pages->page_size();
}

llama_kv_set llama_kv_region::pages_of(const llama_kv_rows & rows) const {
    auto res = mem.pages->make_set();

    each(rows, [&](const strip & t, size_t offset, size_t size) {
        mem.pages->add(res, offset, size + t.pad);
    });

    return res;
}

bool llama_kv_region::commit_ahead(const llama_kv_region & from, const llama_kv_rows & rows) {
    if (llama_kv_pages::readable_uncommitted(buft)) {
        return true;
    }

    // compute the minimum number of pages. In each tensor, the last page that was read may be converted only in part, so it is
    // not freed yet. The last page that was written may be filled only in part. These are 2 pages. Add 1 page per stream,
    // because two streams can share a page.
    size_t n_least = 2 + rows.n_stream();
    size_t n_all   = 0;

    for (size_t i = 0; i < strips.size(); ++i) {
        const size_t n_from = from.n_pages(from.strips[i], rows);
        const size_t n_to   = n_pages(strips[i], rows);

        n_least += n_to - std::min(n_to, n_from); // a row is smaller in the new type, but the rows can touch more pages
        n_all   += n_to;
    }

    // return the bytes that are converted at a time
    const auto size_of = [](const ggml_tensor * t) -> size_t {
        const int64_t n = t ? t->ne[0]*llama_kv_n_lines(t->type, t->ne[0], LLAMA_KV_CONVERT_ELEMENTS) : 0;

        // a part of transposed lines can have LLAMA_KV_CONVERT_ELEMENTS elements
        return t ? ggml_row_size(t->type, std::max(n, LLAMA_KV_CONVERT_ELEMENTS)) : 0;
    };
    const size_t size_page = mem.pages->page_size();
    const size_t size      = std::max(size_of(layers[0].k), size_of(layers[0].v));

    n_least += (size + size_page - 1)/size_page;

    const auto commit_first = [&](size_t n) {
        auto first = mem.pages->make_set();

        pages_of(rows).each_run([&](size_t i0, size_t i1) {
            const size_t n_run = std::min(n, i1 - i0);

            first.add(i0, i0 + n_run);
            n -= n_run;
        });

        return mem.pages->assign(first);
    };

    return commit_first(std::max(n_all/layers.size() + 1, n_least)) || commit_first(n_least);
}

bool llama_kv_region::take(const llama_kv_rows & rows) {
    bool res = true;

    each(rows, [&](const strip & t, size_t offset, size_t size) {
        res = res && mem.pages->take(offset, size + t.pad);
    });

    return res;
}

void llama_kv_region::set_zero(const llama_kv_rows & rows) {
    each(rows, [&](const strip &, size_t offset, size_t size) {
        mem.pages->set_zero(offset, size);
    });
}

void llama_kv_region::copy_stream(const llama_kv_rows & rows, uint32_t ssrc, uint32_t sdst) {
    each(rows, [&](const strip & t, size_t offset, size_t size) {
        mem.pages->copy(offset, offset - t.at(ssrc, 0, 0) + t.at(sdst, 0, 0), size);
    });
}

//
// other types
//

bool llama_kv_region::can_convert_inside(ggml_type type_k, ggml_type type_v) const {
    return llama_kv_pages::readable_uncommitted(buft) && std::all_of(layers.begin(), layers.end(), [&](const auto & l) {
        return ggml_row_size(type_k, l.k->ne[0]) <= l.k->nb[1] &&
            (!l.v || l.v->type == type_v || (!v_trans && ggml_row_size(type_v, l.v->ne[0]) <= l.v->nb[1]));
    });
}

void llama_kv_region::convert_tensor_inside(
        ggml_tensor * t, bool is_v, ggml_type type,
        const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert) {
    if (t->type == type) {
        return;
    }

    ggml_tensor dst = *t;
    llama_kv_set_type(&dst, type);

    const size_t offset    = (char *) t->data - mem.pages->data();
    const size_t size_page = mem.pages->page_size();

    const auto convert_lines = [&](const llama_kv_lines & from, const llama_kv_lines & to) {
        mem.pages->take(offset + to.offs, to.n_lines*to.stride);

        convert(from, to, is_v);
    };

    for (uint32_t s = 0; s < rows.n_stream(); ++s) {
        rows.each_run(s, [&](uint32_t i0, uint32_t i1) {
            llama_kv_each_lines(t, &dst, false, s, i0, std::min(i1, n_used[s]), convert_lines);
        });
    }

    const size_t n_bytes_old = (ggml_nbytes(t) + size_page - 1)/size_page*size_page;

    llama_kv_set_type(t, type);

    // free all pages of the tensor at once, because freeing pages interrupts the threads that compute
    llama_kv_each_gap(t, false, rows, n_used, n_bytes_old, [&](size_t offs, size_t size) {
        mem.pages->give(offset + offs, size);
        mem.pages->set_zero(offset + offs, size); // the rest: bytes in pages that also contain live rows
    });
}

void llama_kv_region::convert_inside(
        ggml_type type_k, ggml_type type_v, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert) {
    strips.clear();

    for (const auto & l : layers) {
        llama_kv_storage::set_layout(l, v_trans, [&](ggml_tensor * t, bool) {
            const bool is_v = t == l.v;

            convert_tensor_inside(t, is_v, is_v ? type_v : type_k, rows, n_used, convert);
            strips.push_back(make_strip(t, t->type, is_v)); // needs no memory: the number of strips is the same
        });
    }
}

bool llama_kv_region::convert_tensor(
        llama_kv_region & to, ggml_tensor * src, ggml_tensor * dst, bool is_v,
        const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert) {
    const strip from = make_strip(src, src->type, is_v);
    const strip next = to.make_strip(dst, dst->type, is_v);

    const size_t size_page = mem.pages->page_size();

    // call f(offset, size) for the memory of some lines. If there are no gaps between the lines, call it once for all of them
    const auto each_range = [](const strip & t, const llama_kv_lines & lines, auto && f) {
        const size_t size = ggml_row_size(lines.t->type, lines.n);
        const bool   dense = size == lines.stride;

        for (int64_t l = 0; l < (dense ? 1 : lines.n_lines); ++l) {
            f(t.offset + lines.offs + l*lines.stride, dense ? size*lines.n_lines : size);
        }
    };

    size_t done = from.offset; // all bytes before this offset are freed
    bool   res  = true;

    const auto convert_lines = [&](const llama_kv_lines & lines, const llama_kv_lines & lines_to) {
        each_range(next, lines_to, [&](size_t offset, size_t size) { res = res && to.mem.pages->take(offset, size + next.pad); });
        if (!res) {
            return;
        }

        convert(lines, lines_to, is_v);

        each_range(from, lines, [&](size_t offset, size_t size) {
            // Lines are converted in ascending order of their addresses, except for transposed V. So, except for transposed V,
            // free the pages from `done` on. A page is then freed when its last bytes are converted, even if several calls of
            // convert() were necessary for the page.
            const size_t begin = from.n > 1 ? offset : done;

            mem.pages->give(begin, offset + size - begin);
            done = std::max(done, (offset + size)/size_page*size_page);
        });
    };

    for (uint32_t s = 0; s < rows.n_stream(); ++s) {
        rows.each_run(s, [&](uint32_t i0, uint32_t i1) {
            llama_kv_each_lines(src, dst, is_v && v_trans, s, i0, std::min(i1, n_used[s]), convert_lines);
        });
    }

    if (res) {
        mem.pages->give(from.offset, (ggml_backend_buft_get_alloc_size(buft, src) + size_page - 1)/size_page*size_page);
    }

    return res;
}

bool llama_kv_region::convert_to(
        llama_kv_region & to, const llama_kv_rows & rows, const std::vector<uint32_t> & n_used, const llama_kv_convert & convert) {
    bool res = true;

    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l = layers[i];

        res = res && convert_tensor(to, l.k, to.layers[i].k, false, rows, n_used, convert);
        res = res && (!l.v || convert_tensor(to, l.v, to.layers[i].v, true, rows, n_used, convert));
    }

    return res;
}

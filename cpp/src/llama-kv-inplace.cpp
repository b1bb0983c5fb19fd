#include "llama-kv-inplace.h"

#include "ggml.h"
#include "ggml-alloc.h"

#include <algorithm>
#include <cstring>

std::unique_ptr<llama_kv_inplace> llama_kv_inplace::create(ggml_context * ctx, const std::vector<tensor> & tensors, uint32_t n_block) {
    GGML_ASSERT(!tensors.empty() && n_block > 0);

    // tensors start on a page of their own: they do not share one that is committed for the other
    const auto size_of = [](const ggml_tensor * t) {
        return GGML_PAD(ggml_nbytes(t), llama_kv_pages::page_size());
    };

    size_t size = 0;
    for (const auto & [t, trans] : tensors) {
        size += size_of(t);
    }

    std::unique_ptr<llama_kv_inplace> res(new llama_kv_inplace());

    res->pages = llama_kv_pages::reserve(size);
    if (!res->pages) {
        return nullptr;
    }

    res->buf = ggml_backend_cpu_buffer_from_ptr(res->pages->data(), res->pages->size());
    if (!res->buf) {
        return nullptr;
    }

    char * addr = res->pages->data();
    for (const auto & [t, trans] : tensors) {
        ggml_backend_tensor_alloc(res->buf, t, addr);

        res->layout.push_back({ addr, trans ? ggml_type_size(t->type) : ggml_row_size(t->type, t->ne[0]), trans ? (size_t) t->ne[0] : 1 });

        addr += size_of(t);
    }

    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src && !t->buffer) {
            ggml_backend_view_init(t);
        }
    }

    res->n_max         = tensors[0].t->ne[1];
    res->n_cells_block = n_block;
    res->live          = llama_kv_blocks(tensors[0].t->ne[2], std::vector<bool>((res->n_max + n_block - 1)/n_block));

    return res;
}

ggml_backend_buffer_t llama_kv_inplace::buffer() const {
    return buf;
}

uint32_t llama_kv_inplace::n_block() const {
    return n_cells_block;
}

uint32_t llama_kv_inplace::n_blocks() const {
    return live[0].size();
}

uint32_t llama_kv_inplace::n_stream() const {
    return live.size();
}

const llama_kv_blocks & llama_kv_inplace::blocks() const {
    return live;
}

bool llama_kv_inplace::has(uint32_t s, uint32_t i_cell) const {
    return live[s][i_cell/n_cells_block];
}

llama_kv_blocks llama_kv_inplace::make_blocks() const {
    return llama_kv_blocks(n_stream(), std::vector<bool>(n_blocks()));
}

uint32_t llama_kv_inplace::n_cells(const llama_kv_blocks & blocks) const {
    uint32_t res = 0;

    for (const auto & stream : blocks) {
        for (uint32_t ib = 0; ib < stream.size(); ++ib) {
            res += stream[ib] ? std::min(n_cells_block, n_max - ib*n_cells_block) : 0;
        }
    }

    return res;
}

size_t llama_kv_inplace::n_bytes_committed() const {
    return pages->n_bytes_committed();
}

// runs of blocks, as cells
static std::vector<std::pair<uint32_t, uint32_t>> runs_of(const std::vector<bool> & stream, uint32_t n_block, uint32_t n_max) {
    std::vector<std::pair<uint32_t, uint32_t>> res;

    for (uint32_t ib = 0; ib < stream.size(); ++ib) {
        if (!stream[ib]) {
            continue;
        }

        const uint32_t i0 = ib*n_block;
        const uint32_t i1 = std::min(n_max, i0 + n_block);

        if (!res.empty() && res.back().second == i0) {
            res.back().second = i1;
        } else {
            res.emplace_back(i0, i1);
        }
    }

    return res;
}

template <typename F>
void llama_kv_inplace::each(uint32_t s, uint32_t i0, uint32_t i1, F && f) const {
    for (const auto & l : layout) {
        for (size_t j = 0; j < l.n_strips; ++j) {
            f(l.data + ((s*l.n_strips + j)*n_max + i0)*l.size_cell, (i1 - i0)*l.size_cell);
        }
    }
}

bool llama_kv_inplace::assign(const llama_kv_blocks & blocks) {
    auto set = pages->make_set();

    for (uint32_t s = 0; s < n_stream(); ++s) {
        for (const auto & [i0, i1] : runs_of(blocks[s], n_cells_block, n_max)) {
            each(s, i0, i1, [&](const char * addr, size_t size) {
                pages->add(set, addr - pages->data(), size);
            });
        }
    }

    if (!pages->assign(set)) {
        return false;
    }

    live = blocks;

    return true;
}

std::vector<std::pair<uint32_t, uint32_t>> llama_kv_inplace::runs(uint32_t s) const {
    return runs_of(live[s], n_cells_block, n_max);
}

bool llama_kv_inplace::copy_stream(uint32_t ssrc, uint32_t sdst) {
    auto blocks = live;

    for (uint32_t ib = 0; ib < n_blocks(); ++ib) {
        blocks[sdst][ib] = blocks[sdst][ib] || blocks[ssrc][ib];
    }

    if (!assign(blocks)) {
        return false;
    }

    for (const auto & [i0, i1] : runs(ssrc)) {
        for (const auto & l : layout) {
            for (size_t j = 0; j < l.n_strips; ++j) {
                memcpy(l.data + ((sdst*l.n_strips + j)*n_max + i0)*l.size_cell,
                       l.data + ((ssrc*l.n_strips + j)*n_max + i0)*l.size_cell, (i1 - i0)*l.size_cell);
            }
        }
    }

    return true;
}

void llama_kv_inplace::set_zero(const llama_kv_blocks & blocks) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        for (const auto & [i0, i1] : runs_of(blocks[s], n_cells_block, n_max)) {
            each(s, i0, i1, [](char * addr, size_t size) {
                memset(addr, 0, size);
            });
        }
    }
}

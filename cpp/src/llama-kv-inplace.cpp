#include "llama-kv-inplace.h"

#include "ggml.h"
#include "ggml-alloc.h"

#include <algorithm>
#include <cstring>

std::unique_ptr<llama_kv_inplace> llama_kv_inplace::create(ggml_context * ctx, const std::vector<tensor> & tensors, uint32_t n_block) {
    GGML_ASSERT(!tensors.empty() && n_block > 0);

    std::unique_ptr<llama_kv_inplace> res(new llama_kv_inplace());

    res->buf = llama_kv_pages_alloc(ctx, res->pages);
    if (!res->buf) {
        return nullptr;
    }

    for (const auto & [t, trans] : tensors) {
        res->layout.push_back({
            (char *) t->data, trans ? ggml_type_size(t->type) : ggml_row_size(t->type, t->ne[0]), trans ? (size_t) t->ne[0] : 1,
        });
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

size_t llama_kv_inplace::n_bytes_reserved() const {
    return pages->size();
}

size_t llama_kv_inplace::n_bytes_cell() const {
    size_t res = 0;

    for (const auto & l : layout) {
        res += l.n_strips*l.size_cell;
    }

    return res;
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

char * llama_kv_inplace::address(const strips & l, uint32_t s, size_t j, uint32_t i_cell) const {
    return l.data + ((s*l.n_strips + j)*n_max + i_cell)*l.size_cell;
}

template <typename F>
void llama_kv_inplace::each(uint32_t s, uint32_t i0, uint32_t i1, F && f) const {
    for (const auto & l : layout) {
        for (size_t j = 0; j < l.n_strips; ++j) {
            f(address(l, s, j, i0), (i1 - i0)*l.size_cell, l, j);
        }
    }
}

bool llama_kv_inplace::assign(const llama_kv_blocks & blocks) {
    auto set = pages->make_set();

    for (uint32_t s = 0; s < n_stream(); ++s) {
        for (const auto & [i0, i1] : runs_of(blocks[s], n_cells_block, n_max)) {
            each(s, i0, i1, [&](const char * addr, size_t size, const strips &, size_t) {
                pages->add(set, addr - pages->data(), size);
            });
        }
    }

    if (!pages->assign(set)) {
        return false;
    }

    live = blocks;

    llama_kv_pages_set_size(buf, pages->n_bytes_committed());

    return true;
}

std::vector<std::pair<uint32_t, uint32_t>> llama_kv_inplace::runs(uint32_t s) const {
    return runs_of(live[s], n_cells_block, n_max);
}

bool llama_kv_inplace::copy_stream(uint32_t ssrc, uint32_t sdst) {
    auto blocks = live;
    blocks[sdst] = blocks[ssrc];

    if (!assign(blocks)) {
        return false;
    }

    // the static cache copies the whole stream: what is not there is zero, also in pages that it shares with what is copied
    auto rest = make_blocks();
    for (uint32_t ib = 0; ib < n_blocks(); ++ib) {
        rest[sdst][ib] = !blocks[ssrc][ib];
    }
    set_zero(rest);

    for (const auto & run : runs(ssrc)) {
        each(ssrc, run.first, run.second, [&](const char * addr, size_t size, const strips & l, size_t j) {
            memcpy(address(l, sdst, j, run.first), addr, size);
        });
    }

    return true;
}

void llama_kv_inplace::set_zero(const llama_kv_blocks & blocks) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        for (const auto & [i0, i1] : runs_of(blocks[s], n_cells_block, n_max)) {
            each(s, i0, i1, [&](const char * addr, size_t size, const strips &, size_t) {
                pages->set_zero(addr - pages->data(), size);
            });
        }
    }
}

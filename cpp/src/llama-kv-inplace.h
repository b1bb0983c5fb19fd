#pragma once

// Storage of the dynamic KV cache (--kv-dynamic) in host memory: the tensors have the layout of the static cache from the
// start, and only the pages behind the cells that were given out are there.
//
// So nothing is ever copied, no pointer and no stride changes, no graph is rebuilt and the compute buffers are those of the
// static cache. What grows is, per stream, a set of blocks of cells; holes in the middle are blocks that are not in it.
//
// Layout of a tensor [n_embd_gqa, n_cells, n_stream]
//   - K, and V with flash attention: a cell is a row, so a block is one run of bytes per layer and stream
//   - transposed V: a cell is one element in each of n_embd_gqa strips. A page of 4 KiB holds one element of 2048 cells, so
//     the first block of cells commits what the next 7 need, and a hole only gives back pages that are all hole. What is
//     committed is counted in pages, which shows it.
//
// For memory that the CPU backend's plain buffer type allocates. Elsewhere: grown by copy, see llama-kv-storage.h. The
// environment variable LLAMA_KV_DYNAMIC_STORAGE=copy makes that the way everywhere, =inplace (the default) is for scripts
// that want to name it.
//
// Rejected: to have the live size in the strides as the copying storage does (each growth would move all cells of all streams
// but the first, and transposed V as a whole).

#include "llama-kv-pages.h"

#include "ggml-backend.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

// cells by stream, in blocks: [n_stream][n_blocks]
using llama_kv_blocks = std::vector<std::vector<bool>>;

class llama_kv_inplace {
public:
    struct tensor {
        ggml_tensor * t;
        bool          trans;
    };

    // place the tensors, which are those of ctx, and their views in a new buffer whose pages are all absent
    // n_block: cells in a block. the last block of a stream can be smaller
    // null when the address range cannot be had, and nothing has changed then
    static std::unique_ptr<llama_kv_inplace> create(ggml_context * ctx, const std::vector<tensor> & tensors, uint32_t n_block);

    // the buffer that the tensors are in. the caller owns it, and frees it before the storage, or after. its size is what is
    // committed, so that whoever adds up buffers or logs them says what is taken
    ggml_backend_buffer_t buffer() const;

    uint32_t n_block()  const;
    uint32_t n_blocks() const; // of one stream
    uint32_t n_stream() const;

    // the blocks of cells that can be used
    const llama_kv_blocks & blocks() const;

    bool has(uint32_t s, uint32_t i_cell) const;

    // no blocks
    llama_kv_blocks make_blocks() const;

    // cells in a set of blocks, over all streams
    uint32_t n_cells(const llama_kv_blocks & blocks) const;

    size_t n_bytes_committed() const;
    size_t n_bytes_reserved()  const;

    // bytes of K and V data behind one cell of one stream, over all tensors
    size_t n_bytes_cell() const;

    // have these blocks and no others. false when there is no memory, and nothing has changed then
    bool assign(const llama_kv_blocks & blocks);

    // the runs of cells [first, second) of a stream that can be used
    std::vector<std::pair<uint32_t, uint32_t>> runs(uint32_t s) const;

    // the cells of stream ssrc as those of stream sdst, which gets the same blocks. false when there is no memory
    bool copy_stream(uint32_t ssrc, uint32_t sdst);

    // make all cells of the blocks zero, also of blocks that are not live: they can share pages with some that are
    void set_zero(const llama_kv_blocks & blocks);

private:
    struct strips {
        char * data;      // of the tensor
        size_t size_cell; // bytes of a cell in a strip
        size_t n_strips;  // of a stream
    };

    llama_kv_inplace() = default;

    // f(address, size in bytes, strip, index of the strip in the stream) for cells [i0, i1) of stream s in every tensor
    template <typename F>
    void each(uint32_t s, uint32_t i0, uint32_t i1, F && f) const;

    char * address(const strips & l, uint32_t s, size_t j, uint32_t i_cell) const;

    std::unique_ptr<llama_kv_pages> pages;

    ggml_backend_buffer_t buf = nullptr;

    std::vector<strips> layout;

    uint32_t n_max = 0; // cells of a stream

    uint32_t n_cells_block = 0;

    llama_kv_blocks live;
};

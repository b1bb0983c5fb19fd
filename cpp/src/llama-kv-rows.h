#pragma once

// Sets of the rows of a KV cache (--kv-dynamic), in blocks

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// a set of the numbers [0, n), as bits
class llama_kv_set {
public:
    using runs_t = std::vector<std::pair<size_t, size_t>>; // [first, second), in ascending order

    explicit llama_kv_set(size_t n = 0);

    void add   (size_t i0, size_t i1); // [i0, i1), what is beyond n is ignored
    void remove(size_t i0, size_t i1);

    bool has(size_t i) const;

    bool empty() const;

    // the first number from i on that is in the set, or is not. where there is none, n
    size_t next(size_t i, bool in_set) const;

    // after the last number
    size_t end() const;

    // f(first, after the last) of each run, in ascending order. needs no memory, unlike a list of them
    template <typename F>
    void each_run(F && f) const {
        for (size_t i0 = next(0, true), i1; i0 < n; i0 = next(i1, true)) {
            i1 = next(i0, false);
            f(i0, i1);
        }
    }

    runs_t runs() const;

    llama_kv_set & operator|=(const llama_kv_set & other);
    llama_kv_set & operator&=(const llama_kv_set & other);
    llama_kv_set & operator-=(const llama_kv_set & other);

    bool operator==(const llama_kv_set & other) const;

private:
    size_t n;

    std::vector<uint64_t> bits;
};

// rows [0, n_rows) of each stream
class llama_kv_rows {
public:
    using runs_t = std::vector<std::pair<uint32_t, uint32_t>>; // rows [first, second), in ascending order

    llama_kv_rows(uint32_t n_stream, uint32_t n_rows, uint32_t n_block);

    // the blocks of rows [i0, i1), which end at n_rows, of one stream or of all
    void add(uint32_t s, uint32_t i0, uint32_t i1);
    void add(uint32_t i0, uint32_t i1);

    // stream s has what another set has in stream s_other
    void set_stream(uint32_t s, const llama_kv_rows & other, uint32_t s_other);

    bool has(uint32_t s, uint32_t i) const;

    bool empty() const;

    uint32_t size() const; // rows, over all streams
    uint32_t end()  const; // after the last row of any stream
    uint32_t n_stream() const;
    uint32_t n_block()  const;

    // f(first row, after the last) of each run of a stream, in ascending order. needs no memory, unlike a list of them
    template <typename F>
    void each_run(uint32_t s, F && f) const {
        streams[s].each_run([&](size_t i0, size_t i1) {
            f(uint32_t(i0*size_block), (uint32_t) std::min<uint64_t>(n_rows, uint64_t(i1)*size_block));
        });
    }

    runs_t runs(uint32_t s) const;

    // a set of the same shape, with nothing in it
    llama_kv_rows none() const;

    llama_kv_rows & operator|=(const llama_kv_rows & other);
    llama_kv_rows & operator&=(const llama_kv_rows & other);
    llama_kv_rows & operator-=(const llama_kv_rows & other);

    bool operator==(const llama_kv_rows & other) const;

private:
    uint32_t n_rows;
    uint32_t size_block; // rows

    std::vector<llama_kv_set> streams; // of blocks
};

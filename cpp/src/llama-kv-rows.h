#pragma once

// Sets of the rows of a KV cache (--kv-dynamic), in blocks

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

// a set of numbers from [0, n), stored as bits
class llama_kv_set {
public:
    explicit llama_kv_set(size_t n = 0);

    void add   (size_t i0, size_t i1); // the numbers [i0, i1). numbers from n on are ignored
    void remove(size_t i0, size_t i1);

    bool has(size_t i) const { return i < n && (bits[i/64] >> i % 64 & 1) != 0; }

    size_t count() const; // numbers that are in the set

    // return the first number >= i that is in the set, or that is not in the set. The result is n if there is no such number
    size_t next(size_t i, bool in_set) const;

    // call f(first, end) for each run of numbers in [i0, i1) that are in the set, or that are not in the set, in ascending order
    // The function needs no memory, unlike a list of runs. f may add and remove the numbers of its run.
    template <typename F>
    void each_run(size_t i0, size_t i1, bool in_set, F && f) const {
        i1 = std::min(i1, n);

        for (size_t first = next(i0, in_set), end; first < i1; first = next(end, in_set)) {
            end = std::min(i1, next(first, !in_set));
            f(first, end);
        }
    }

    // call f(first, end) for each run of numbers that are in the set
    template <typename F>
    void each_run(F && f) const {
        each_run(0, n, true, f);
    }

    llama_kv_set & operator|=(const llama_kv_set & other);
    llama_kv_set & operator&=(const llama_kv_set & other);
    llama_kv_set & operator-=(const llama_kv_set & other);

    bool operator==(const llama_kv_set & other) const { return n == other.n && bits == other.bits; }

private:
    size_t n;

    std::vector<uint64_t> bits;
};

// a set of rows of all streams. Each stream has the rows [0, n_rows), in blocks of n_block rows
class llama_kv_rows {
public:
    llama_kv_rows(uint32_t n_stream, uint32_t n_rows, uint32_t n_block);

    // add the blocks that contain the rows [i0, i1), of one stream or of all streams. Rows from n_rows on are ignored
    void add(uint32_t s, uint32_t i0, uint32_t i1);
    void add(uint32_t i0, uint32_t i1);

    // replace the rows of stream s by the rows that another set has in stream s_other
    void set_stream(uint32_t s, const llama_kv_rows & other, uint32_t s_other);

    // check whether row i of stream s is in the set. i must be less than n_rows, because a higher number would be a row of the
    // next stream
    bool has(uint32_t s, uint32_t i) const { return blocks.has(s*n_blocks + i/size_block); }

    uint32_t size() const; // number of rows in the set, over all streams
    uint32_t end()  const; // 1 + the highest row of any stream. 0: the set is empty

    uint32_t n_stream() const { return n_streams; }
    uint32_t n_block()  const { return size_block; }

    // call f(first, end) for each run of rows of a stream, in ascending order. Needs no memory, unlike a list of runs
    template <typename F>
    void each_run(uint32_t s, F && f) const {
        const size_t b0 = s*n_blocks;

        blocks.each_run(b0, b0 + n_blocks, true, [&](size_t i0, size_t i1) {
            f(uint32_t((i0 - b0)*size_block), (uint32_t) std::min<uint64_t>(n_rows, uint64_t(i1 - b0)*size_block));
        });
    }

    // return an empty set with the same number of streams, rows and rows per block
    llama_kv_rows none() const { return llama_kv_rows(n_streams, n_rows, size_block); }

    // union, intersection and difference with a set that has the same number of streams, rows and rows per block
    llama_kv_rows & operator|=(const llama_kv_rows & other) {
        blocks |= other.blocks;
        return *this;
    }

    llama_kv_rows & operator&=(const llama_kv_rows & other) {
        blocks &= other.blocks;
        return *this;
    }

    llama_kv_rows & operator-=(const llama_kv_rows & other) {
        blocks -= other.blocks;
        return *this;
    }

    bool operator==(const llama_kv_rows & other) const { return blocks == other.blocks; }

private:
    uint32_t n_streams;
    uint32_t n_rows;
    uint32_t size_block; // rows of a block
    size_t   n_blocks;   // blocks of a stream

    llama_kv_set blocks; // blocks of all streams, one stream after the other
};

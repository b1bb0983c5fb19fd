#include "llama-kv-rows.h"

#include <algorithm>
#include <bitset>

//
// llama_kv_set
//

llama_kv_set::llama_kv_set(size_t n) : n(n), bits((n + 63)/64, 0) {
}

// call f(word, mask of the bits of the word that are in [i0, i1)) for each word
template <typename F>
static void each_word(std::vector<uint64_t> & bits, size_t i0, size_t i1, F && f) {
    while (i0 < i1) {
        const size_t ib = i0 % 64;
        const size_t nb = std::min(i1 - i0, 64 - ib);

        f(bits[i0/64], nb == 64 ? ~uint64_t(0) : ((uint64_t(1) << nb) - 1) << ib);

        i0 += nb;
    }
}

void llama_kv_set::add(size_t i0, size_t i1) {
    each_word(bits, i0, std::min(i1, n), [](uint64_t & word, uint64_t mask) { word |= mask; });
}

void llama_kv_set::remove(size_t i0, size_t i1) {
    each_word(bits, i0, std::min(i1, n), [](uint64_t & word, uint64_t mask) { word &= ~mask; });
}

size_t llama_kv_set::count() const {
    size_t res = 0;
    for (const uint64_t word : bits) {
        res += std::bitset<64>(word).count();
    }

    return res;
}

size_t llama_kv_set::next(size_t i, bool in_set) const {
    while (i < n) {
        uint64_t word = (in_set ? bits[i/64] : ~bits[i/64]) >> i % 64;

        if (word == 0) {
            i = (i/64 + 1)*64;
            continue;
        }

        while ((word & 1) == 0) {
            word >>= 1;
            i++;
        }

        return std::min(i, n);
    }

    return n;
}

llama_kv_set & llama_kv_set::operator|=(const llama_kv_set & other) {
    std::transform(bits.begin(), bits.end(), other.bits.begin(), bits.begin(), [](uint64_t a, uint64_t b) { return a | b; });
    return *this;
}

llama_kv_set & llama_kv_set::operator&=(const llama_kv_set & other) {
    std::transform(bits.begin(), bits.end(), other.bits.begin(), bits.begin(), [](uint64_t a, uint64_t b) { return a & b; });
    return *this;
}

llama_kv_set & llama_kv_set::operator-=(const llama_kv_set & other) {
    std::transform(bits.begin(), bits.end(), other.bits.begin(), bits.begin(), [](uint64_t a, uint64_t b) { return a & ~b; });
    return *this;
}

//
// llama_kv_rows
//

llama_kv_rows::llama_kv_rows(uint32_t n_stream, uint32_t n_rows, uint32_t n_block) :
    n_streams(n_stream), n_rows(n_rows), size_block(n_block), n_blocks((n_rows + n_block - 1)/n_block), blocks(n_stream*n_blocks) {
}

void llama_kv_rows::add(uint32_t s, uint32_t i0, uint32_t i1) {
    i1 = std::min(i1, n_rows);

    if (i0 < i1) {
        blocks.add(s*n_blocks + i0/size_block, s*n_blocks + (i1 - 1)/size_block + 1);
    }
}

void llama_kv_rows::add(uint32_t i0, uint32_t i1) {
    for (uint32_t s = 0; s < n_streams; ++s) {
        add(s, i0, i1);
    }
}

void llama_kv_rows::set_stream(uint32_t s, const llama_kv_rows & other, uint32_t s_other) {
    blocks.remove(s*n_blocks, (s + 1)*n_blocks);
    other.each_run(s_other, [&](uint32_t i0, uint32_t i1) { add(s, i0, i1); });
}

uint32_t llama_kv_rows::size() const {
    uint32_t res = 0;
    for (uint32_t s = 0; s < n_streams; ++s) {
        each_run(s, [&](uint32_t i0, uint32_t i1) { res += i1 - i0; });
    }

    return res;
}

uint32_t llama_kv_rows::end() const {
    uint32_t res = 0;
    for (uint32_t s = 0; s < n_streams; ++s) {
        each_run(s, [&](uint32_t, uint32_t i1) { res = std::max(res, i1); });
    }

    return res;
}

#include "llama-kv-rows.h"

#include <algorithm>

//
// llama_kv_set
//

llama_kv_set::llama_kv_set(size_t n) : n(n), bits((n + 63)/64, 0) {
}

// f(word, mask of its bits in [i0, i1))
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

bool llama_kv_set::has(size_t i) const {
    return i < n && (bits[i/64] >> i % 64 & 1) != 0;
}

bool llama_kv_set::empty() const {
    return std::all_of(bits.begin(), bits.end(), [](uint64_t word) { return word == 0; });
}

llama_kv_set::runs_t llama_kv_set::runs() const {
    runs_t res;

    for (size_t i = 0; i < n; ) {
        const uint64_t word = bits[i/64] >> i % 64;
        const bool     full = word == ~uint64_t(0); // only at the start of a word

        if (word == 0 || full) {
            const size_t i1 = std::min(n, (i/64 + 1)*64);
            if (full) {
                if (!res.empty() && res.back().second == i) {
                    res.back().second = i1;
                } else {
                    res.emplace_back(i, i1);
                }
            }
            i = i1;
            continue;
        }

        if (word & 1) {
            if (!res.empty() && res.back().second == i) {
                res.back().second++;
            } else {
                res.emplace_back(i, i + 1);
            }
        }
        i++;
    }

    return res;
}

llama_kv_set & llama_kv_set::operator|=(const llama_kv_set & other) {
    for (size_t i = 0; i < bits.size(); ++i) {
        bits[i] |= other.bits[i];
    }
    return *this;
}

llama_kv_set & llama_kv_set::operator&=(const llama_kv_set & other) {
    for (size_t i = 0; i < bits.size(); ++i) {
        bits[i] &= other.bits[i];
    }
    return *this;
}

llama_kv_set & llama_kv_set::operator-=(const llama_kv_set & other) {
    for (size_t i = 0; i < bits.size(); ++i) {
        bits[i] &= ~other.bits[i];
    }
    return *this;
}

bool llama_kv_set::operator==(const llama_kv_set & other) const {
    return n == other.n && bits == other.bits;
}

//
// llama_kv_rows
//

llama_kv_rows::llama_kv_rows(uint32_t n_stream, uint32_t n_rows, uint32_t n_block) :
    n_rows(n_rows), size_block(n_block), streams(n_stream, llama_kv_set((n_rows + n_block - 1)/n_block)) {
}

void llama_kv_rows::add(uint32_t s, uint32_t i0, uint32_t i1) {
    if (i0 < i1) {
        streams[s].add(i0/size_block, (i1 - 1)/size_block + 1);
    }
}

void llama_kv_rows::add(uint32_t i0, uint32_t i1) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        add(s, i0, i1);
    }
}

void llama_kv_rows::set_stream(uint32_t s, const llama_kv_rows & other, uint32_t s_other) {
    streams[s] = other.streams[s_other];
}

bool llama_kv_rows::has(uint32_t s, uint32_t i) const {
    return streams[s].has(i/size_block);
}

bool llama_kv_rows::empty() const {
    return std::all_of(streams.begin(), streams.end(), [](const llama_kv_set & stream) { return stream.empty(); });
}

uint32_t llama_kv_rows::size() const {
    uint32_t res = 0;

    for (uint32_t s = 0; s < n_stream(); ++s) {
        for (const auto & [i0, i1] : runs(s)) {
            res += i1 - i0;
        }
    }

    return res;
}

uint32_t llama_kv_rows::end() const {
    uint32_t res = 0;

    for (uint32_t s = 0; s < n_stream(); ++s) {
        const auto cur = runs(s);

        res = std::max(res, cur.empty() ? 0 : cur.back().second);
    }

    return res;
}

uint32_t llama_kv_rows::n_stream() const {
    return streams.size();
}

uint32_t llama_kv_rows::n_block() const {
    return size_block;
}

llama_kv_rows::runs_t llama_kv_rows::runs(uint32_t s) const {
    runs_t res;

    for (const auto & [i0, i1] : streams[s].runs()) {
        res.emplace_back(i0*size_block, std::min<uint64_t>(n_rows, uint64_t(i1)*size_block));
    }

    return res;
}

llama_kv_rows llama_kv_rows::none() const {
    return llama_kv_rows(n_stream(), n_rows, size_block);
}

llama_kv_rows & llama_kv_rows::operator|=(const llama_kv_rows & other) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        streams[s] |= other.streams[s];
    }
    return *this;
}

llama_kv_rows & llama_kv_rows::operator&=(const llama_kv_rows & other) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        streams[s] &= other.streams[s];
    }
    return *this;
}

llama_kv_rows & llama_kv_rows::operator-=(const llama_kv_rows & other) {
    for (uint32_t s = 0; s < n_stream(); ++s) {
        streams[s] -= other.streams[s];
    }
    return *this;
}

bool llama_kv_rows::operator==(const llama_kv_rows & other) const {
    return streams == other.streams;
}

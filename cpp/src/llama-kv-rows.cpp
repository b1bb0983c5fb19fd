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

size_t llama_kv_set::end() const {
    size_t i = bits.size();
    while (i > 0 && bits[i - 1] == 0) {
        i--;
    }

    size_t res = i*64;
    while (res > 0 && !has(res - 1)) {
        res--;
    }

    return res;
}

llama_kv_set::runs_t llama_kv_set::runs() const {
    runs_t res;

    each_run([&](size_t i0, size_t i1) { res.emplace_back(i0, i1); });

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
        each_run(s, [&](uint32_t i0, uint32_t i1) { res += i1 - i0; });
    }

    return res;
}

uint32_t llama_kv_rows::end() const {
    size_t res = 0;

    for (const auto & stream : streams) {
        res = std::max(res, stream.end());
    }

    return std::min<uint64_t>(n_rows, uint64_t(res)*size_block);
}

uint32_t llama_kv_rows::n_stream() const {
    return streams.size();
}

uint32_t llama_kv_rows::n_block() const {
    return size_block;
}

llama_kv_rows::runs_t llama_kv_rows::runs(uint32_t s) const {
    runs_t res;

    each_run(s, [&](uint32_t i0, uint32_t i1) { res.emplace_back(i0, i1); });

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

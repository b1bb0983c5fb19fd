#pragma once

// Conversion of rows to other types, for tests of a storage that changes types

#include "../src/llama-kv-lines.h"

#include "test-kv.h"

#include <algorithm>
#include <cstring>
#include <vector>

// convert n elements to another type, one block at a time, so that single rows or elements can be checked
inline std::vector<char> converted(const char * data, int64_t n, ggml_type from, ggml_type to) {
    std::vector<float> f32(n);
    if (from == GGML_TYPE_F32) {
        memcpy(f32.data(), data, n*sizeof(float));
    } else {
        ggml_get_type_traits(from)->to_float(data, f32.data(), n);
    }

    std::vector<char> res(ggml_row_size(to, n));
    if (to == GGML_TYPE_F32) {
        memcpy(res.data(), f32.data(), res.size());
    } else {
        ggml_get_type_traits(to)->from_float_ref(f32.data(), res.data(), n);
    }

    return res;
}

// convert the lines of a tensor (llama_kv_lines) as a graph does: read all lines before the first write
inline void convert(const llama_kv_lines & from, const llama_kv_lines & to, bool) {
    check(from.n == to.n && from.n_lines == to.n_lines, "lines agree");
    check(from.n_lines <= llama_kv_n_lines(from.t->type, from.n, LLAMA_KV_CONVERT_ELEMENTS), "no more lines than fit");

    std::vector<std::vector<char>> lines;
    for (int64_t l = 0; l < from.n_lines; ++l) {
        lines.push_back(converted((const char *) from.t->data + from.offs + l*from.stride, from.n, from.t->type, to.t->type));
    }
    for (int64_t l = 0; l < to.n_lines; ++l) {
        memcpy((char *) to.t->data + to.offs + l*to.stride, lines[l].data(), lines[l].size());
    }
}


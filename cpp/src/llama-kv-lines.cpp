#include "llama-kv-lines.h"

#include <algorithm>
#include <numeric>

int64_t llama_kv_n_lines(ggml_type type, int64_t n, int64_t n_elements) {
    const int64_t n_least = ggml_is_quantized(type) ? 256/std::gcd<int64_t, int64_t>(256, ggml_row_size(type, n)) : 1;

    return std::max<int64_t>(1, n_elements/n/n_least)*n_least;
}

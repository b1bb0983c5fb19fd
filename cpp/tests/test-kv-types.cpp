// Unit tests of a change of types in the storage of the dynamic KV cache
// Every row of every layer and stream must equal the conversion of its bytes, and all other bytes must be zero. The tests run
// with enough memory for a copy of the cells, and with no memory except the memory that the cells already use.

#include "../src/llama-kv-pages.h"

#include "test-kv-cache.h"

#include <string>
#include <vector>

static void test_change(const config & cfg, ggml_type from, ggml_type to, bool has_memory) {
    const std::string what = cfg.name() + ": " + ggml_type_name(from) + " to " + ggml_type_name(to) + (has_memory ? "" : " without memory");

    set_fail("-1");

    cache c(cfg, from);

    // The used cells of the streams end at different rows. With storage by copy, all streams have the same number of rows.
    // With storage in place, there is a hole between the rows. With storage by copy and one stream, the cache has not grown, so all
    // layers are in one buffer.
    const uint32_t n_first = cfg.what == kind::copy && cfg.n_stream == 1 ? 300 : 700;

    auto rows = c.storage->rows();
    if (cfg.what == kind::inplace) {
        for (int64_t s = 0; s < cfg.n_stream; ++s) {
            rows.add(s, 512, 700 + 100*s);
        }
    } else if (cfg.what == kind::copy && cfg.n_stream > 1) {
        rows.add(0, 1024);
    }
    check(c.storage->try_resize(rows, std::vector<uint32_t>(cfg.n_stream, 0)), what + ": rows");

    std::vector<uint32_t> n_used;
    for (int64_t s = 0; s < cfg.n_stream; ++s) {
        n_used.push_back(n_first + 37*s);
    }
    c.fill(n_used);

    const auto before = c.rows(n_used);

    const size_t size_before = c.size_bufs();
    const bool   is_wider    = ggml_row_size(to, N_EMBD) > ggml_row_size(from, N_EMBD);

    if (!has_memory) {
        set_fail("1+");
    }

    const bool ok = c.storage->prepare_types(to, to, n_used);

    // in place, only transposed V needs other addresses for smaller rows
    check(ok == (has_memory || (!is_wider && (cfg.what != kind::inplace || !cfg.v_trans))), what + ": is prepared");

    if (!ok) {
        check(c.is_consistent(from) && c.rows(n_used) == before, what + ": nothing has changed");
        set_fail("-1");
        return;
    }

    c.storage->set_types(convert);

    set_fail("-1");

    check(c.is_consistent(to), what + ": tensors and views");
    check(c.storage->moved(), what + ": the graphs are told");

    const auto after = c.rows(n_used);

    size_t n_wrong = 0;
    for (size_t i = 0; i < before.size(); ++i) {
        n_wrong += after[i] != converted(before[i].data(), N_EMBD, from, to);
    }
    check(n_wrong == 0, what + ": rows");
    check(c.is_rest_zero(n_used), what + ": the rest");

    if (has_memory) {
        const double ratio = (double) ggml_row_size(to, N_EMBD)/ggml_row_size(from, N_EMBD);
        check(c.size_bufs() <= size_before*ratio + 2*N_LAYER*(1 + (cfg.v_trans ? N_EMBD : 2))*cfg.n_stream*llama_kv_pages_size_host(), what + ": memory");
        check(c.storage->n_bytes(c.storage->rows(), to, to) <= c.size_bufs() + 4096, what + ": bytes known before");
    }

    // change back, which does not restore the precision
    check(c.storage->prepare_types(from, from, n_used), what + ": back is prepared");
    c.storage->set_types(convert);
    check(c.is_consistent(from) && c.is_rest_zero(n_used), what + ": back");

    const auto back = c.rows(n_used);
    for (size_t i = 0; i < before.size(); ++i) {
        n_wrong += back[i] != converted(after[i].data(), N_EMBD, to, from);
    }
    check(n_wrong == 0, what + ": rows back");

    // the cache can still grow
    if (cfg.what != kind::fixed) {
        auto more = c.storage->rows();
        more.add(0, 1024, N_MAX);
        check(c.storage->try_resize(more, n_used) && c.rows(n_used) == back && c.is_rest_zero(n_used), what + ": grows on");
    }

    c.storage->forget_types();
}

int main() {
    ggml_time_init(); // on Windows, the clock that the storage uses must be initialized

    for (const kind what : { kind::fixed, kind::copy, kind::inplace }) {
        for (const int64_t n_stream : { 1, 3 }) {
            for (const bool has_memory : { true, false }) {
                test_change({ what, true, true, n_stream }, GGML_TYPE_F32, GGML_TYPE_F16, has_memory);
                test_change({ what, true, true, n_stream }, GGML_TYPE_F16, GGML_TYPE_F32, has_memory);
                for (const bool has_v : { true, false }) {
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_F16,  GGML_TYPE_BF16, has_memory);
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_F16,  GGML_TYPE_Q8_0, has_memory);
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, has_memory);
                    test_change({ what, false, has_v, n_stream }, GGML_TYPE_Q8_0, GGML_TYPE_F16,  has_memory);
                }
            }
        }
    }

    return report();
}

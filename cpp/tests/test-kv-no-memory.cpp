// Unit tests of the storage of the dynamic KV cache when host memory runs out
// In each run, another small allocation (operator new) fails, either alone or together with all later allocations. The request
// must then either succeed, or change nothing.

#include "../src/llama-kv-limits.h"

#include "test-kv-cache.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <vector>

//
// operator new of the process, which the libraries use as well
//

static std::atomic<long> n_left   = -1; // number of allocations until one fails. below 0: none fails
static std::atomic<bool> is_once  = true;
static std::atomic<long> n_failed_new = 0;

static bool is_gone() {
    if (n_left < 0) {
        return false;
    }
    if (n_left > 0) {
        n_left--;
        return false;
    }
    if (is_once) {
        n_left = -1;
    }
    n_failed_new++;

    return true;
}

void * operator new(size_t size) {
    void * res = is_gone() ? nullptr : malloc(size);
    if (!res) {
        throw std::bad_alloc();
    }

    return res;
}

void * operator new(size_t size, const std::nothrow_t &) noexcept {
    return is_gone() ? nullptr : malloc(size);
}

void operator delete(void * ptr) noexcept         { free(ptr); }
void operator delete(void * ptr, size_t) noexcept { free(ptr); }

// ignore leaks of upstream's C code, which leaks if a function that it calls throws
extern "C" const char * __lsan_default_suppressions();
extern "C" const char * __lsan_default_suppressions() { return "leak:ggml_backend_alloc_ctx_tensors_from_buft"; }

// make the next commit query the free memory of the system, because the query allocates host memory and can fail
// llama_kv_limits_allow() subtracts each allowed size from the result of the last query, and repeats the query only if little
// is left. So let llama_kv_limits_allow() subtract all except 1 MiB.
static void look_next_time() {
    const size_t n_left = llama_kv_limits_available();

    if (n_left != SIZE_MAX) {
        llama_kv_limits_allow(n_left - std::min(n_left, size_t(1) << 20));
    }
}

// return the result of f, during which allocation n fails, counted from 0. once: only this allocation fails, otherwise all later
// ones fail, too
static bool without_memory(long n, bool once, const std::function<bool()> & f) {
    n_failed_new = 0;
    is_once      = once;
    n_left       = n;

    bool res = false;
    try {
        res = f();
    } catch (const std::bad_alloc &) {
    }

    n_left = -1;

    return res;
}

// call f(n, once, name) for n = 0, 1, ... until it returns false. f returns true if an allocation has failed
template <typename F>
static void each_allocation(const std::string & what, F && f) {
    for (const bool once : { true, false }) {
        long n = 0;
        while (f(n, once, what + ", allocation " + std::to_string(n) + (once ? "" : " and all after it"))) {
            n++;
        }
        check(n > 0, what + ": allocates");
    }
}

//
// requests to a storage
//

static constexpr uint32_t N_USED = 500;

static llama_kv_rows rows_of(const cache & c, uint32_t n, uint32_t hole) {
    auto res = c.storage->rows();
    for (int64_t s = 0; s < c.cfg.n_stream; ++s) {
        res.add(s, hole, n - 64*s);
    }
    return res;
}

// fill some rows. In place, leave a hole
static std::vector<uint32_t> start(cache & c) {
    const std::vector<uint32_t> n_used(c.cfg.n_stream, N_USED);

    if (c.cfg.what != kind::fixed) {
        check(c.storage->try_resize(rows_of(c, 768, c.cfg.what == kind::inplace ? 384 : 0), n_used), c.cfg.name() + ": rows to start with");
    }
    c.fill(n_used);
    c.storage->moved();

    return n_used;
}

static void test_grow(const config & cfg) {
    each_allocation(cfg.name() + ": grows", [&](long n, bool once, const std::string & what) {
        cache c(cfg, GGML_TYPE_F16);

        const auto n_used = start(c);
        const auto data   = c.rows(n_used);
        const auto before = c.storage->rows();
        const auto after  = rows_of(c, 1536, cfg.what == kind::inplace ? 1024 : 0);

        const size_t size = c.size_bufs();

        if (cfg.is_device) {
            look_next_time();
        }

        const bool res    = without_memory(n, once, [&]() { return c.storage->try_resize(after, n_used); });
        const bool failed = n_failed_new > 0;

        check(c.storage->rows() == (res ? after : before), what + ": rows");
        check(res || cfg.what == kind::copy || c.size_bufs() == size, what + ": memory");
        check(c.is_consistent(GGML_TYPE_F16) && c.rows(n_used) == data && c.is_rest_zero(n_used), what + ": the data");

        check(c.storage->try_resize(after, n_used), what + ": grows later");
        check(c.is_consistent(GGML_TYPE_F16) && c.rows(n_used) == data && c.is_rest_zero(n_used), what + ": the data later");

        return failed;
    });
}

// free rows while small allocations fail. Pages that could not be freed must be freed with the next change of the size
static void test_shrink(const config & cfg) {
    each_allocation(cfg.name() + ": gives back", [&](long n, bool once, const std::string & what) {
        cache c(cfg, GGML_TYPE_F16);

        const auto n_used = start(c);
        const auto before = c.storage->rows();
        const auto all    = rows_of(c, N_MAX, 0);

        const size_t size = c.size_bufs();

        check(c.storage->try_resize(all, n_used), what + ": grows");
        c.fill(n_used);

        if (cfg.is_device) {
            look_next_time();
        }

        const bool res    = without_memory(n, once, [&]() { return c.storage->try_resize(before, n_used); });
        const bool failed = n_failed_new > 0;

        check(c.storage->rows() == (res ? before : all), what + ": rows");
        check(c.is_consistent(GGML_TYPE_F16), what + ": tensors and views");

        const auto data = c.rows(n_used);

        check(c.storage->try_resize(all, n_used) && c.storage->try_resize(before, n_used), what + ": grows and gives back");
        check(c.is_consistent(GGML_TYPE_F16) && c.size_bufs() <= size, what + ": memory");
        check(!res || c.rows(n_used) == data, what + ": the data");

        return failed;
    });
}

static void test_clear(const config & cfg) {
    each_allocation(cfg.name() + ": is cleared", [&](long n, bool once, const std::string & what) {
        cache c(cfg, GGML_TYPE_F16);

        start(c);

        const bool res    = without_memory(n, once, [&]() { return c.storage->clear(-1); });
        const bool failed = n_failed_new > 0;

        check(!res || c.is_rest_zero(std::vector<uint32_t>(cfg.n_stream, 0)), what + ": zeros");
        check(c.is_consistent(GGML_TYPE_F16), what + ": tensors and views");
        check(c.storage->clear(-1) && c.is_rest_zero(std::vector<uint32_t>(cfg.n_stream, 0)), what + ": later");

        return failed;
    });
}

static void test_types(const config & cfg, ggml_type from, ggml_type to) {
    const std::string name = cfg.name() + ": " + ggml_type_name(from) + " to " + ggml_type_name(to);

    // once a change is prepared, it must not fail
    const auto change = [&](cache & c, const std::string & what) {
        const long n  = n_left;
        const bool is = without_memory(0, false, [&]() {
            return c.storage->set_types([&](const llama_kv_lines & a, const llama_kv_lines & b, bool is_v) {
                n_left = -1; // the allocations in here belong to the test
                convert(a, b, is_v);
                n_left = 0;
            });
        });
        n_left = n;
        check(is, what + ": needs no memory once it has begun");
    };

    each_allocation(name, [&](long n, bool once, const std::string & what) {
        cache c(cfg, from);

        const auto n_used = start(c);
        const auto before = c.rows(n_used);
        const auto rows   = c.storage->rows();

        const bool res    = without_memory(n, once, [&]() { return c.storage->prepare_types(to, to, n_used); });
        const bool failed = n_failed_new > 0;

        if (!res) {
            check(c.is_consistent(from) && c.rows(n_used) == before && c.is_rest_zero(n_used), what + ": nothing has changed");
            check(c.storage->prepare_types(to, to, n_used), what + ": is prepared later");
        }

        change(c, what);

        size_t n_wrong = 0;
        const auto after = c.rows(n_used);
        for (size_t i = 0; i < before.size(); ++i) {
            n_wrong += after[i] != converted(before[i].data(), N_EMBD, from, to);
        }
        check(c.is_consistent(to) && n_wrong == 0 && c.is_rest_zero(n_used) && c.storage->rows() == rows, what + ": the data");

        return failed;
    });
}

int main() {
    ggml_time_init(); // on Windows, the clock that the storage uses must be initialized

    set_fail("-1");

    for (const bool v_trans : { false, true }) {
        for (const kind what : { kind::fixed, kind::copy, kind::inplace }) {
            const config cfg = { what, v_trans, true, 2 };

            if (what != kind::fixed) {
                test_grow  (cfg);
                test_shrink(cfg);
            }
            if (what == kind::inplace) {
                test_clear(cfg);
            }
            if (what == kind::copy) {
                test_grow  ({ what, v_trans, true, 2, true });
                test_shrink({ what, v_trans, true, 2, true });
            }

            test_types(cfg, GGML_TYPE_F32, GGML_TYPE_F16);
            test_types(cfg, GGML_TYPE_F16, GGML_TYPE_F32);
            if (!v_trans) {
                test_types(cfg, GGML_TYPE_F16,  GGML_TYPE_Q8_0);
                test_types(cfg, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0);
            }
        }
    }

    return report();
}

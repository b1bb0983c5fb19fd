#pragma once

// Helpers for the unit tests of the dynamic KV cache

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

static int n_failed = 0;

static inline void check(bool ok, const std::string & what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what.c_str());
        n_failed++;
    }
}

static inline void check_eq(const char * what, uint64_t expected, uint64_t actual) {
    check(expected == actual, std::string(what) + ": expected " + std::to_string(expected) + ", got " + std::to_string(actual));
}

// set the environment variable LLAMA_KV_DYNAMIC_FAIL, see llama-kv-fault.h. "": unset it
static inline void set_fail(const char * n) {
#ifdef _WIN32
    _putenv_s("LLAMA_KV_DYNAMIC_FAIL", n);
#else
    if (*n) {
        setenv("LLAMA_KV_DYNAMIC_FAIL", n, 1);
    } else {
        unsetenv("LLAMA_KV_DYNAMIC_FAIL");
    }
#endif
}

static inline int report() {
    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return EXIT_FAILURE;
    }

    printf("all checks passed\n");
    return EXIT_SUCCESS;
}

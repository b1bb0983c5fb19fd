#pragma once

// Helpers for the tests of the CPU backend
//
// These tests use no file of the layer `core`. So this file repeats check() and report() of test-kv.h.

#include "ggml.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

static int n_failed = 0;

// all types of K and V that llama.cpp accepts
static constexpr ggml_type types[] = {
    GGML_TYPE_F32,
    GGML_TYPE_F16,
    GGML_TYPE_BF16,
    GGML_TYPE_Q8_0,
    GGML_TYPE_Q5_1,
    GGML_TYPE_Q5_0,
    GGML_TYPE_Q4_1,
    GGML_TYPE_Q4_0,
    GGML_TYPE_IQ4_NL,
};

static inline void check(bool ok, const std::string & what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what.c_str());
        n_failed++;
    }
}

// return 64 random bits that are the same on every platform. The upper bits are the best ones
static inline uint64_t random_bits() {
    static uint64_t state = 1;

    state = state*6364136223846793005ull + 1442695040888963407ull;

    return state;
}

static inline int report() {
    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return EXIT_FAILURE;
    }

    printf("all checks passed\n");
    return EXIT_SUCCESS;
}

#include "llama-kv-fault.h"

#include "llama-impl.h"

#include <atomic>
#include <cstdlib>

bool llama_kv_fault_alloc() {
    const char * LLAMA_KV_DYNAMIC_FAIL = getenv("LLAMA_KV_DYNAMIC_FAIL");
    if (!LLAMA_KV_DYNAMIC_FAIL) {
        return false;
    }

    static std::atomic<long> n_alloc = 0;

    char * end = nullptr;

    const long n_fail = strtol(LLAMA_KV_DYNAMIC_FAIL, &end, 10);
    const long n_cur  = ++n_alloc;

    const bool fail = n_cur == n_fail || (n_cur > n_fail && end && *end == '+');
    if (fail) {
        LLAMA_LOG_WARN("%s: LLAMA_KV_DYNAMIC_FAIL: allocation %ld fails\n", __func__, n_cur);
    }

    return fail;
}

size_t llama_kv_fault_step(size_t n_bytes_usual) {
    const char * LLAMA_KV_DYNAMIC_STEP = getenv("LLAMA_KV_DYNAMIC_STEP");

    return LLAMA_KV_DYNAMIC_STEP ? (size_t) atoll(LLAMA_KV_DYNAMIC_STEP) : n_bytes_usual;
}

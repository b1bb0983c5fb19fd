// Load this library before llama.cpp's libraries (LD_PRELOAD) to detect accesses to a KV cache during the computation
// of a batch, which a CPU hides. A CPU has finished when the call returns; here, a computation lasts until a wait for
// it.
//
// KV_WATCH=1           abort if storage of a KV cache is moved or freed during a computation
// KV_WATCH=no-reserve  let compute buffers fail while LLAMA_KV_DYNAMIC_FAIL is set

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static bool computing = false;

static void * next(const char * name) {
    void * res = dlsym(RTLD_NEXT, name);
    if (!res) {
        fprintf(stderr, "watch: no %s\n", name);
        abort();
    }
    return res;
}

static bool watching(const char * what) {
    const char * val = getenv("KV_WATCH");
    return val && strcmp(val, what) == 0;
}

static void check(const char * what) {
    if (computing && watching("1")) {
        fprintf(stderr, "watch: GGML_ASSERT(!computing): %s during a computation\n", what);
        abort();
    }
}

int ggml_backend_sched_graph_compute_async(void * sched, void * graph) {
    computing = true;
    return ((int (*)(void *, void *)) next("ggml_backend_sched_graph_compute_async"))(sched, graph);
}

void ggml_backend_sched_synchronize(void * sched) {
    ((void (*)(void *)) next("ggml_backend_sched_synchronize"))(sched);
    computing = false;
}

bool ggml_backend_sched_reserve(void * sched, void * graph) {
    if (watching("no-reserve") && getenv("LLAMA_KV_DYNAMIC_FAIL")) {
        return false;
    }
    return ((bool (*)(void *, void *)) next("ggml_backend_sched_reserve"))(sched, graph);
}

void * ggml_backend_alloc_ctx_tensors_from_buft(void * ctx, void * buft) {
    const void * tensor = ((void * (*)(void *)) next("ggml_get_first_tensor"))(ctx);
    const char * name   = tensor ? ((const char * (*)(const void *)) next("ggml_get_name"))(tensor) : "";
    if (strncmp(name, "cache_", 6) == 0) {
        check("the KV cache moved");
    }
    return ((void * (*)(void *, void *)) next("ggml_backend_alloc_ctx_tensors_from_buft"))(ctx, buft);
}

void * ggml_backend_cpu_buffer_from_ptr(void * ptr, size_t size) {
    check("the KV cache moved");
    return ((void * (*)(void *, size_t)) next("ggml_backend_cpu_buffer_from_ptr"))(ptr, size);
}

int madvise(void * addr, size_t size, int advice) {
    if (advice == MADV_DONTNEED) {
        check("memory went back");
    }
    return ((int (*)(void *, size_t, int)) next("madvise"))(addr, size, advice);
}

#include "api.h"

#include <cstdlib>
#include <stdexcept>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>
#endif

void llama_api_map_large_buffers(const llama_api & api) {
#ifdef __GLIBC__
    if (api.mallopt) {
        api.mallopt(M_MMAP_THRESHOLD, 64*1024); // set a fixed threshold, because the default threshold rises with each freed size
    }
#else
    (void) api;
#endif
}

llama_api llama_api_linked() {
    llama_api res;

#define KV_BENCH_SET(name) res.name = &::name;
    KV_BENCH_API(KV_BENCH_SET)
#undef KV_BENCH_SET
    res.llama_get_memory_usage = &::llama_get_memory_usage;
    res.malloc = &::malloc;
    res.free   = &::free;
#ifdef __GLIBC__
    res.mallopt = &::mallopt;
#endif

    return res;
}

#ifdef __GLIBC__

template <typename F>
static void find(void * lib, const char * name, F & res) {
    res = (F) dlsym(lib, name);
    if (res == nullptr) {
        throw std::runtime_error(std::string("the other libllama has no ") + name);
    }
}

std::string llama_api_linked_path() {
    Dl_info info;
    if (dladdr(dlsym(RTLD_DEFAULT, "llama_decode"), &info) == 0) {
        throw std::runtime_error("this program is not linked to a shared libllama: build it with shared libraries");
    }
    return info.dli_fname;
}

llama_api llama_api_load(const std::string & path) {
    void * lib = dlmopen(LM_ID_NEWLM, path.c_str(), RTLD_NOW | RTLD_LOCAL); // never closed, because it is used until the process ends
    if (lib == nullptr) {
        throw std::runtime_error(dlerror());
    }

    llama_api res;

#define KV_BENCH_FIND(name) find(lib, #name, res.name);
    KV_BENCH_API(KV_BENCH_FIND)
#undef KV_BENCH_FIND
    res.llama_get_memory_usage = (decltype(res.llama_get_memory_usage)) dlsym(lib, "llama_get_memory_usage");
    find(lib, "malloc",  res.malloc);
    find(lib, "free",    res.free);
    find(lib, "mallopt", res.mallopt);

    return res;
}

#else

std::string llama_api_linked_path() {
    return "";
}

llama_api llama_api_load(const std::string & path) {
    throw std::runtime_error("two builds in one process need dlmopen(), which only glibc has: " + path);
}

#endif

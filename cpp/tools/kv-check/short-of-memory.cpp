#include "short-of-memory.h"

#include <cstdio>
#include <cstdlib>

#ifdef __linux__
#include <sys/resource.h>
#include <unistd.h>
#endif

// limit the address space to `mib` MiB more than now. 0: remove the limit
static void set_limit(uint32_t mib) {
#ifdef __linux__
    rlimit lim;
    if (getrlimit(RLIMIT_AS, &lim) != 0) {
        return;
    }
    unsigned long n_pages = 0;
    if (FILE * file = fopen("/proc/self/statm", "r")) {
        if (fscanf(file, "%lu", &n_pages) != 1) {
            n_pages = 0;
        }
        fclose(file);
    }
    lim.rlim_cur = mib > 0 && n_pages > 0 ? (rlim_t) n_pages*sysconf(_SC_PAGESIZE) + ((rlim_t) mib << 20) : lim.rlim_max;
    setrlimit(RLIMIT_AS, &lim);
#else
    (void) mib;
#endif
}

static void set_fail(const char * val) {
#ifdef _WIN32
    _putenv_s("LLAMA_KV_DYNAMIC_FAIL", val);
#else
    if (*val != '\0') {
        setenv("LLAMA_KV_DYNAMIC_FAIL", val, 1);
    } else {
        unsetenv("LLAMA_KV_DYNAMIC_FAIL");
    }
#endif
}

short_of_memory::short_of_memory(const kv_check_params & params, bool enabled) {
    if (enabled) {
        set_fail(params.fail.c_str());
        if (params.limit_mib > 0) {
            set_limit(params.limit_mib);
        }
    }
}

short_of_memory::~short_of_memory() {
    set_fail("");
    set_limit(0);
}

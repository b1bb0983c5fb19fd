#include "llama-kv-limits.h"

#include "llama-impl.h"

#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <fstream>
#include <mutex>
#include <new>
#include <sstream>

#ifdef __linux__

namespace {

// read a number from a file. The result is UINT64_MAX if the file contains no number, for example "max" in cgroup v2
uint64_t read_number(const std::string & path) {
    std::ifstream file(path);
    std::string   word;

    if (!(file >> word) || word.find_first_not_of("0123456789") != std::string::npos) {
        return UINT64_MAX;
    }

    return strtoull(word.c_str(), nullptr, 10);
}

// return the sum of the values of these keys in a file with lines "key value" or "key: value kB". A missing key counts as 0
uint64_t read_keys(const std::string & path, const std::initializer_list<const char *> keys, uint64_t unit) {
    std::ifstream file(path);
    std::string   line;

    uint64_t res = 0;

    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string key;
        uint64_t    val = 0;

        words >> key >> val;
        for (const char * k : keys) {
            if (key == k) {
                res += val*unit;
            }
        }
    }

    return res;
}

// return the bytes that a cgroup can still allocate. Its page cache counts as free, because it is reclaimable. UINT64_MAX: no limit
uint64_t cgroup_left(const std::string & dir, const char * name_max, const char * name_cur, const char * prefix) {
    const uint64_t max = read_number(dir + "/" + name_max);
    const uint64_t cur = read_number(dir + "/" + name_cur);

    if (max == UINT64_MAX || cur == UINT64_MAX) {
        return UINT64_MAX;
    }

    const std::string active   = std::string(prefix) + "active_file";
    const std::string inactive = std::string(prefix) + "inactive_file";

    const uint64_t cache = read_keys(dir + "/memory.stat", { active.c_str(), inactive.c_str() }, 1);
    const uint64_t held  = cur - std::min(cur, cache);

    return max - std::min(max, held);
}

// return the bytes that a cgroup and all of its parents can still allocate
// In a container, `path` can be the path on the host, although the cgroup itself is mounted at `mount`. So the last round reads
// `mount`.
uint64_t cgroups_left(const std::string & mount, std::string path, const char * name_max, const char * name_cur, const char * prefix) {
    uint64_t res = UINT64_MAX;

    while (true) {
        if (path == "/") {
            path.clear();
        }

        res = std::min(res, cgroup_left(mount + path, name_max, name_cur, prefix));
        if (path.empty()) {
            return res;
        }

        path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
}

} // namespace

size_t llama_kv_limits_available(const std::string & root) {
    uint64_t res = UINT64_MAX; // 64 bits even on a system with addresses of 32 bits

    const std::string meminfo = root + "/proc/meminfo";

    if (const uint64_t total = read_keys(meminfo, { "MemAvailable:" }, 1024)) {
        res = total + read_keys(meminfo, { "SwapFree:" }, 1024);
    }

    // lines have the form "id:controllers:path". In cgroup v2, controllers is empty
    std::ifstream file(root + "/proc/self/cgroup");
    std::string   line;

    while (std::getline(file, line)) {
        const size_t i0 = line.find(':');
        const size_t i1 = line.find(':', i0 + 1);
        if (i0 == std::string::npos || i1 == std::string::npos) {
            continue;
        }

        const std::string controllers = "," + line.substr(i0 + 1, i1 - i0 - 1) + ",";
        const std::string path        = line.substr(i1 + 1);

        if (controllers == ",,") {
            res = std::min(res, cgroups_left(root + "/sys/fs/cgroup", path, "memory.max", "memory.current", ""));
        } else if (controllers.find(",memory,") != std::string::npos) {
            res = std::min(res, cgroups_left(root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"));
        }
    }

    return std::min<uint64_t>(res, SIZE_MAX);
}

#else

size_t llama_kv_limits_available(const std::string & root) {
    (void) root;

    return SIZE_MAX;
}

#endif

// return the margin in MiB that stays free on a device. -1: the user has not set a margin
static int64_t margin_mib() {
    const char * LLAMA_KV_DYNAMIC_MARGIN = getenv("LLAMA_KV_DYNAMIC_MARGIN");
    if (!LLAMA_KV_DYNAMIC_MARGIN) {
        return -1;
    }

    char * end = nullptr;

    const int64_t res = strtoll(LLAMA_KV_DYNAMIC_MARGIN, &end, 10);
    if (end == LLAMA_KV_DYNAMIC_MARGIN || *end != '\0' || res < 0 || res > (INT64_MAX >> 20)) {
        static std::once_flag once;
        std::call_once(once, [&]() {
            LLAMA_LOG_WARN("%s: LLAMA_KV_DYNAMIC_MARGIN=%s is not a number of MiB, and is ignored\n", __func__, LLAMA_KV_DYNAMIC_MARGIN);
        });
        return -1;
    }

    return res;
}

// return the bytes that buffers of this type can allocate: the free memory of the device, less a margin
// The margin is for memory that the backend allocates during computation, whose amount is not known in advance. It is a 64th of
// the device's memory, or LLAMA_KV_DYNAMIC_MARGIN=MIB.
// The result is SIZE_MAX if the device does not report its memory.
static size_t available_for(ggml_backend_buffer_type_t buft) {
    if (ggml_backend_buft_is_host(buft)) {
        return llama_kv_limits_available();
    }

    size_t n_free  = 0;
    size_t n_total = 0;

    if (ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft)) {
        ggml_backend_dev_memory(dev, &n_free, &n_total);
    }

    if (n_total == 0) {
        return SIZE_MAX;
    }

    const int64_t n_margin_mib = margin_mib();
    const size_t  n_margin     = n_margin_mib >= 0 ? (size_t) n_margin_mib << 20 : n_total/64;

    return n_free - std::min(n_free, n_margin);
}

bool llama_kv_limits_have(ggml_backend_buffer_type_t buft, size_t n_bytes) {
    const size_t n_left = available_for(buft);

    if (n_bytes > n_left) {
        LLAMA_LOG_WARN("%s: %s has %.2f MiB left, and %.2f MiB more are wanted\n", __func__,
                ggml_backend_buft_name(buft), n_left/1024.0/1024.0, n_bytes/1024.0/1024.0);
    }

    return n_bytes <= n_left;
}

bool llama_kv_limits_allow(size_t n_bytes) try {
    static std::mutex mutex;

    static size_t  n_left = 0; // free memory at the last query, less the memory that was allowed since
    static int64_t t_last = 0;

    const std::lock_guard<std::mutex> lock(mutex);

    // A query takes longer than committing a few pages. So skip it if n_bytes is small in comparison to the last result.
    if (n_bytes > n_left/16 || ggml_time_us() - t_last > 1000*1000) {
        n_left = llama_kv_limits_available();
        t_last = ggml_time_us();
    }

    if (n_bytes > n_left) {
        return false;
    }

    if (n_left != SIZE_MAX) {
        n_left -= n_bytes;
    }

    return true;
} catch (const std::bad_alloc &) { // the query needs host memory. a caller that undoes a growth continues without it
    return false;
}

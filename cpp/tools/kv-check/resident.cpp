#include "resident.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#include <psapi.h>
#elif defined(__APPLE__)
#include <mach/mach.h>
#elif defined(__linux__)
#include <cstring>
#endif

#if defined(__linux__)
// return the bytes of the line "Name:   123 kB" of a file in /proc. -1: the line does not exist
static int64_t proc_bytes(const char * path, const char * name) {
    FILE * file = fopen(path, "r");
    if (file == nullptr) {
        return -1;
    }
    char line[256];
    long long kib = -1;
    while (kib < 0 && fgets(line, sizeof(line), file) != nullptr) {
        if (strncmp(line, name, strlen(name)) == 0) {
            sscanf(line + strlen(name), " %lld kB", &kib);
        }
    }
    fclose(file);
    return kib < 0 ? -1 : (int64_t) kib*1024;
}
#endif

int64_t resident_bytes() {
#if defined(_WIN32)
    PROCESS_MEMORY_COUNTERS counters;
    if (GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters))) {
        return (int64_t) counters.WorkingSetSize;
    }
    return -1;
#elif defined(__APPLE__)
    mach_task_basic_info_data_t info;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t) &info, &count) == KERN_SUCCESS) {
        return (int64_t) info.resident_size;
    }
    return -1;
#elif defined(__linux__)
    // smaps_rollup is exact, because the kernel walks the page tables to compute it. VmRSS is read from a counter that lags by
    // some pages per core.
    const int64_t res = proc_bytes("/proc/self/smaps_rollup", "Rss:");
    return res >= 0 ? res : proc_bytes("/proc/self/status", "VmRSS:");
#else
    return -1;
#endif
}

int64_t resident_bytes_of_pages() {
    // With a sanitizer, the result is unknown. This function identifies a KV cache by the flag `nh` (no huge pages), and the
    // memory of a sanitizer also has this flag.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    FILE * file = fopen("/proc/self/smaps", "r");
    if (file == nullptr) {
        return -1;
    }
    int64_t   res   = 0;
    long long kib   = 0;
    bool      known = false;
    char line[1024];
    while (fgets(line, sizeof(line), file) != nullptr) {
        sscanf(line, "Rss: %lld kB", &kib); // each range has this line before its flags
        if (strncmp(line, "VmFlags:", 8) == 0) {
            known = true;
            res += strstr(line, " nh") != nullptr ? kib*1024 : 0;
        }
    }
    fclose(file);
    return known ? res : -1;
#else
    return -1;
#endif
}

// reset the kernel's maximum of the resident memory to the current value
static bool reset_high_water() {
#if defined(__linux__)
    FILE * file = fopen("/proc/self/clear_refs", "w");
    if (file == nullptr) {
        return false;
    }
    const bool written = fputs("5", file) >= 0;
    return fclose(file) == 0 && written;
#else
    return false;
#endif
}

resident_peak::~resident_peak() {
    stop();
}

void resident_peak::start() {
    exact = reset_high_water();
    if (exact) {
        return;
    }
    stop();
    highest = resident_bytes();
    running = true;
    sampler = std::thread([this]() {
        while (running) {
            highest = std::max<int64_t>(highest, resident_bytes());
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
}

int64_t resident_peak::stop() {
#if defined(__linux__)
    if (exact) {
        return std::max(proc_bytes("/proc/self/status", "VmHWM:"), resident_bytes());
    }
#endif
    running = false;
    if (sampler.joinable()) {
        sampler.join();
    }
    return std::max<int64_t>(highest, resident_bytes());
}

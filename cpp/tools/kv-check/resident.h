#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

// return the resident bytes of this process, -1 if unknown
int64_t resident_bytes();

// return the resident bytes of KV caches with pages, which are the ranges without huge pages. -1 if unknown
int64_t resident_bytes_of_pages();

// The highest resident_bytes() between start() and stop(). On Linux the kernel records the exact peak; elsewhere a
// thread polls every millisecond and may miss shorter peaks.
class resident_peak {
  public:
    ~resident_peak();

    void    start();
    int64_t stop();

    // true: recorded by the kernel
    bool is_exact() const { return exact; }

  private:
    bool exact = false;

    std::atomic<bool>    running { false };
    std::atomic<int64_t> highest { -1 };

    std::thread sampler;
};

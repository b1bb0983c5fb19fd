#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

// resident bytes of this process, -1 where that is not known
int64_t resident_bytes();

// of the ranges in which KV caches are whose pages come and go, which are those without huge pages. -1 where that is not known
int64_t resident_bytes_of_pages();

// The highest resident_bytes() between start() and stop(). On Linux the kernel keeps it, and it is exact; elsewhere a thread
// looks every millisecond, and what is shorter can be missed.
class resident_peak {
  public:
    ~resident_peak();

    void    start();
    int64_t stop();

    // true: kept by the kernel
    bool is_exact() const { return exact; }

  private:
    bool exact = false;

    std::atomic<bool>    running { false };
    std::atomic<int64_t> highest { -1 };

    std::thread sampler;
};

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

// return the bytes of resident memory of this process. -1: unknown
int64_t resident_bytes();

// return the bytes of resident memory of KV caches with pages. They are identified as ranges without huge pages. -1: unknown
int64_t resident_bytes_of_pages();

// measures the highest resident_bytes() between start() and stop()
// On Linux, the kernel records the exact peak. On other systems, a thread polls every millisecond and may miss shorter peaks.
class resident_peak {
  public:
    ~resident_peak();

    void    start();
    int64_t stop();

    // return true if the kernel has recorded the peak, so that it is exact
    bool is_exact() const { return exact; }

  private:
    bool exact = false;

    std::atomic<bool>    running { false };
    std::atomic<int64_t> highest { -1 };

    std::thread sampler;
};

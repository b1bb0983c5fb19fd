#pragma once

#include "ggml-backend.h"

#include <atomic>
#include <cstdint>
#include <thread>

// return the bytes of a device that are used by all programs together. -1: no device
int64_t device_bytes(ggml_backend_dev_t dev);

// measures the highest device_bytes() between start() and stop()
// A thread polls every 5 ms and may miss shorter peaks. The peak is that of the context only if no other program uses the device.
class device_bytes_peak {
  public:
    explicit device_bytes_peak(ggml_backend_dev_t dev) : dev(dev) {}

    ~device_bytes_peak();

    void    start();
    int64_t stop();

  private:
    ggml_backend_dev_t dev;

    std::atomic<bool>    running { false };
    std::atomic<int64_t> highest { -1 };

    std::thread sampler;
};

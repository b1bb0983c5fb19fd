#pragma once

#include "ggml-backend.h"

#include <atomic>
#include <cstdint>
#include <thread>

// bytes of a device's memory that are taken, by whoever. -1: no device
int64_t device_bytes(ggml_backend_dev_t dev);

// The highest device_bytes() between start() and stop(), as a thread saw it that looks every 5 ms: what is
// shorter can be missed. It is the context's if nobody else uses the device.
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

#include "device.h"

#include <algorithm>
#include <chrono>

int64_t device_bytes(ggml_backend_dev_t dev) {
    if (dev == nullptr) {
        return -1;
    }

    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);

    return (int64_t) (total - std::min(free, total));
}

device_bytes_peak::~device_bytes_peak() {
    stop();
}

void device_bytes_peak::start() {
    highest = device_bytes(dev);
    if (dev == nullptr) {
        return;
    }

    running = true;
    sampler = std::thread([this]() {
        while (running) {
            highest = std::max(highest.load(), device_bytes(dev));
            // not more often, because each query may delay the threads that allocate
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    });
}

int64_t device_bytes_peak::stop() {
    running = false;
    if (sampler.joinable()) {
        sampler.join();
    }

    return std::max(highest.load(), device_bytes(dev));
}

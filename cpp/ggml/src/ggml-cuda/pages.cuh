#pragma once

// Pages for buffers of CUDA's buffer type, see ggml-pages.h. These are the functions that pages.cu and ggml-cuda.cu call of each
// other. Include this file after common.cuh.

#include "ggml-backend.h"

#include <cstddef>
#include <memory>

// a range of addresses and the pages that are mapped there
struct ggml_cuda_pages;

// return the interface for get_proc_address("ggml_backend_pages"). null: built without virtual memory
void * ggml_cuda_pages_proc();

//
// in ggml-cuda.cu
//

// create a buffer of the device's own type on the range of addresses at `base`. The buffer owns the range from then on
// device: index of the device in ggml
ggml_backend_buffer_t ggml_cuda_pages_buffer(int device, std::shared_ptr<ggml_cuda_pages> pages, void * base, size_t size);

// return the range of a buffer that ggml_cuda_pages_buffer() created
ggml_cuda_pages * ggml_cuda_pages_of(ggml_backend_buffer_t buffer);

// wait until a physical device is idle
// Before that, wait until other threads have finished capturing graphs, because waiting for a whole device would invalidate these
// graphs.
cudaError_t ggml_cuda_pages_wait(int physical_device);

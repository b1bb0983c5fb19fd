#pragma once

// Pages for buffers of CUDA's type, see ggml-pages.h: what pages.cu and ggml-cuda.cu need of each other. After common.cuh.

#include "ggml-backend.h"

#include <cstddef>
#include <memory>

// a range of addresses and the pages behind it
struct ggml_cuda_pages;

// for get_proc_address("ggml_backend_pages"). null: built without virtual memory
void * ggml_cuda_pages_proc();

//
// in ggml-cuda.cu
//

// a buffer of the device's own type on a range at base, which it owns from now on. device: as ggml counts them
ggml_backend_buffer_t ggml_cuda_pages_buffer(int device, std::shared_ptr<ggml_cuda_pages> pages, void * base, size_t size);

// return the range of a buffer that the function above created
ggml_cuda_pages * ggml_cuda_pages_of(ggml_backend_buffer_t buffer);

// wait until a physical device is idle. finishes graphs that other threads capture first: waiting for a whole device would
// invalidate them
cudaError_t ggml_cuda_pages_wait(int physical_device);

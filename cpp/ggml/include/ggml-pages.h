#pragma once

// Memory of a device that comes and goes at fixed addresses: a buffer whose addresses are reserved once, at full size, and
// whose pages are mapped and unmapped as they are needed. Tensors are placed in it as in any other buffer of its type. No
// pointer to them ever changes, so no graph has to be made again, captured ones included, and nothing is ever copied.
//
// A backend that has this answers ggml_backend_reg_get_proc_address(reg, "ggml_backend_pages") with a ggml_backend_pages_t.
// So far that is CUDA, and HIP and MUSA where they are built with virtual memory (HIP is not by default). Without it, or where
// page_size() is 0, nothing here can be used, and buffers are allocated whole.
//
// Pages that are not mapped
//   - Nothing may read or write them: on a GPU that is an error that ends all work in the process. Kernels read beyond the last
//     row of a quantized tensor, by as much as ggml_backend_buft_get_alloc_size() is larger than ggml_nbytes(), and where they
//     take a part of it for a row (a head of K), by as much as that is for the part: that has to be mapped too, also behind the
//     last row that is used.
//   - ggml_backend_buffer_clear() and ggml_backend_tensor_memset() leave them out. Whatever else touches a tensor's data must
//     know that it is mapped. Placing a tensor touches nothing: what it would pad with zeros is zero when it is mapped.
//
// Memory
//   - map() takes what there is, and the pools of a backend abort when they find nothing: look at ggml_backend_dev_memory()
//     first, and leave them a margin. On Windows more so: there a driver can spill into host memory instead of failing.
//   - The memory of a page goes back to the device when it is unmapped, for everybody to take.
//
// Errors are returned and logged, never fatal. Arguments that are no whole pages of the buffer are asserted.
// Threads: one at a time for a buffer; different buffers at the same time. unmap() and ggml_backend_buffer_free() wait for the
// device, and for other threads that capture a graph: not from within a graph's computation.

#include "ggml-backend.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend_pages_i {
    // bytes of a page (2 MiB on most GPUs): sizes and offsets below are multiples of it. 0: not with buffers of this type
    size_t (*page_size)(ggml_backend_buffer_type_t buft);

    // a buffer of this type with addresses for `size` bytes, rounded up to whole pages, and no memory
    // NULL: page_size() is 0, `size` is 0, or there are no addresses. freed with ggml_backend_buffer_free()
    ggml_backend_buffer_t (*reserve)(ggml_backend_buffer_type_t buft, size_t size);

    // have the bytes [offset, offset + size). those that were not there are zero, for all that starts after the return
    // false: there is no memory, and what was mapped before is what is mapped
    bool (*map)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // give back the bytes [offset, offset + size), which may be mapped or not, when the device and those that can read its
    // memory have nothing to do
    // false: the driver refuses. What was not given back may not be used before it is mapped again
    bool (*unmap)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // bytes of memory behind the buffer, also those that could not be given back
    size_t (*n_bytes_mapped)(ggml_backend_buffer_t buf);
};

typedef const struct ggml_backend_pages_i * (*ggml_backend_pages_t)(void);

#ifdef __cplusplus
}
#endif

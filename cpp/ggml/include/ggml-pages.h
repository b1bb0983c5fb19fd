#pragma once

// Device memory at fixed addresses: a buffer reserves its addresses once, at full size. Its pages are mapped and unmapped on demand.
// Tensors are placed in it as in any other buffer of its type. No pointer to a tensor changes, so no graph is built or captured
// again, and nothing is copied.
//
// A backend that has this answers ggml_backend_reg_get_proc_address(reg, "ggml_backend_pages") with a ggml_backend_pages_t.
// So far that is CUDA, and HIP and MUSA where they are built with virtual memory (HIP is not by default). Without it, or where
// page_size() is 0, nothing here can be used, and buffers are allocated whole.
//
//
// Pages that are not mapped
//   - Nothing may read or write them: on a GPU, such an access is an error that ends all work in the process. Kernels read beyond the
//     last row of a quantized tensor, by the difference between ggml_backend_buft_get_alloc_size() and ggml_nbytes(). A kernel that
//     uses a part of the tensor as a row (a head of K) reads as far beyond that part. These bytes must be mapped, too, also after
//     the last row in use.
//   - ggml_backend_buffer_clear() and ggml_backend_tensor_memset() skip them. Any other access to a tensor's data requires that the
//     caller has mapped it. Placing a tensor touches no data: the padding that it would set to zero is zero once it is mapped.
//
// Memory
//   - map() uses any free memory, and the pools of a backend abort if none is left: check ggml_backend_dev_memory() first and leave
//     them a margin. On Windows, leave more: a driver can use host memory there instead of failing.
//   - An unmapped page returns its memory to the device, where any process can allocate it.
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

    // map the bytes [offset, offset + size). newly mapped bytes are zero for all work that starts after the return
    // returns false without memory. the mapped pages are then the same as before
    bool (*map)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // unmap the bytes [offset, offset + size), mapped or not, once the device and all devices that can read its memory are idle
    // returns false if the driver refuses. pages that remain must not be used before they are mapped again
    bool (*unmap)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // return the bytes of memory that the buffer uses, including pages that the driver refused to unmap
    size_t (*n_bytes_mapped)(ggml_backend_buffer_t buf);
};

typedef const struct ggml_backend_pages_i * (*ggml_backend_pages_t)(void);

#ifdef __cplusplus
}
#endif

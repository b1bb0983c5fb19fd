#pragma once

// Device memory at fixed addresses
//
// A buffer with pages reserves its addresses once, at full size. Its pages are mapped and unmapped on demand. Tensors are
// placed in the buffer as in any other buffer of its type. No pointer to a tensor changes, so no graph is built or captured
// again, and nothing is copied.
//
// A backend with this interface returns a ggml_backend_pages_t from ggml_backend_reg_get_proc_address(reg,
// "ggml_backend_pages"). So far, three backends have the interface: CUDA, and HIP and MUSA if they are built with virtual
// memory. By default, HIP is built without virtual memory. If the backend does not have the interface, or page_size() returns
// 0, buffers must be allocated as usual.
//
//
// Pages that are not mapped
//   - Nothing may read or write them. On a GPU, such an access is an error that ends all work in the process.
//   - Kernels also read padding after the last row of a quantized tensor. The padding must be mapped, too. Its size is the
//     difference between ggml_backend_buft_get_alloc_size() and ggml_nbytes(). A kernel can also read a slice of each row, for
//     example one head of K. It then reads the same number of bytes after the slice. So this number of bytes must also be
//     mapped after the last row in use.
//   - ggml_backend_buffer_clear() and ggml_backend_tensor_memset() skip pages that are not mapped. For any other access to a
//     tensor's data, the caller must have mapped the data. Placing a tensor in the buffer writes no data. In other buffers,
//     the backend then sets the padding of a quantized tensor to zero. Here, the padding is zero because newly mapped pages are
//     zero.
//
// Memory
//   - map() uses any free memory, and the pools of a backend abort the process if none is left. So check
//     ggml_backend_dev_memory() first, and leave a margin for the pools. On Windows, leave more, because a driver can use host
//     memory there instead of failing.
//   - An unmapped page returns its memory to the device, where any process can allocate it.
//
// Errors are returned and logged. They never end the process. Offsets and sizes that are not whole pages of the buffer fail an
// assertion.
//
// Threads: only one thread at a time may use a buffer. Different threads may use different buffers at the same time. unmap() and
// ggml_backend_buffer_free() wait for the device, and for other threads that capture a graph. So they must not be called from
// within the computation of a graph.

#include "ggml-backend.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend_pages_i {
    // return the bytes of a page (2 MiB on most GPUs). The offsets and sizes of map() and unmap() are multiples of this number
    // 0: buffers of this type have no pages
    size_t (*page_size)(ggml_backend_buffer_type_t buft);

    // create a buffer of this type with addresses for `size` bytes, rounded up to whole pages, and without memory
    // returns NULL if page_size() is 0, `size` is 0, or the driver cannot reserve the addresses. Free the buffer with
    // ggml_backend_buffer_free()
    ggml_backend_buffer_t (*reserve)(ggml_backend_buffer_type_t buft, size_t size);

    // map the bytes [offset, offset + size). Newly mapped bytes are zero for all work that starts after the return
    // returns false if there is not enough memory. The mapped pages are then the same as before
    bool (*map)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // unmap the bytes [offset, offset + size), whether they are mapped or not. First wait until the device, and all devices that
    // can read its memory, are idle
    // returns false if the driver refuses. Pages that remain mapped must not be used before they are mapped again
    bool (*unmap)(ggml_backend_buffer_t buf, size_t offset, size_t size);

    // return the bytes of memory that the buffer uses, including pages that the driver refused to unmap
    size_t (*n_bytes_mapped)(ggml_backend_buffer_t buf);
};

typedef const struct ggml_backend_pages_i * (*ggml_backend_pages_t)(void);

#ifdef __cplusplus
}
#endif

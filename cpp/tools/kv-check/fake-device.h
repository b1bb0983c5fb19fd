#pragma once

// A fake GPU for tests: a device of ggml with memory in pages (ggml-pages.h). It enforces the rules of ggml-pages.h for each
// byte, on a machine without a GPU. Its kernels are those of the CPU, with one thread, so two runs produce the same bits.
//
// It is at least as strict as a GPU:
//   - ggml does not treat its memory as host memory. Only the functions of a buffer and its own kernels may access it.
//   - An unmapped page and a freed buffer are inaccessible. A kernel, copy, set or get that touches one of their bytes ends the
//     process with SIGSEGV. Addresses are never reused, so a stale pointer is always invalid.
//   - Its kernels read bytes after the last row of a quantized tensor, as CUDA's do, so the size of an allocation includes this
//     padding. Attention reads masked rows, too.
//   - Copies from and to quantized types begin at an aligned address, as Vulkan's do. This applies to plain buffers only, because
//     pages are for devices with pointers.
//   - A plain buffer is filled with 0xff, which is NaN in floats. So only memory that was cleared explicitly is zero. Pages are
//     zero when they are mapped.
//   - Its memory is limited. Plain buffers and pages share it. Larger requests fail, and nothing moves to host memory.
//
// It does not cover:
//   - All work is synchronous. So it is not detected if a buffer is freed during running work.
//   - Kernels and pools use no memory of the device.
//   - On Windows, an invalid access is an exception instead. The limit of a process's address space includes freed memory.

#include "ggml-backend.h"

#include <cstddef>

// add a new device FAKE0, FAKE1, ... with its own registry. It exists until the end of the process
// n_bytes:   memory of the device
// page_size: bytes of a page for ggml-pages.h, a multiple of the system's page size. 0: a device without pages
// is_f16:    the device has flash attention kernels only for f16, and no kernel that writes q5_0, because some devices lack some
//            types. The CPU computes other types on copies of the inputs
ggml_backend_dev_t fake_device_add(size_t n_bytes, size_t page_size, bool is_f16 = false);

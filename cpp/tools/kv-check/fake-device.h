#pragma once

// A fake GPU for tests: a device of ggml with memory in pages (ggml-pages.h). It enforces the rules of ggml-pages.h for each
// byte, on a machine without a GPU. It computes with the kernels of the CPU and one thread, so two runs produce the same bits.
//
// It is at least as strict as a GPU:
//   - ggml does not treat its memory as host memory. Only the functions of a buffer and its own kernels may access it.
//   - An unmapped page and a freed buffer are inaccessible. A kernel, copy, set or get that touches one of their bytes ends the
//     process with SIGSEGV. Addresses are never reused, so a stale pointer is always invalid.
//   - Its kernels read bytes after the last row of a quantized tensor, as CUDA's do, so the size of an allocation includes this
//     padding. Attention reads masked rows, too.
//   - In a plain buffer, copies from and to quantized tensors must begin at an aligned address, as in Vulkan. In a buffer with
//     pages, they may begin at any address, because only devices with pointers have pages.
//   - A new plain buffer is filled with 0xff, which is NaN in floats. So only memory that was cleared explicitly is zero. Pages
//     are zero when they are mapped.
//   - Its memory is limited to n_bytes, which plain buffers and pages share. If a request exceeds the free memory, it fails. It
//     never uses host memory instead.
//
// It does not cover:
//   - Asynchronous work. All work on the fake device is synchronous, so no test detects that a buffer is freed while work is
//     running.
//   - The device memory of kernels and pools. On the fake device, they use none.
//   - SIGSEGV on Windows. There, an invalid access is an exception.
//   - A reuse of addresses. A freed buffer keeps its addresses reserved, so they still count towards a limit of the process's
//     address space (RLIMIT_AS).

#include "ggml-backend.h"

#include <cstddef>

// add a new device FAKE0, FAKE1, ... with its own registry. It exists until the end of the process
// n_bytes:   memory of the device
// page_size: bytes of a page for ggml-pages.h, a multiple of the system's page size. 0: a device without pages
// is_f16:    the device has flash attention kernels only for K in f16, and no kernel that writes q5_0. Some real devices also
//            lack kernels for some types. The CPU computes these operations instead, on copies of the inputs
ggml_backend_dev_t fake_device_add(size_t n_bytes, size_t page_size, bool is_f16 = false);

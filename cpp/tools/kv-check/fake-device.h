#pragma once

// A fake GPU for tests: a device of ggml with memory in pages (ggml-pages.h), whose rules are enforced to the byte on a
// machine without a GPU. Its kernels are those of the CPU, with one thread, so two runs produce the same bits.
//
// It is at least as strict as a GPU:
//   - Its memory is not host memory to ggml: only the functions of a buffer and its own kernels may access it.
//   - An unmapped page and a freed buffer are inaccessible: a kernel, copy, set or get that touches a byte ends with
//     SIGSEGV. Addresses are never reused, so that a stale pointer is always invalid.
//   - Kernels read past the last row of a quantized tensor, like CUDA's: the size of an allocation includes this
//     padding. Attention reads masked rows, too.
//   - Copies from and to quantized types begin where the alignment of plain buffers permits, like Vulkan's; pages are
//     for devices with pointers.
//   - A plain buffer is filled with 0xff, which is NaN in floats: only explicitly cleared memory is zero. Pages are
//     zero when mapped.
//   - Memory is limited. Plain buffers and pages share it, larger requests fail, and nothing spills.
//
// It does not cover:
//   - It is synchronous: a buffer freed during running work is not detected.
//   - Kernels and pools use no memory of the device.
//   - On Windows, a faulting access is an exception instead. The limit of a process's address space includes freed
//     memory.

#include "ggml-backend.h"

#include <cstddef>

// add a new device FAKE0, FAKE1, ... with its own registry, until the end of the process. n_bytes: its memory.
// page_size: of ggml-pages.h, a multiple of the system's pages, or 0 for a device without pages. is_f16: it has flash
// attention kernels only for f16; the CPU computes other types on copies of the inputs. it also has no kernel that
// writes q5_0, like devices that lack some types
ggml_backend_dev_t fake_device_add(size_t n_bytes, size_t page_size, bool is_f16 = false);

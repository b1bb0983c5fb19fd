#pragma once

// A GPU that is not there, for tests: a device of ggml whose memory can be had in pages (ggml-pages.h), and whose rules are kept
// to the byte on a machine without a GPU. Kernels are those of the CPU, with one thread, so two runs give the same bits.
//
// What it is as strict about as a GPU, or more
//   - Its memory is no host memory to ggml: only the functions of a buffer and its own kernels are to reach it.
//   - A page that is not mapped, and a buffer that was freed, has no access rights: whoever touches a byte of it, be it a kernel,
//     a copy, a set or a get, ends with SIGSEGV. Addresses are never used twice, so that a pointer that was kept points nowhere.
//   - Kernels read behind the last row of a quantized tensor, as those of CUDA: the size of an allocation says how far. Attention
//     reads the rows that are masked, too.
//   - Copies from and to quantized types begin where the alignment of plain buffers lets them, as those of Vulkan; pages are for
//     devices with pointers.
//   - A plain buffer is full of 0xff, which is NaN in floats: nothing is zero that was not made so. Pages are zero when mapped.
//   - There is as much memory as it was given. Plain buffers and pages share it, what is beyond fails, and nothing spills.
//
// What it does not do
//   - It is synchronous: a buffer that goes while work is in flight is not caught.
//   - Kernels and pools take no memory of the device.
//   - On Windows an access that faults is an exception instead. The limit of a process's address space counts what was freed.

#include "ggml-backend.h"

#include <cstddef>

// a new device FAKE0, FAKE1, ... with a registry of its own. it stays to the end of the process
// n_bytes: its memory. page_size: of ggml-pages.h, a multiple of the system's pages, or 0: the device has no pages
// is_f16: it has kernels for flash attention over f16 alone. where it has none, the CPU computes it on copies of what it reads.
//         and it has none that write q5_0: there are such devices for most types
ggml_backend_dev_t fake_device_add(size_t n_bytes, size_t page_size, bool is_f16 = false);

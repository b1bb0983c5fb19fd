#ifndef GGML_CUDA_PAGES_FAKE // tests/test-kv-cuda.cpp compiles this file with a fake driver
#include "common.cuh"
#endif

#include "pages.cuh"

// This file depends on the patch to ggml-cuda.cu, which defines GGML_CUDA_PAGES. Without that patch, this file is empty.
#if defined(GGML_CUDA_PAGES)

#include "ggml-backend-impl.h"
#include "ggml-cuda.h"
#include "ggml-impl.h"
#include "ggml-pages.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#if defined(GGML_USE_VMM)

static bool ggml_cuda_pages_ok(const char * what, cudaError_t err) {
    if (err != cudaSuccess) {
        (void) cudaGetLastError(); // reset the error, so that a later check does not find it
        GGML_LOG_WARN(GGML_CUDA_NAME " pages: %s: %s\n", what, cudaGetErrorString(err));
    }

    return err == cudaSuccess;
}

#if !defined(GGML_USE_HIP) // with HIP, both error types are the same
static bool ggml_cuda_pages_ok(const char * what, CUresult err) {
    if (err != CUDA_SUCCESS) {
        GGML_LOG_WARN(GGML_CUDA_NAME " pages: %s: %s\n", what, cu_get_error_str(err));
    }

    return err == CUDA_SUCCESS;
}
#endif

// Map and unmap the pages of a range of addresses. Each page has its own allocation and its own mapping, for two reasons.
// First, the driver can unmap only a whole mapping, so any page can be freed alone. Second, HIP can set the access of exactly
// the new pages without errors. The cost is four calls of the driver per page. The speed has not been compared yet with one
// allocation for many pages.
struct ggml_cuda_pages {
    ggml_cuda_pages(int device, size_t page_size, size_t n_pages);
    ~ggml_cuda_pages();

    ggml_cuda_pages(const ggml_cuda_pages &) = delete;
    ggml_cuda_pages & operator=(const ggml_cuda_pages &) = delete;

    // map and unmap the pages [i0, i1), as map() and unmap() of ggml-pages.h do
    bool map  (size_t i0, size_t i1);
    bool unmap(size_t i0, size_t i1);

    // set the mapped parts of the bytes [begin, end) of the range to a value
    void set(size_t begin, size_t end, uint8_t value);

    size_t n_bytes() const;
    size_t n_bytes_mapped() const;

    const int    device; // physical device
    const size_t page_size;

    char * base = nullptr; // null: the addresses could not be reserved

    bool (*plain_cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *) = nullptr; // copy function of ggml's own buffers

private:
    enum state : uint8_t {
        ABSENT,
        // the page has memory, but may not be used: it is not zeroed yet, it is about to be freed, or freeing it has failed
        HELD,
        MAPPED,
    };

    char * address(size_t i) const;

    bool create(size_t i); // change page i from ABSENT to HELD
    bool remove(size_t i); // change page i to ABSENT

    bool wait() const;

    std::vector<state> states;
    std::vector<int>   users; // physical devices that have access to the pages

    std::vector<CUmemAccessDesc> access; // descriptors for the access of the users
};

// return the physical devices that need access to the pages of `device`. ggml_cuda_pool_vmm, ggml's own pool of virtual memory,
// grants access to the same devices
static std::vector<int> ggml_cuda_pages_users(int device) {
    std::vector<int> res = { device };

    bool use_peers = getenv("GGML_CUDA_P2P") != nullptr;
#if defined(GGML_USE_NCCL)
    use_peers = true;
#endif

    for (int id = 0; use_peers && id < ggml_cuda_info().device_count; ++id) {
        const int peer = ggml_cuda_info().devices[id].physical_device;

        int can_access = 0;
        if (std::find(res.begin(), res.end(), peer) == res.end() &&
                ggml_cuda_pages_ok("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can_access, peer, device)) && can_access) {
            res.push_back(peer);
        }
    }

    return res;
}

ggml_cuda_pages::ggml_cuda_pages(int device, size_t page_size, size_t n_pages) :
    device(device), page_size(page_size), states(n_pages, ABSENT), users(ggml_cuda_pages_users(device)) {
    for (const int user : users) {
        CUmemAccessDesc desc = {};
        desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        desc.location.id   = user;
        desc.flags         = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        access.push_back(desc);
    }

    CUdeviceptr addr = {};
    if (ggml_cuda_pages_ok("cuMemAddressReserve", cuMemAddressReserve(&addr, n_bytes(), 0, 0, 0))) {
        base = (char *) addr;
    }
}

ggml_cuda_pages::~ggml_cuda_pages() {
    if (base && unmap(0, states.size())) {
        ggml_cuda_pages_ok("cuMemAddressFree", cuMemAddressFree((CUdeviceptr) base, n_bytes()));
    }
}

size_t ggml_cuda_pages::n_bytes() const {
    return states.size()*page_size;
}

size_t ggml_cuda_pages::n_bytes_mapped() const {
    return (states.size() - std::count(states.begin(), states.end(), ABSENT))*page_size;
}

char * ggml_cuda_pages::address(size_t i) const {
    return base + i*page_size;
}

bool ggml_cuda_pages::create(size_t i) {
    CUmemAllocationProp prop = {};
    prop.type          = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id   = device;

    CUmemGenericAllocationHandle handle;
    if (!ggml_cuda_pages_ok("cuMemCreate", cuMemCreate(&handle, page_size, &prop, 0))) {
        return false;
    }

    if (ggml_cuda_pages_ok("cuMemMap", cuMemMap((CUdeviceptr) address(i), page_size, 0, handle, 0))) {
        states[i] = HELD;
    }

    // release the handle. The mapping still keeps the memory
    const bool released = ggml_cuda_pages_ok("cuMemRelease", cuMemRelease(handle));

    if (states[i] == ABSENT || !released) {
        return false;
    }

    return
        ggml_cuda_pages_ok("cuMemSetAccess",  cuMemSetAccess((CUdeviceptr) address(i), page_size, access.data(), access.size())) &&
        ggml_cuda_pages_ok("cudaMemsetAsync", cudaMemsetAsync(address(i), 0, page_size, cudaStreamPerThread));
}

bool ggml_cuda_pages::remove(size_t i) {
    if (states[i] == ABSENT) {
        return true;
    }

    const bool removed = ggml_cuda_pages_ok("cuMemUnmap", cuMemUnmap((CUdeviceptr) address(i), page_size));
    states[i] = removed ? ABSENT : HELD;

    return removed;
}

// check whether this process uses the device already. Waiting for an unused device would create a CUDA context on it
static bool ggml_cuda_pages_is_used(int device) {
#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
    GGML_UNUSED(device);

    return true;
#else
    CUdevice     handle = 0;
    unsigned int flags  = 0;
    int          active = 1;

    return
        !ggml_cuda_pages_ok("cuDeviceGet",                cuDeviceGet(&handle, device)) ||
        !ggml_cuda_pages_ok("cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState(handle, &flags, &active)) || active;
#endif
}

bool ggml_cuda_pages::wait() const {
    return std::all_of(users.begin(), users.end(), [](int user) {
        return !ggml_cuda_pages_is_used(user) || ggml_cuda_pages_ok("cudaDeviceSynchronize", ggml_cuda_pages_wait(user));
    });
}

bool ggml_cuda_pages::map(size_t i0, size_t i1) {
    // Some of the pages can be HELD, because an earlier call could not unmap them. Wait, because kernels may still access them.
    const bool has_held = std::any_of(states.begin() + i0, states.begin() + i1, [](state s) { return s == HELD; });
    if (has_held && !wait()) {
        return false;
    }

    if (!ggml_cuda_pages_ok("cudaSetDevice", cudaSetDevice(device))) {
        return false;
    }

    bool complete = true;
    for (size_t i = i0; i < i1 && complete; ++i) {
        complete = states[i] == MAPPED || (remove(i) && create(i));
    }

    // Wait until the zeros are written. The compute streams do not wait for the stream of this thread, so a kernel could start
    // before that. After a failure, the pages are unmapped below, which must not happen while zeros are written.
    complete = ggml_cuda_pages_ok("cudaStreamSynchronize", cudaStreamSynchronize(cudaStreamPerThread)) && complete;

    for (size_t i = i0; i < i1; ++i) {
        if (states[i] == HELD && complete) {
            states[i] = MAPPED;
        } else if (states[i] == HELD) {
            remove(i);
        }
    }

    return complete;
}

bool ggml_cuda_pages::unmap(size_t i0, size_t i1) {
    const bool empty = std::all_of(states.begin() + i0, states.begin() + i1, [](state s) { return s == ABSENT; });
    if (empty) {
        return true;
    }

    if (!wait()) {
        // the pages stay mapped, but their contents must not be used any more
        std::replace(states.begin() + i0, states.begin() + i1, MAPPED, HELD);
        return false;
    }

    bool complete = true;
    for (size_t i = i0; i < i1; ++i) {
        complete = remove(i) && complete;
    }

    return complete;
}

void ggml_cuda_pages::set(size_t begin, size_t end, uint8_t value) {
    if (!ggml_cuda_pages_ok("cudaSetDevice", cudaSetDevice(device))) {
        return;
    }

    for (size_t i = begin/page_size; i*page_size < end; ++i) {
        const size_t first = i;
        while (i*page_size < end && states[i] == MAPPED) {
            ++i;
        }

        if (i > first) {
            const size_t i0 = std::max(begin, first*page_size);
            const size_t i1 = std::min(end,   i*page_size);

            ggml_cuda_pages_ok("cudaMemsetAsync", cudaMemsetAsync(base + i0, value, i1 - i0, cudaStreamPerThread));
        }
    }

    ggml_cuda_pages_ok("cudaStreamSynchronize", cudaStreamSynchronize(cudaStreamPerThread));
}

//
// the buffer
//

static void ggml_cuda_pages_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    ggml_cuda_pages * pages = ggml_cuda_pages_of(buffer);

    pages->set(0, pages->n_bytes(), value);
}

static void ggml_cuda_pages_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    ggml_cuda_pages * pages = ggml_cuda_pages_of(buffer);

    const size_t begin = (char *) tensor->data - pages->base + offset;

    pages->set(begin, begin + size, value);
}

// copy a tensor. First make the device of the pages current, because another device may have no access to the pages
// returns false if ggml must copy the tensor through the host
static bool ggml_cuda_pages_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_cuda_pages * pages = ggml_cuda_pages_of(buffer);

    return ggml_cuda_pages_ok("cudaSetDevice", cudaSetDevice(pages->device)) && pages->plain_cpy_tensor(buffer, src, dst);
}

//
// ggml-pages.h
//

// return the index of the device in ggml. -1: the buffer type belongs to no device
static int ggml_cuda_pages_device(ggml_backend_buffer_type_t buft) {
    for (int i = 0; i < ggml_backend_cuda_get_device_count(); ++i) {
        if (ggml_backend_cuda_buffer_type(i) == buft) {
            return i;
        }
    }

    return -1;
}

static size_t ggml_cuda_pages_page_size(ggml_backend_buffer_type_t buft) {
    const int device = ggml_cuda_pages_device(buft);

    // With GGML_CUDA_ENABLE_UNIFIED_MEMORY, the user wants memory that the driver moves between host and device. Pages are
    // pinned, so they are not available then.
    if (device < 0 || !ggml_cuda_info().devices[device].vmm || getenv("GGML_CUDA_ENABLE_UNIFIED_MEMORY")) {
        return 0;
    }

    const size_t granularity = ggml_cuda_info().devices[device].vmm_granularity;

#if defined(GGML_USE_HIP) && HIP_VERSION < 60300000
    GGML_UNUSED(granularity);

    return 0; // ROCm 6.1 can map only the whole range at once. In ROCm 6.2, one memset must not write to two mappings
#elif defined(GGML_USE_HIP)
    // ROCm up to 7.2 reports a granularity of 4 KiB. With pages of 4 KiB, a cache would need millions of mappings, so use pages of
    // 2 MiB
    return GGML_PAD(size_t(2) << 20, granularity);
#else
    return granularity;
#endif
}

static ggml_backend_buffer_t ggml_cuda_pages_reserve(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t page_size = ggml_cuda_pages_page_size(buft);
    if (page_size == 0 || size == 0 || size > SIZE_MAX - page_size) {
        return nullptr;
    }

    const int device = ggml_cuda_pages_device(buft);

    auto pages = std::make_shared<ggml_cuda_pages>(ggml_cuda_info().devices[device].physical_device, page_size, (size + page_size - 1)/page_size);
    if (!pages->base) {
        return nullptr;
    }

    ggml_backend_buffer_t buf = ggml_cuda_pages_buffer(device, pages, pages->base, pages->n_bytes());

    pages->plain_cpy_tensor = buf->iface.cpy_tensor;

    // replace the functions of ggml-cuda's own buffers, which access bytes that may not be mapped
    buf->iface.init_tensor   = nullptr;
    buf->iface.memset_tensor = ggml_cuda_pages_buffer_memset_tensor;
    buf->iface.cpy_tensor    = ggml_cuda_pages_buffer_cpy_tensor;
    buf->iface.clear         = ggml_cuda_pages_buffer_clear;

    return buf;
}

static std::pair<size_t, size_t> ggml_cuda_pages_range(const ggml_cuda_pages * pages, size_t offset, size_t size) {
    GGML_ASSERT(offset % pages->page_size == 0 && size % pages->page_size == 0);
    GGML_ASSERT(offset <= pages->n_bytes() && size <= pages->n_bytes() - offset);

    return { offset/pages->page_size, (offset + size)/pages->page_size };
}

static bool ggml_cuda_pages_map(ggml_backend_buffer_t buf, size_t offset, size_t size) {
    ggml_cuda_pages * pages = ggml_cuda_pages_of(buf);

    const auto [i0, i1] = ggml_cuda_pages_range(pages, offset, size);

    return pages->map(i0, i1);
}

static bool ggml_cuda_pages_unmap(ggml_backend_buffer_t buf, size_t offset, size_t size) {
    ggml_cuda_pages * pages = ggml_cuda_pages_of(buf);

    const auto [i0, i1] = ggml_cuda_pages_range(pages, offset, size);

    return pages->unmap(i0, i1);
}

static size_t ggml_cuda_pages_n_bytes_mapped(ggml_backend_buffer_t buf) {
    return ggml_cuda_pages_of(buf)->n_bytes_mapped();
}

static const ggml_backend_pages_i * ggml_cuda_pages_interface() {
    static const ggml_backend_pages_i res = {
        /* .page_size      = */ ggml_cuda_pages_page_size,
        /* .reserve        = */ ggml_cuda_pages_reserve,
        /* .map            = */ ggml_cuda_pages_map,
        /* .unmap          = */ ggml_cuda_pages_unmap,
        /* .n_bytes_mapped = */ ggml_cuda_pages_n_bytes_mapped,
    };

    return &res;
}

void * ggml_cuda_pages_proc() {
    return (void *) ggml_cuda_pages_interface;
}

#else

void * ggml_cuda_pages_proc() {
    return nullptr;
}

#endif // defined(GGML_USE_VMM)

#endif // defined(GGML_CUDA_PAGES)

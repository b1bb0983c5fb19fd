// Unit tests of ggml/src/ggml-cuda/pages.cu with a fake driver, which counts references, fails on request, and knows which
// devices are busy
// test-kv-device.cpp tests real drivers.

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-cuda.h"
#include "ggml-impl.h"
#include "ggml-pages.h"

#include "test-kv.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

//
// the functions of the driver that pages.cu uses
//

enum cudaError_t { cudaSuccess, cudaErrorFake };
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_FAKE };
enum CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };

struct CUmemLocation {
    CUmemLocationType type;
    int               id;
};

struct CUmemAllocationProp {
    CUmemAllocationType type;
    CUmemLocation       location;
};

struct CUmemAccessDesc {
    CUmemLocation     location;
    CUmemAccess_flags flags;
};

using CUdevice                     = int;
using CUdeviceptr                  = uintptr_t;
using CUmemGenericAllocationHandle = uint64_t;
using cudaStream_t                 = int;

static const cudaStream_t cudaStreamPerThread = 2;

static const size_t SIZE_PAGE = 4096;

static const char FRESH = 0x55; // content of memory that was not written yet
static const char GONE  = 0x66; // value that a read of unmapped memory returns

struct ggml_cuda_device_info {
    int device_count;

    struct {
        bool   vmm;
        size_t vmm_granularity;
        int    physical_device;
    } devices[2];
};

static ggml_cuda_device_info g_info;

static const ggml_cuda_device_info & ggml_cuda_info() {
    return g_info;
}

static struct {
    struct mapping {
        CUmemGenericAllocationHandle handle;
        std::set<int>                users;
    };

    struct fill {
        char * addr;
        int    value;
        size_t size;
    };

    std::map<char *, std::vector<char>>         ranges;   // reserved addresses, and the content that is visible there
    std::map<CUmemGenericAllocationHandle, int> handles;  // reference counts
    std::map<char *, mapping>                   mappings; // mappings, each of one page

    std::vector<fill> pending; // writes that are queued and not finished
    std::set<int>     busy;    // devices with running work, which may use
    std::set<char *>  in_use;

    int device = -1; // the current device

    std::set<int> unused; // devices on which this process has no context yet

    size_t n_free = 1000; // number of free pages

    // let the calls with the indices fail_first to fail_last fail
    int n_calls    = 0;
    int fail_first = std::numeric_limits<int>::max();
    int fail_last  = std::numeric_limits<int>::max();
} g_driver;

static bool fails() {
    const int i = g_driver.n_calls++;
    return g_driver.fail_first <= i && i <= g_driver.fail_last;
}

static void fail_calls(int first, int last) {
    g_driver.n_calls    = 0;
    g_driver.fail_first = first;
    g_driver.fail_last  = last;
}

static void fail_none() {
    fail_calls(std::numeric_limits<int>::max(), std::numeric_limits<int>::max());
}

// start work on some devices, which may use all memory that is mapped now
static void run_on(const std::set<int> & devices) {
    g_driver.busy = devices;
    g_driver.in_use.clear();
    for (const auto & [addr, _] : g_driver.mappings) {
        g_driver.in_use.insert(addr);
    }
}

static void run_pending() {
    for (const auto & f : g_driver.pending) {
        memset(f.addr, f.value, f.size);
    }
    g_driver.pending.clear();
}

static void unref(CUmemGenericAllocationHandle handle) {
    check(g_driver.handles.count(handle) == 1, "driver: a handle that is there");
    if (--g_driver.handles[handle] == 0) {
        g_driver.handles.erase(handle);
        g_driver.n_free++;
    }
}

static CUresult cuMemAddressReserve(CUdeviceptr * addr, size_t size, size_t, CUdeviceptr, unsigned long long) {
    if (fails()) {
        return CUDA_ERROR_FAKE;
    }
    std::vector<char> memory(size, GONE);
    *addr = (CUdeviceptr) memory.data();
    g_driver.ranges[memory.data()] = std::move(memory);
    return CUDA_SUCCESS;
}

static CUresult cuMemAddressFree(CUdeviceptr addr, size_t size) {
    const auto range = g_driver.ranges.find((char *) addr);
    check(range != g_driver.ranges.end() && range->second.size() == size, "driver: frees the range");

    const auto first = g_driver.mappings.lower_bound((char *) addr);
    check(first == g_driver.mappings.end() || first->first >= (char *) addr + size, "driver: frees no range with memory");

    if (fails()) {
        return CUDA_ERROR_FAKE;
    }
    g_driver.ranges.erase(range);
    return CUDA_SUCCESS;
}

static CUresult cuMemCreate(CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp * prop, unsigned long long) {
    check(size == SIZE_PAGE, "driver: an allocation a page");
    check(prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE, "driver: device memory");
    check(prop->location.id == g_driver.device, "driver: memory of the device");

    if (fails() || g_driver.n_free == 0) {
        return CUDA_ERROR_FAKE;
    }
    static CUmemGenericAllocationHandle n_handles = 0;
    *handle = ++n_handles;
    g_driver.handles[*handle] = 1;
    g_driver.n_free--;
    return CUDA_SUCCESS;
}

static CUresult cuMemMap(CUdeviceptr addr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
    check(size == SIZE_PAGE && offset == 0 && g_driver.handles.count(handle) == 1, "driver: maps a page");
    check(g_driver.mappings.count((char *) addr) == 0, "driver: maps where nothing is");

    if (fails()) {
        return CUDA_ERROR_FAKE;
    }
    g_driver.mappings[(char *) addr] = { handle, {} };
    g_driver.handles[handle]++;
    memset((char *) addr, FRESH, size);
    return CUDA_SUCCESS;
}

static CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    const bool failed = fails();
    unref(handle); // also if the call fails, because the driver then loses the memory
    return failed ? CUDA_ERROR_FAKE : CUDA_SUCCESS;
}

static CUresult cuMemSetAccess(CUdeviceptr addr, size_t size, const CUmemAccessDesc * desc, size_t n) {
    const auto mapping = g_driver.mappings.find((char *) addr);
    check(mapping != g_driver.mappings.end() && size == SIZE_PAGE, "driver: access to what was mapped at once");

    if (fails()) {
        return CUDA_ERROR_FAKE;
    }
    for (size_t i = 0; i < n; ++i) {
        check(desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "driver: access");
        mapping->second.users.insert(desc[i].location.id);
    }
    return CUDA_SUCCESS;
}

static CUresult cuMemUnmap(CUdeviceptr addr, size_t size) {
    const auto mapping = g_driver.mappings.find((char *) addr);
    check(mapping != g_driver.mappings.end() && size == SIZE_PAGE, "driver: unmaps what was mapped at once");

    for (const int user : mapping->second.users) {
        check(g_driver.busy.count(user) == 0 || g_driver.in_use.count(mapping->first) == 0, "driver: unmaps nothing that a busy device may use");
    }
    for (const auto & f : g_driver.pending) {
        check(f.addr + f.size <= (char *) addr || f.addr >= (char *) addr + size, "driver: unmaps nothing that is being written");
    }

    if (fails()) {
        return CUDA_ERROR_FAKE;
    }
    unref(mapping->second.handle);
    g_driver.mappings.erase(mapping);
    memset((char *) addr, GONE, size);
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGet(CUdevice * handle, int device) {
    *handle = device;
    return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *, int * active) {
    *active = g_driver.unused.count(device) == 0;
    return CUDA_SUCCESS;
}

static cudaError_t cudaSetDevice(int device) {
    check(g_driver.unused.count(device) == 0, "driver: no context of a device that nobody uses");

    if (fails()) {
        return cudaErrorFake;
    }
    g_driver.device = device;
    return cudaSuccess;
}

static cudaError_t cudaMemsetAsync(char * addr, int value, size_t size, cudaStream_t stream) {
    check(stream == cudaStreamPerThread, "driver: fills on the stream that is waited for");

    for (size_t done = 0; done < size;) {
        auto mapping = g_driver.mappings.upper_bound(addr + done);

        const bool is_there = mapping != g_driver.mappings.begin() && (--mapping)->first + SIZE_PAGE > addr + done;
        check(is_there && mapping->second.users.count(g_driver.device) == 1, "driver: fills what can be written");

        done = is_there ? mapping->first + SIZE_PAGE - addr : size;
    }

    if (fails()) {
        return cudaErrorFake;
    }
    g_driver.pending.push_back({ addr, value, size });
    return cudaSuccess;
}

static cudaError_t cudaStreamSynchronize(cudaStream_t) {
    run_pending();
    return fails() ? cudaErrorFake : cudaSuccess;
}

static cudaError_t cudaDeviceCanAccessPeer(int * can_access, int, int) {
    *can_access = 1;
    return fails() ? cudaErrorFake : cudaSuccess;
}

static cudaError_t cudaGetLastError() {
    return cudaErrorFake;
}

static const char * cudaGetErrorString(cudaError_t) {
    return "told to fail";
}

static const char * cu_get_error_str(CUresult) {
    return "told to fail";
}

//
// the tested file, and the parts of ggml-cuda.cu that it needs
//

#define GGML_CUDA_PAGES_FAKE
#define GGML_CUDA_PAGES
#define GGML_USE_VMM

#include "../ggml/src/ggml-cuda/pages.cu"

cudaError_t ggml_cuda_pages_wait(int physical_device) {
    check(g_driver.unused.count(physical_device) == 0, "driver: waits for no device that nobody uses");

    if (fails()) {
        return cudaErrorFake;
    }
    run_pending();
    g_driver.busy.erase(physical_device);
    return cudaSuccess;
}

struct buffer_context {
    std::shared_ptr<ggml_cuda_pages> pages;
    void * base;
};

ggml_cuda_pages * ggml_cuda_pages_of(ggml_backend_buffer_t buffer) {
    return ((buffer_context *) buffer->context)->pages.get();
}

ggml_backend_buffer_t ggml_cuda_pages_buffer(int device, std::shared_ptr<ggml_cuda_pages> pages, void * base, size_t size) {
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = [](ggml_backend_buffer_t buf) { delete (buffer_context *) buf->context; };
    iface.get_base    = [](ggml_backend_buffer_t buf) { return ((buffer_context *) buf->context)->base; };
    iface.init_tensor = [](ggml_backend_buffer_t, ggml_tensor *) {
        check(false, "buffer: a tensor that is placed is not padded");
        return GGML_STATUS_SUCCESS;
    };
    iface.cpy_tensor  = [](ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
        check(g_driver.device == ggml_cuda_pages_of(dst->buffer)->device, "buffer: copies as its device");
        memcpy(dst->data, src->data, ggml_nbytes(src));
        return true;
    };

    return ggml_backend_buffer_init(ggml_backend_cuda_buffer_type(device), iface, new buffer_context { std::move(pages), base }, size);
}

ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int device) {
    static ggml_backend_buffer_type types[2];

    for (auto & type : types) {
        type.iface.get_name       = [](ggml_backend_buffer_type_t) { return "fake"; };
        type.iface.get_alignment  = [](ggml_backend_buffer_type_t) { return (size_t) 128; };
        type.iface.get_alloc_size = [](ggml_backend_buffer_type_t, const ggml_tensor * t) { return ggml_nbytes(t) + 512; };
    }

    return &types[device];
}

int ggml_backend_cuda_get_device_count() {
    return ggml_cuda_info().device_count;
}

static const ggml_backend_pages_i * pages_i() {
    return ((ggml_backend_pages_t) ggml_cuda_pages_proc())();
}

//
// tests
//

static void set_env(const char * name, const char * value) {
#ifdef _WIN32
    _putenv_s(name, value);
#else
    if (*value) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
#endif
}

static char * base_of(ggml_backend_buffer_t buf) {
    return (char *) ggml_backend_buffer_get_base(buf);
}

// return the value that all bytes of a page have. -1: the bytes differ
static int value_of(ggml_backend_buffer_t buf, size_t i_page) {
    const char * page = base_of(buf) + i_page*SIZE_PAGE;
    return std::count(page, page + SIZE_PAGE, page[0]) == (std::ptrdiff_t) SIZE_PAGE ? page[0] : -1;
}

static size_t n_mapped(ggml_backend_buffer_t buf) {
    return pages_i()->n_bytes_mapped(buf)/SIZE_PAGE;
}

static bool map(ggml_backend_buffer_t buf, size_t i_page, size_t n) {
    return pages_i()->map(buf, i_page*SIZE_PAGE, n*SIZE_PAGE);
}

static bool unmap(ggml_backend_buffer_t buf, size_t i_page, size_t n) {
    return pages_i()->unmap(buf, i_page*SIZE_PAGE, n*SIZE_PAGE);
}

static ggml_backend_buffer_ptr reserve(size_t n_pages, int device = 0) {
    return ggml_backend_buffer_ptr(pages_i()->reserve(ggml_backend_cuda_buffer_type(device), n_pages*SIZE_PAGE));
}

static void check_nothing_left(const std::string & what) {
    check(g_driver.mappings.empty() && g_driver.handles.empty() && g_driver.ranges.empty() && g_driver.n_free == 1000, what + ": nothing left");
}

static void test_support() {
    ggml_backend_buffer_type other = {};

    check(pages_i()->page_size(ggml_backend_cuda_buffer_type(0)) == SIZE_PAGE, "support: granularity");
    check(pages_i()->page_size(&other) == 0 && !pages_i()->reserve(&other, SIZE_PAGE), "support: no other buffer type");

    g_info.devices[1].vmm = false;
    check(pages_i()->page_size(ggml_backend_cuda_buffer_type(1)) == 0 && !reserve(1, 1), "support: no virtual memory");
    g_info.devices[1].vmm = true;

    set_env("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "1");
    check(pages_i()->page_size(ggml_backend_cuda_buffer_type(0)) == 0 && !reserve(1), "support: not instead of managed memory");
    set_env("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "");

    check(!reserve(0), "reserve: nothing");
    check(!pages_i()->reserve(ggml_backend_cuda_buffer_type(0), SIZE_MAX), "reserve: more than there are addresses");

    fail_calls(0, 0);
    check(!reserve(1), "reserve: no addresses");
    fail_none();

    check_nothing_left("support");
}

static void test_map() {
    {
        const auto buf = ggml_backend_buffer_ptr(pages_i()->reserve(ggml_backend_cuda_buffer_type(1), 9*SIZE_PAGE + 1));

        check(ggml_backend_buffer_get_size(buf.get()) == 10*SIZE_PAGE, "reserve: whole pages");
        check(ggml_backend_buffer_get_type(buf.get()) == ggml_backend_cuda_buffer_type(1), "reserve: the type");
        check(g_driver.handles.empty() && n_mapped(buf.get()) == 0, "reserve: takes nothing");

        check(map(buf.get(), 2, 3) && n_mapped(buf.get()) == 3 && g_driver.handles.size() == 3, "map");
        check(g_driver.device == 7, "map: memory of the physical device");
        for (int i = 2; i < 5; ++i) {
            check(value_of(buf.get(), i) == 0, "map: zeros");
        }

        memset(base_of(buf.get()) + 3*SIZE_PAGE, 1, SIZE_PAGE);
        check(map(buf.get(), 0, 10) && n_mapped(buf.get()) == 10 && g_driver.handles.size() == 10, "map: what is missing");
        check(value_of(buf.get(), 3) == 1 && value_of(buf.get(), 4) == 0 && value_of(buf.get(), 9) == 0, "map: what was there stays");
        check(map(buf.get(), 0, 10) && map(buf.get(), 10, 0), "map: nothing is missing");

        run_on({ 7 });
        check(unmap(buf.get(), 0, 10) && n_mapped(buf.get()) == 0 && g_driver.handles.empty(), "unmap: after the device is idle");
        check(g_driver.busy.empty(), "unmap: waits");

        run_on({ 7 });
        check(unmap(buf.get(), 0, 10) && g_driver.busy.size() == 1, "unmap: waits for nothing if there is nothing");

        check(map(buf.get(), 3, 1) && value_of(buf.get(), 3) == 0, "map: zeros again");
        check(map(buf.get(), 8, 2), "map: before the end");
    }

    check_nothing_left("map: freed while mapped and busy");
    check(g_driver.busy.empty(), "free: waits");

    // test devices with access to each other's memory
    set_env("GGML_CUDA_P2P", "1");
    {
        const auto buf = reserve(4);
        check(map(buf.get(), 1, 1), "peers: map");
        check(g_driver.mappings.begin()->second.users == std::set<int> { 5, 7 }, "peers: have access");
        run_on({ 5, 7 });
        check(unmap(buf.get(), 0, 4) && g_driver.busy.empty(), "peers: are waited for");

        g_driver.unused = { 7 };
        check(map(buf.get(), 1, 1) && unmap(buf.get(), 0, 4), "peers: that the process does not use are not");
        g_driver.unused.clear();
    }
    set_env("GGML_CUDA_P2P", "");

    check_nothing_left("peers");
}

static void test_buffer() {
    {
        const auto buf = reserve(8);
        check(map(buf.get(), 1, 2) && map(buf.get(), 4, 1), "buffer: map");

        ggml_context_ptr ctx(ggml_init({ 3*ggml_tensor_overhead(), nullptr, true }));
        ggml_tensor * t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, 7*SIZE_PAGE);
        check(ggml_backend_tensor_alloc(buf.get(), t, base_of(buf.get()) + 128) == GGML_STATUS_SUCCESS, "buffer: a tensor where nothing is mapped");

        ggml_backend_buffer_clear(buf.get(), 3);
        const std::vector<int> cleared = { GONE, 3, 3, GONE, 3, GONE, GONE, GONE };
        for (size_t i = 0; i < cleared.size(); ++i) {
            check(value_of(buf.get(), i) == cleared[i], "clear: what is mapped");
        }

        // set the bytes from the middle of page 1 to the first byte of page 4
        ggml_backend_tensor_memset(t, 4, SIZE_PAGE + 100 - 128, 3*SIZE_PAGE - 99);
        const char * base = base_of(buf.get());
        check(base[SIZE_PAGE + 99] == 3 && base[SIZE_PAGE + 100] == 4 && value_of(buf.get(), 2) == 4, "memset: from where it starts");
        check(value_of(buf.get(), 3) == GONE && base[4*SIZE_PAGE] == 4 && base[4*SIZE_PAGE + 1] == 3, "memset: to where it ends");

        // copy page 2 to page 4, while another device is the current device
        const auto page = [&](int i) {
            ggml_tensor * res = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, SIZE_PAGE);
            ggml_backend_tensor_alloc(buf.get(), res, base_of(buf.get()) + i*SIZE_PAGE);
            return res;
        };
        ggml_tensor * src = page(2);
        ggml_tensor * dst = page(4);
        g_driver.device = 7;
        ggml_backend_tensor_copy(src, dst);
        check(base[4*SIZE_PAGE] == 4 && base[5*SIZE_PAGE - 1] == 4, "copy: all of it");
        fail_calls(0, 0);
        check(!buf->iface.cpy_tensor(buf.get(), src, dst), "copy: through the host where the device cannot be set");
        fail_none();
    }

    check_nothing_left("buffer");
}

// let each call of the driver during map() fail, alone or with all later calls
// map() must change nothing, and nothing may leak when the driver works again.
static void test_failures() {
    for (const bool alone : { true, false }) {
        // first, count the calls of a successful map()
        auto some = reserve(8);
        check(map(some.get(), 2, 2), "failures: before");
        fail_none();
        check(map(some.get(), 1, 6), "failures: none");
        const int n_calls = g_driver.n_calls;
        check(n_calls == 2 + 4*5, "failures: there are calls");
        some.reset();

        for (int i = 0; i < n_calls; ++i) {
            const std::string what = "call " + std::to_string(i) + (alone ? " fails" : " and all after it fail");

            auto buf = reserve(8);
            check(map(buf.get(), 2, 2), what + ": before");
            memset(base_of(buf.get()) + 2*SIZE_PAGE, 1, 2*SIZE_PAGE);

            fail_calls(i, alone ? i : std::numeric_limits<int>::max() - 1);
            check(!map(buf.get(), 1, 6), what + ": map says so");
            fail_none();

            ggml_backend_buffer_clear(buf.get(), 1); // skips memory that is not accessible
            check(value_of(buf.get(), 2) == 1 && value_of(buf.get(), 3) == 1, what + ": what was there stays");
            check(n_mapped(buf.get()) == g_driver.mappings.size(), what + ": counted");
            check(g_driver.handles.size() == g_driver.mappings.size(), what + ": no handle without a mapping");
            if (alone) {
                check(n_mapped(buf.get()) == 2, what + ": nothing changed");
            }

            check(map(buf.get(), 1, 6) && n_mapped(buf.get()) == 6, what + ": and works afterwards");
            for (int j = 1; j < 7; ++j) {
                check(value_of(buf.get(), j) == (j == 2 || j == 3 ? 1 : 0), what + ": zeros afterwards");
            }

            buf.reset();
            check_nothing_left(what);
        }
    }

    // let the calls fail while memory is freed
    for (int i = 0; i < 9; ++i) { // one call to wait, and one call per page
        const std::string what = "unmap: call " + std::to_string(i) + " fails";

        auto buf = reserve(8);
        check(map(buf.get(), 0, 8), what + ": before");
        memset(base_of(buf.get()), 1, 8*SIZE_PAGE);
        run_on({ 5 });

        fail_calls(i, i);
        check(!unmap(buf.get(), 0, 8), what + ": said so");
        fail_none();

        check(n_mapped(buf.get()) == g_driver.mappings.size() && n_mapped(buf.get()) == (i == 0 ? 8 : 1), what + ": counted");

        // memory that could not be freed must be zero after the next map(), as all memory is
        check(map(buf.get(), 0, 8), what + ": comes back");
        for (int j = 0; j < 8; ++j) {
            check(value_of(buf.get(), j) == 0, what + ": zeros afterwards");
        }
        check(unmap(buf.get(), 0, 8) && n_mapped(buf.get()) == 0, what + ": and works afterwards");

        buf.reset();
        check_nothing_left(what);
    }
    // if a device is lost, the program must end without a crash
    auto buf = reserve(2);
    check(map(buf.get(), 0, 2), "lost: before");
    fail_calls(0, std::numeric_limits<int>::max() - 1);
    ggml_backend_buffer_clear(buf.get(), 1);
    buf.reset();
    fail_none();

    g_driver.mappings.clear();
    g_driver.handles.clear();
    g_driver.ranges.clear();
    g_driver.pending.clear();
    g_driver.n_free = 1000;
}

// run random operations on two buffers with little memory, with occasional failures
static void test_random() {
    std::mt19937 rng(1);
    const auto random = [&](int n) { return (int) (rng() % n); };

    const int n_pages = 12;
    g_driver.n_free = 15;

    int n_ended = 0;
    {
        const ggml_backend_buffer_ptr bufs[] = { reserve(n_pages), reserve(n_pages, 1) };
        std::vector<int> model[2] = { std::vector<int>(n_pages, GONE), std::vector<int>(n_pages, GONE) };

        for (int step = 0; step < 5000; ++step) {
            const int ib = random(2);
            const int i0 = random(n_pages);
            const int n  = random(n_pages - i0 + 1);

            auto * buf = bufs[ib].get();

            if (random(2) == 0) {
                // either let a call of the driver fail, with 1000 more free pages, or let the pages run out. If both happened
                // in one map(), pages that could not be freed would remain
                const size_t n_more = random(4) == 0 ? 1000 : 0;
                if (n_more > 0) {
                    const int i = random(20);
                    fail_calls(i, i);
                    g_driver.n_free += n_more;
                }
                if (map(buf, i0, n)) {
                    std::replace(model[ib].begin() + i0, model[ib].begin() + i0 + n, (int) GONE, 0);
                } else {
                    n_ended++;
                }
                fail_none();
                g_driver.n_free -= n_more;
            } else {
                run_on({ 5, 7 });
                check(unmap(buf, i0, n), "random: unmap");
                std::fill(model[ib].begin() + i0, model[ib].begin() + i0 + n, (int) GONE);
            }

            // let a kernel write to the pages
            for (int i = 0; i < n_pages; ++i) {
                check(value_of(buf, i) == model[ib][i], "random: what is where");
                if (model[ib][i] != GONE && random(3) == 0) {
                    model[ib][i] = 1 + random(50);
                    memset(base_of(buf) + i*SIZE_PAGE, model[ib][i], SIZE_PAGE);
                }
            }

            const size_t n_model = n_pages - std::count(model[ib].begin(), model[ib].end(), (int) GONE);
            check(n_mapped(buf) == n_model && g_driver.handles.size() == n_mapped(bufs[0].get()) + n_mapped(bufs[1].get()), "random: counted");
        }
    }

    check(n_ended > 100, "random: memory ends");
    g_driver.n_free += 1000 - 15;
    check_nothing_left("random");
}

int main() {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // suppress the log, because every failure is logged

    g_info.device_count = 2;
    g_info.devices[0]   = { true, SIZE_PAGE, 5 };
    g_info.devices[1]   = { true, SIZE_PAGE, 7 };

    test_support();
    test_map();
    test_buffer();
    test_failures();
    test_random();

    return report();
}

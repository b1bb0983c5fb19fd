#include "fake-device.h"

#include "ggml-pages.h"
#include "ggml.h"

#include "../../ggml/src/ggml-backend-impl.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

//
// the system
//

#ifdef _WIN32

static size_t sys_page_size() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

static char * sys_reserve(size_t size)              { return (char *) VirtualAlloc(nullptr, size, MEM_RESERVE, PAGE_NOACCESS); }
static bool   sys_map    (char * addr, size_t size) { return VirtualAlloc(addr, size, MEM_COMMIT, PAGE_READWRITE) != nullptr; }
static bool   sys_unmap  (char * addr, size_t size) { return VirtualFree(addr, size, MEM_DECOMMIT) != 0; }

#else

static size_t sys_page_size() {
    return (size_t) sysconf(_SC_PAGESIZE);
}

// reserve addresses. If addr already has a mapping, replace it and free its memory
static char * sys_reserve_at(char * addr, size_t size, int flags) {
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    void * res = mmap(addr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return res == MAP_FAILED ? nullptr : (char *) res;
}

static char * sys_reserve(size_t size)              { return sys_reserve_at(nullptr, size, 0); }
static bool   sys_map    (char * addr, size_t size) { return mprotect(addr, size, PROT_READ | PROT_WRITE) == 0; }
static bool   sys_unmap  (char * addr, size_t size) { return sys_reserve_at(addr, size, MAP_FIXED) != nullptr; }

#endif

//
// memory
//

namespace {

struct fake_device {
    bool take(size_t size) {
        const std::lock_guard<std::mutex> lock(mutex);

        const bool res = size <= n_free;
        n_free -= res ? size : 0;

        return res;
    }

    void give(size_t size) {
        const std::lock_guard<std::mutex> lock(mutex);

        n_free += size;
    }

    std::string name;

    size_t n_total;
    size_t n_free;
    size_t page_size;
    bool   is_f16;

    std::mutex mutex;

    ggml_backend_reg         reg  = {};
    ggml_backend_device      dev  = {};
    ggml_backend_buffer_type buft = {};
};

// the memory of a buffer. A plain buffer consists of a single page
struct fake_memory {
    fake_memory(fake_device & device, size_t page_size, size_t n_pages) :
        device(device), page_size(page_size), base(sys_reserve(n_pages*page_size)), mapped(n_pages) {}

    ~fake_memory() {
        if (base) {
            unmap(0, mapped.size()); // this frees the memory, but keeps the addresses reserved forever
        }
    }

    fake_memory(const fake_memory &) = delete;
    fake_memory & operator=(const fake_memory &) = delete;

    bool map_one(size_t i) {
        if (!device.take(page_size)) {
            return false;
        }

        mapped[i] = sys_map(base + i*page_size, page_size);
        device.give(mapped[i] ? 0 : page_size);

        return mapped[i];
    }

    // map the pages [i0, i1), as map() of ggml-pages.h does. returns false if there is not enough memory
    bool map(size_t i0, size_t i1) {
        std::vector<size_t> added;

        for (size_t i = i0; i < i1; ++i) {
            if (mapped[i]) {
                continue;
            }

            if (!map_one(i)) {
                for (const size_t j : added) {
                    unmap(j, j + 1);
                }

                return false;
            }

            added.push_back(i);
        }

        return true;
    }

    bool unmap(size_t i0, size_t i1) {
        if (i0 < i1 && !sys_unmap(base + i0*page_size, (i1 - i0)*page_size)) {
            return false;
        }

        device.give(std::count(mapped.begin() + i0, mapped.begin() + i1, true)*page_size);
        std::fill(mapped.begin() + i0, mapped.begin() + i1, false);

        return true;
    }

    // set the mapped parts of the bytes [begin, end) to a value
    void set(size_t begin, size_t end, uint8_t value) {
        for (size_t i = begin/page_size; i*page_size < end; ++i) {
            if (mapped[i]) {
                const size_t i0 = std::max(begin, i*page_size);
                const size_t i1 = std::min(end, (i + 1)*page_size);

                memset(base + i0, value, i1 - i0);
            }
        }
    }

    size_t n_bytes() const {
        return mapped.size()*page_size;
    }

    fake_device & device;
    const size_t  page_size;
    char * const  base; // null if the addresses could not be reserved

    std::vector<bool> mapped;
};

} // namespace

//
// buffers
//

static fake_memory & memory_of(ggml_backend_buffer_t buf) {
    return *(fake_memory *) buf->context;
}

static void   buf_free (ggml_backend_buffer_t buf)                { delete &memory_of(buf); }
static void * buf_base (ggml_backend_buffer_t buf)                { return memory_of(buf).base; }
static void   buf_clear(ggml_backend_buffer_t buf, uint8_t value) { memory_of(buf).set(0, memory_of(buf).n_bytes(), value); }

static void buf_memset(ggml_backend_buffer_t buf, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    const size_t begin = (char *) t->data - memory_of(buf).base + offset;

    memory_of(buf).set(begin, begin + size, value);
}

static void buf_set(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    memcpy((char *) t->data + offset, data, size);
}

static void buf_get(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) t->data + offset, size);
}

static bool buf_cpy(ggml_backend_buffer_t buf, const ggml_tensor * src, ggml_tensor * dst) {
    const bool res = src->buffer->buft == buf->buft;
    if (res) {
        memcpy(dst->data, src->data, ggml_nbytes(src));
    }

    return res;
}

static ggml_backend_buffer_t buf_init(ggml_backend_buffer_type_t buft, std::unique_ptr<fake_memory> memory, size_t size) {
    ggml_backend_buffer_i iface = {}; // set by name, because the optional functions differ between versions of upstream
    iface.free_buffer   = buf_free;
    iface.get_base      = buf_base;
    iface.memset_tensor = buf_memset;
    iface.set_tensor    = buf_set;
    iface.get_tensor    = buf_get;
    iface.cpy_tensor    = buf_cpy;
    iface.clear         = buf_clear;

    return ggml_backend_buffer_init(buft, iface, memory.release(), size);
}

//
// buffer type
//

static fake_device & device_of(ggml_backend_buffer_type_t buft) {
    return *(fake_device *) buft->context;
}

static const char * buft_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft).name.c_str();
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    auto memory = std::make_unique<fake_memory>(device_of(buft), GGML_PAD(size, sys_page_size()), 1);
    if (!memory->base || !memory->map(0, 1)) {
        return nullptr;
    }

    memory->set(0, memory->n_bytes(), 0xff);

    return buf_init(buft, std::move(memory), size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t) {
    return 128;
}

// return the number of bytes that kernels read after the last row, as in CUDA
static size_t padding(const ggml_tensor * t) {
    const int64_t n = t->ne[0] % 512;

    return ggml_is_quantized(t->type) && n > 0 ? ggml_row_size(t->type, 512 - n) : 0;
}

static size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    return ggml_nbytes(t) + padding(t);
}

//
// ggml-pages.h
//

static size_t pages_page_size(ggml_backend_buffer_type_t buft) {
    return device_of(buft).page_size;
}

static ggml_backend_buffer_t pages_reserve(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t page_size = device_of(buft).page_size;
    if (page_size == 0 || size == 0 || size > SIZE_MAX - page_size) {
        return nullptr;
    }

    auto memory = std::make_unique<fake_memory>(device_of(buft), page_size, (size + page_size - 1)/page_size);
    if (!memory->base) {
        return nullptr;
    }

    const size_t n_bytes = memory->n_bytes();

    return buf_init(buft, std::move(memory), n_bytes);
}

static std::pair<size_t, size_t> pages_range(ggml_backend_buffer_t buf, size_t offset, size_t size) {
    const fake_memory & memory = memory_of(buf);

    GGML_ASSERT(offset % memory.page_size == 0 && size % memory.page_size == 0);
    GGML_ASSERT(offset <= memory.n_bytes() && size <= memory.n_bytes() - offset);

    return { offset/memory.page_size, (offset + size)/memory.page_size };
}

static bool pages_map(ggml_backend_buffer_t buf, size_t offset, size_t size) {
    const auto [i0, i1] = pages_range(buf, offset, size);

    return memory_of(buf).map(i0, i1);
}

static bool pages_unmap(ggml_backend_buffer_t buf, size_t offset, size_t size) {
    const auto [i0, i1] = pages_range(buf, offset, size);

    return memory_of(buf).unmap(i0, i1);
}

static size_t pages_n_bytes_mapped(ggml_backend_buffer_t buf) {
    const fake_memory & memory = memory_of(buf);

    return std::count(memory.mapped.begin(), memory.mapped.end(), true)*memory.page_size;
}

static const ggml_backend_pages_i * pages_interface() {
    static const ggml_backend_pages_i res = { pages_page_size, pages_reserve, pages_map, pages_unmap, pages_n_bytes_mapped };

    return &res;
}

//
// backend
//

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static const char * backend_name(ggml_backend_t backend) {
    return ggml_backend_dev_name(backend->device);
}

static void backend_free(ggml_backend_t backend) {
    ggml_backend_free((ggml_backend_t) backend->context);
    delete backend;
}

// return true if a kernel computes the node. Other nodes are views, which can be in any memory
static bool has_kernel(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return !ggml_is_empty(node);
    }
}

// read the first byte of each row
static void touch_rows(const ggml_tensor * t) {
    for (int64_t i3 = 0; i3 < t->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < t->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < t->ne[1]; ++i1) {
                (void) ((const volatile char *) t->data)[i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3]];
            }
        }
    }
}

// read the last byte of a tensor's padding, as a kernel does. If its page has no memory, the process ends here
// In attention, the tensor is a view whose rows are single heads. So the padding of the view differs from the padding of the
// whole tensor, and the function uses the larger one. If the padding ends after the buffer, the function reads nothing, because
// memory after the buffer is always inaccessible.
static void touch_padding(const ggml_tensor * t) {
    const fake_memory & memory = memory_of(t->buffer);

    const char * last = (const char *) t->data + ggml_nbytes(t) + std::max(padding(t), padding(t->view_src ? t->view_src : t)) - 1;
    if (last < memory.base + memory.n_bytes()) {
        (void) *(const volatile char *) last;
    }
}

// return true if a kernel can copy from or to this tensor
// In a plain buffer (a single page), a quantized tensor must begin at an aligned address, as Vulkan requires. The function
// accepts any address in a buffer with several pages, and any address of a tensor that is not quantized.
static bool is_copied_right(const ggml_tensor * t) {
    return !ggml_is_quantized(t->type) || memory_of(t->buffer).mapped.size() > 1 ||
        ((const char *) t->data - memory_of(t->buffer).base) % buft_alignment(t->buffer->buft) == 0;
}

// access the memory of a node more strictly than the kernels of the CPU do: crash at memory of another device, and read the
// padding and the masked rows
static void touch(ggml_backend_t backend, const ggml_tensor * node) {
    const auto is_own = [&](const ggml_tensor * t) {
        return t->buffer && t->buffer->buft->device == backend->device;
    };

    GGML_ASSERT(is_own(node));

    GGML_ASSERT(node->op != GGML_OP_CPY || (is_copied_right(node) && is_copied_right(node->src[0])));

    const bool reads_padding = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_FLASH_ATTN_EXT;

    for (const ggml_tensor * src : node->src) {
        GGML_ASSERT(!src || is_own(src));

        if (src && reads_padding && !ggml_is_empty(src)) {
            touch_padding(src);
        }
        if (src && node->op == GGML_OP_FLASH_ATTN_EXT) {
            touch_rows(src);
        }
    }
}

static enum ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph * gf) {
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (has_kernel(node)) {
            touch(backend, node);
        }
    }

    return ggml_backend_graph_compute((ggml_backend_t) backend->context, gf);
}

//
// device
//

static fake_device & device_of(ggml_backend_dev_t dev) {
    return *(fake_device *) dev->context;
}

static const char *               dev_name       (ggml_backend_dev_t dev) { return device_of(dev).name.c_str(); }
static const char *               dev_description(ggml_backend_dev_t)     { return "a GPU that is not there"; }
static enum ggml_backend_dev_type dev_type       (ggml_backend_dev_t)     { return GGML_BACKEND_DEVICE_TYPE_GPU; }
static ggml_backend_buffer_type_t dev_buft       (ggml_backend_dev_t dev) { return &device_of(dev).buft; }

static void dev_memory(ggml_backend_dev_t dev, size_t * n_free, size_t * n_total) {
    const std::lock_guard<std::mutex> lock(device_of(dev).mutex);

    *n_free  = device_of(dev).n_free;
    *n_total = device_of(dev).n_total;
}

// set the properties of the device, without any capabilities
static void dev_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = dev_name(dev);
    props->description = dev_description(dev);
    props->type        = dev_type(dev);
    dev_memory(dev, &props->memory_free, &props->memory_total);
}

static ggml_backend_t dev_init(ggml_backend_dev_t dev, const char * params) {
    static ggml_guid guid = { 'k', 'v', 't', 'o', 'o', 'l', ' ', 'f', 'a', 'k', 'e', ' ', 'G', 'P', 'U', 0 };

    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), params);

    const auto set_n_threads = (ggml_backend_set_n_threads_t)
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), "ggml_backend_set_n_threads");
    set_n_threads(cpu, 1);

    auto * res = new ggml_backend();
    res->guid                = &guid;
    res->device              = dev;
    res->context             = cpu;
    res->iface.get_name      = backend_name;
    res->iface.free          = backend_free;
    res->iface.graph_compute = backend_compute;

    return res;
}

// return true if the CPU backend supports the operation, with the exceptions below
// The CPU backend checks buffer types only to detect weights that it has reordered (extra buffer types). So it accepts tensors
// in buffers of the fake device.
static bool dev_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const bool is_lacking =
        (op->op == GGML_OP_FLASH_ATTN_EXT && op->src[1]->type != GGML_TYPE_F16) ||
        (op->op == GGML_OP_SET_ROWS       && op->type         == GGML_TYPE_Q5_0);

    // CUDA refuses this operation, too
    const bool is_refused = op->op == GGML_OP_GET_ROWS && op->src[0]->type == GGML_TYPE_IQ4_NL && op->src[0]->ne[0] % 256 != 0;

    return !is_refused && !(is_lacking && device_of(dev).is_f16) && ggml_backend_dev_supports_op(cpu_device(), op);
}

static bool dev_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &device_of(dev).buft;
}

//
// registry
//

static const char *       reg_name        (ggml_backend_reg_t reg)         { return ((fake_device *) reg->context)->name.c_str(); }
static size_t             reg_device_count(ggml_backend_reg_t)             { return 1; }
static ggml_backend_dev_t reg_device      (ggml_backend_reg_t reg, size_t) { return &((fake_device *) reg->context)->dev; }

static void * reg_proc_address(ggml_backend_reg_t, const char * name) {
    return strcmp(name, "ggml_backend_pages") == 0 ? (void *) pages_interface : nullptr;
}

ggml_backend_dev_t fake_device_add(size_t n_bytes, size_t page_size, bool is_f16) {
    GGML_ASSERT(page_size % sys_page_size() == 0);

    static auto & devices = *new std::vector<fake_device *>(); // never freed, because ggml's registry uses the devices until the process ends

    auto * res = new fake_device();
    res->name      = "FAKE" + std::to_string(devices.size());
    res->n_total   = n_bytes;
    res->n_free    = n_bytes;
    res->page_size = page_size;
    res->is_f16    = is_f16;
    devices.push_back(res);

    res->reg.api_version            = GGML_BACKEND_API_VERSION;
    res->reg.context                = res;
    res->reg.iface.get_name         = reg_name;
    res->reg.iface.get_device_count = reg_device_count;
    res->reg.iface.get_device       = reg_device;
    res->reg.iface.get_proc_address = reg_proc_address;

    res->dev.reg                   = &res->reg;
    res->dev.context               = res;
    res->dev.iface.get_name        = dev_name;
    res->dev.iface.get_description = dev_description;
    res->dev.iface.get_memory      = dev_memory;
    res->dev.iface.get_type        = dev_type;
    res->dev.iface.get_props       = dev_props;
    res->dev.iface.init_backend    = dev_init;
    res->dev.iface.get_buffer_type = dev_buft;
    res->dev.iface.supports_op     = dev_supports_op;
    res->dev.iface.supports_buft   = dev_supports_buft;

    res->buft.device               = &res->dev;
    res->buft.context              = res;
    res->buft.iface.get_name       = buft_name;
    res->buft.iface.alloc_buffer   = buft_alloc;
    res->buft.iface.get_alignment  = buft_alignment;
    res->buft.iface.get_alloc_size = buft_alloc_size;

    ggml_backend_register(&res->reg);

    return &res->dev;
}

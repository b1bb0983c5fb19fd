// Unit tests of device memory in pages (ggml-pages.h), on the fake device and on every real device that has pages
// On the fake device, they also check the rules that the device enforces, because other tests depend on these rules.
// test-kv-cuda.cpp tests how CUDA's implementation (ggml-cuda/pages.cu) handles failures of the driver.

#include "../tools/kv-check/fake-device.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-pages.h"
#include "ggml.h"

#include "test-kv.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#ifndef _WIN32
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>
#endif

static const ggml_backend_pages_i * pages_of(ggml_backend_dev_t dev) {
    const auto get = (ggml_backend_pages_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_pages");
    return get ? get() : nullptr;
}

static size_t n_bytes_free(ggml_backend_dev_t dev) {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    return free;
}

struct device {
    ggml_backend_dev_t           dev;
    ggml_backend_buffer_type_t   buft;
    const ggml_backend_pages_i * pages;
    size_t                       page_size;
    std::string                  name;

    ggml_backend_buffer_ptr reserve(size_t n_pages) const {
        return ggml_backend_buffer_ptr(pages->reserve(buft, n_pages*page_size));
    }

    bool map(const ggml_backend_buffer_ptr & buf, size_t i_page, size_t n) const {
        return pages->map(buf.get(), i_page*page_size, n*page_size);
    }

    bool unmap(const ggml_backend_buffer_ptr & buf, size_t i_page, size_t n) const {
        return pages->unmap(buf.get(), i_page*page_size, n*page_size);
    }
};

// create a tensor of floats that covers a whole buffer
static ggml_tensor * tensor_on(ggml_context * ctx, const ggml_backend_buffer_ptr & buf) {
    ggml_tensor * res = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, ggml_backend_buffer_get_size(buf.get())/sizeof(float));
    ggml_backend_tensor_alloc(buf.get(), res, ggml_backend_buffer_get_base(buf.get()));
    return res;
}

static bool all_are(const ggml_tensor * t, size_t offset, size_t size, float value) {
    std::vector<float> data(size/sizeof(float));
    ggml_backend_tensor_get(t, data.data(), offset, size);
    return std::all_of(data.begin(), data.end(), [&](float x) { return x == value; });
}

static void set_all(ggml_tensor * t, size_t offset, size_t size, float value) {
    const std::vector<float> data(size/sizeof(float), value);
    ggml_backend_tensor_set(t, data.data(), offset, size);
}

static void test_data(const device & d) {
    const size_t n = d.page_size;

    ggml_context_ptr ctx(ggml_init({ 4*ggml_tensor_overhead(), nullptr, true }));

    const auto buf = d.reserve(16);
    check(buf && d.pages->n_bytes_mapped(buf.get()) == 0, d.name + ": reserve");
    ggml_tensor * t = tensor_on(ctx.get(), buf);

    // the old content of the memory must not be visible
    check(d.map(buf, 0, 16), d.name + ": map");
    ggml_backend_buffer_clear(buf.get(), 0x3f);
    check(d.unmap(buf, 0, 16) && d.pages->n_bytes_mapped(buf.get()) == 0, d.name + ": unmap");
    check(d.map(buf, 3, 4) && d.pages->n_bytes_mapped(buf.get()) == 4*n, d.name + ": map again");
    check(all_are(t, 3*n, 4*n, 0.0f), d.name + ": zeros");

    // write across the edges of pages, and unmap a page in the middle
    set_all(t, 3*n + 4, 4*n - 8, 1.0f);
    check(d.unmap(buf, 4, 1) && d.map(buf, 0, 8), d.name + ": a hole, and more");
    check(all_are(t, 3*n + 4, n - 4, 1.0f) && all_are(t, 5*n, 2*n - 4, 1.0f), d.name + ": the rest stays");
    check(all_are(t, 0, 3*n + 4, 0.0f) && all_are(t, 4*n, n, 0.0f) && all_are(t, 7*n - 4, n + 4, 0.0f), d.name + ": zeros in the hole");

    // set a range of bytes in which some pages are not mapped
    ggml_backend_tensor_memset(t, 0, n/2, 12*n);
    check(all_are(t, 0, 8*n, 0.0f), d.name + ": memset");

    // copy to and from plain memory of the device
    ggml_tensor * plain = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 8*n/sizeof(float));
    ggml_backend_buffer_ptr other(ggml_backend_buft_alloc_buffer(d.buft, 8*n));
    ggml_backend_tensor_alloc(other.get(), plain, ggml_backend_buffer_get_base(other.get()));
    set_all(plain, 0, 8*n, 2.0f);

    ggml_tensor * part = ggml_view_1d(ctx.get(), t, plain->ne[0], 0);
    ggml_backend_view_init(part);
    ggml_backend_tensor_copy(plain, part);
    check(all_are(t, 0, 8*n, 2.0f), d.name + ": copied to");
    set_all(plain, 0, 8*n, 0.0f);
    ggml_backend_tensor_copy(part, plain);
    check(all_are(plain, 0, 8*n, 2.0f), d.name + ": copied from");
}

// test that a graph sees mapped pages, and that pages are unmapped only after running graphs have ended
static void test_graph(const device & d) {
    const size_t n_pages = 32;
    const int    n_nodes = 400;

    ggml_backend_ptr backend(ggml_backend_dev_init(d.dev, nullptr));
    ggml_context_ptr ctx(ggml_init({ (n_nodes + 4)*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes + 1, false), nullptr, true }));

    const auto buf = d.reserve(2*n_pages);
    ggml_tensor * t = tensor_on(ctx.get(), buf);

    ggml_tensor * part = ggml_view_1d(ctx.get(), t, n_pages*d.page_size/sizeof(float), 0);
    ggml_backend_view_init(part);

    ggml_cgraph * gf = ggml_new_graph_custom(ctx.get(), n_nodes + 1, false); // one node more, for the view
    ggml_tensor * cur = part;
    for (int i = 0; i < n_nodes; ++i) {
        cur = ggml_scale_bias_inplace(ctx.get(), cur, 1.0f, 1.0f);
        ggml_backend_view_init(cur);
    }
    ggml_build_forward_expand(gf, cur);

    for (int i = 0; i < 5; ++i) { // the later graphs may be captured
        check(d.map(buf, 0, n_pages), d.name + ": map for a graph");
        check(ggml_backend_graph_compute_async(backend.get(), gf) == GGML_STATUS_SUCCESS, d.name + ": compute");

        if (i % 2 == 0) {
            ggml_backend_synchronize(backend.get());
            check(all_are(t, 0, n_pages*d.page_size, (float) n_nodes), d.name + ": computed from zeros, once");
        }

        check(d.unmap(buf, 0, n_pages), d.name + ": unmap while a graph may run");
    }
    ggml_backend_synchronize(backend.get()); // ends the process if the graph accessed unmapped pages
}

static ggml_backend_buffer_ptr alloc(const device & d, size_t size) {
    return ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(d.buft, size));
}

static void test_memory(const device & d) {
    const size_t n_pages  = 64;
    const size_t n_before = n_bytes_free(d.dev);

    auto buf = d.reserve(2*n_before/d.page_size);
    check(buf && n_bytes_free(d.dev) + n_pages/2*d.page_size > n_before, d.name + ": addresses take no memory");

    // The free memory must become smaller by the size of the mapped pages, and larger again when they are unmapped. Other programs
    // can use memory of the device at the same time, so the checks only require a change by more than half of this size.
    check(d.map(buf, 10, n_pages) && n_bytes_free(d.dev) + n_pages/2*d.page_size < n_before, d.name + ": pages do");
    const size_t n_between = n_bytes_free(d.dev);
    check(d.unmap(buf, 10, n_pages) && n_bytes_free(d.dev) > n_between + n_pages/2*d.page_size, d.name + ": and give it back");

#ifndef _WIN32 // a driver on Windows uses host memory instead of failing
    if (ggml_backend_dev_type(d.dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
        // Allocate most of the free memory as one buffer, so that little is left for pages. Mapping all of it page by page
        // would be slow.
        const size_t n_free = n_bytes_free(d.dev);
        const size_t n_keep = std::max<size_t>(4*n_pages*d.page_size, 256 << 20);
        const auto   rest   = n_free > n_keep ? alloc(d, n_free - n_keep) : nullptr;

        check(d.map(buf, 10, n_pages), d.name + ": before the end");
        check(!d.map(buf, 0, 2*n_before/d.page_size), d.name + ": more than there is");
        check(d.pages->n_bytes_mapped(buf.get()) == n_pages*d.page_size, d.name + ": nothing changed");
    }
#endif

    buf.reset();
    check(n_bytes_free(d.dev) + n_pages/2*d.page_size > n_before, d.name + ": freed");
}

//
// rules that the fake device enforces, for example the limit of its memory. Other tests depend on these rules
//

static void test_plain(const device & d) {
    const size_t n = n_bytes_free(d.dev);

    auto buf = alloc(d, n);
    check(buf && n_bytes_free(d.dev) == 0, d.name + ": all there is");
    check(!alloc(d, 1), d.name + ": no memory left");

    buf.reset();
    check(n_bytes_free(d.dev) == n && !alloc(d, n + 1), d.name + ": more than there is");

    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    buf = alloc(d, n/2);
    std::vector<uint8_t> data(n/2);
    ggml_backend_tensor_get(tensor_on(ctx.get(), buf), data.data(), 0, data.size());
    check(std::all_of(data.begin(), data.end(), [](uint8_t x) { return x == 0xff; }), d.name + ": not cleared");

    check(!ggml_backend_buffer_is_host(buf.get()), d.name + ": no host memory");
}

#ifndef _WIN32

static bool faults(const std::function<void()> & f) {
    const pid_t pid = fork();
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL); // the handler of a sanitizer would exit normally
        f();
        _exit(0);
    }

    int status = 0;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

static void compute(const device & d, ggml_context * ctx, ggml_tensor * t) {
    ggml_cgraph * gf = ggml_new_graph(ctx);
    ggml_build_forward_expand(gf, t);

    ggml_backend_ptr backend(ggml_backend_dev_init(d.dev, nullptr));
    ggml_backend_graph_compute(backend.get(), gf);
}

// unmap page 4 of 8 pages. Only an access to page 4 may end the process
static void test_faults(const device & d) {
    const size_t n = d.page_size;

    ggml_context_ptr ctx(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    const auto buf = d.reserve(8);
    check(d.map(buf, 0, 8) && d.unmap(buf, 4, 1), d.name + ": a hole");
    ggml_tensor * t = tensor_on(ctx.get(), buf);

    const auto page = [&](size_t i) {
        ggml_tensor * res = ggml_view_1d(ctx.get(), t, n/sizeof(float), i*n);
        ggml_backend_view_init(res);
        return res;
    };

    const auto scale = [&](ggml_tensor * x) {
        ggml_tensor * res = ggml_scale_inplace(ctx.get(), x, 2.0f);
        ggml_backend_view_init(res);
        compute(d, ctx.get(), res);
    };

    ggml_tensor * from = page(0);
    ggml_tensor * hole = page(4);
    ggml_tensor * rest = page(5);

    float x = 0.0f;

    const struct {
        const char * name;
        std::function<void(ggml_tensor *)> f;
    } ways[] = {
        { "set",       [&](ggml_tensor * t) { ggml_backend_tensor_set(t, &x, n - sizeof(x), sizeof(x)); } },
        { "get",       [&](ggml_tensor * t) { ggml_backend_tensor_get(t, &x, 0, sizeof(x)); } },
        { "copy to",   [&](ggml_tensor * t) { ggml_backend_tensor_copy(from, t); } },
        { "copy from", [&](ggml_tensor * t) { ggml_backend_tensor_copy(t, from); } },
        { "kernel",    scale },
    };
    for (const auto & way : ways) {
        check(faults([&] { way.f(hole); }), d.name + ": no fault: " + way.name);
        check(!faults([&] { way.f(rest); }), d.name + ": a fault beside the hole: " + way.name);
    }
}

// test that kernels read the padding, which are the bytes after the last row
// Only the first of two pages is mapped. The rows of the kernel end n_after bytes before the end of that page. The kernel must
// fault unless the whole padding is in the mapped page.
static void test_faults_padding(const device & d) {
    ggml_context_ptr ctx(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));

    const auto pages = d.reserve(2);
    const auto plain = alloc(d, d.page_size);
    check(d.map(pages, 0, 1), d.name + ": one page of two");

    char * end  = (char *) ggml_backend_buffer_get_base(pages.get()) + d.page_size;
    char * data = (char *) ggml_backend_buffer_get_base(plain.get());

    const auto read = [&](size_t n_after) {
        ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_Q8_0, 64, 4);
        ggml_tensor * x    = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 64);
        ggml_tensor * res  = ggml_mul_mat(ctx.get(), rows, x);
        ggml_backend_tensor_alloc(pages.get(), rows, end - ggml_nbytes(rows) - n_after);
        ggml_backend_tensor_alloc(plain.get(), x,    data);
        ggml_backend_tensor_alloc(plain.get(), res,  data + 1024);
        compute(d, ctx.get(), res);
    };

    const size_t n_padding = ggml_row_size(GGML_TYPE_Q8_0, 512 - 64);

    check( faults([&] { read(0); }),             d.name + ": no fault behind the last row");
    check( faults([&] { read(n_padding - 34); }), d.name + ": no fault at the end of the padding");
    check(!faults([&] { read(n_padding); }),     d.name + ": a fault with the padding mapped");
}

static void test_faults_freed(const device & d) {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));

    auto buf = alloc(d, d.page_size);
    ggml_tensor * t = tensor_on(ctx.get(), buf);
    buf.reset();
    const auto other = alloc(d, d.page_size); // at another address than the freed buffer

    check(faults([&] { *(volatile char *) t->data = 0; }), d.name + ": no fault in what was freed");
}

#endif

int main() {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // so that the output of a process that is killed is not lost

    ggml_backend_load_all();

    const size_t n_page = 64 << 10; // small pages, because the CPU fills them

    ggml_backend_dev_t fake  = fake_device_add(1024*n_page, n_page);
    ggml_backend_dev_t plain = fake_device_add(1024*n_page, 0);

    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(dev);

        const ggml_backend_pages_i * pages = pages_of(dev);
        const size_t page_size = pages ? pages->page_size(buft) : 0;
        if (page_size == 0) {
            printf("%s: no pages\n", ggml_backend_dev_name(dev));
            continue;
        }

        const device d = { dev, buft, pages, page_size, ggml_backend_dev_name(dev) };
        printf("%s: pages of %zu bytes\n", d.name.c_str(), d.page_size);

        test_data(d);
        test_graph(d);
        test_memory(d);

    }

    const device d = { fake, ggml_backend_dev_buffer_type(fake), pages_of(fake), n_page, ggml_backend_dev_name(fake) };
    test_plain(d);
#ifndef _WIN32
    test_faults(d);
    test_faults_padding(d);
    test_faults_freed(d);
#endif

    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(plain);
    check(pages_of(plain)->page_size(buft) == 0 && !pages_of(plain)->reserve(buft, n_page), "a device without pages");

    return report();
}

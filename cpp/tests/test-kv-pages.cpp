// Unit tests of pages that are committed and freed, and of the limits of a commit

#include "../src/llama-kv-limits.h"
#include "../src/llama-kv-pages.h"

#include "test-kv.h"

#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/resource.h>
#endif

static const size_t SIZE_PAGE = llama_kv_pages_size_host();

// return the number of resident pages of the range, as reported by the system
static size_t n_resident(const llama_kv_pages & pages) {
#ifdef __linux__
    std::vector<unsigned char> res(pages.size()/SIZE_PAGE);
    if (mincore(pages.data(), pages.size(), res.data()) == 0) {
        size_t n = 0;
        for (unsigned char c : res) {
            n += c & 1;
        }
        return n;
    }
#endif
    return pages.n_bytes_committed()/SIZE_PAGE;
}

// return true if the system may use huge pages in the range, which would allocate more than requested
static bool has_huge_pages(const llama_kv_pages & pages) {
    std::ifstream smaps("/proc/self/smaps");

    bool is_there = false;
    for (std::string line; std::getline(smaps, line);) {
        unsigned long long i0 = 0;
        unsigned long long i1 = 0;
        if (sscanf(line.c_str(), "%llx-%llx ", &i0, &i1) == 2) {
            is_there = i0 <= (uintptr_t) pages.data() && (uintptr_t) pages.data() < i1;
        } else if (is_there && line.rfind("VmFlags:", 0) == 0) {
            return (line + " ").find(" nh ") == std::string::npos;
        }
    }

    return false; // not Linux
}

using runs_t = std::vector<std::pair<size_t, size_t>>; // [first, second)

static runs_t runs_of(const llama_kv_set & set) {
    runs_t res;
    set.each_run([&](size_t i0, size_t i1) { res.emplace_back(i0, i1); });
    return res;
}

static runs_t runs_of(const llama_kv_rows & rows, uint32_t s) {
    runs_t res;
    rows.each_run(s, [&](uint32_t i0, uint32_t i1) { res.emplace_back(i0, i1); });
    return res;
}

static void test_set() {
    llama_kv_set a(200);
    check(a.count() == 0,                                              "set: nothing");
    a.add(3, 5);
    a.add(60, 140);
    a.add(199, 300); // partly beyond the end of the set

    check(runs_of(a) == runs_t { { 3, 5 }, { 60, 140 }, { 199, 200 } }, "set: runs");
    check(!a.has(2) && a.has(3) && a.has(4) && !a.has(5),              "set: first run");
    check(!a.has(59) && a.has(60) && a.has(139) && !a.has(140),        "set: a run over words");
    check(a.has(199) && !a.has(200) && a.count() == 2 + 80 + 1,        "set: the end");

    llama_kv_set b(200);
    b.add(64, 128);
    check(runs_of(b) == runs_t { { 64, 128 } },                        "set: a whole word");

    auto c = a;
    c -= b;
    check(runs_of(c) == runs_t { { 3, 5 }, { 60, 64 }, { 128, 140 }, { 199, 200 } }, "set: without");
    c |= b;
    check(c == a,                                                      "set: with it again");
    c &= b;
    check(c == b,                                                      "set: both");
    c -= a;
    check(c.count() == 0 && runs_of(c).empty(),                        "set: without a set that has all of it");

    runs_t gaps;
    a.each_run(4, 70, false, [&](size_t i0, size_t i1) { gaps.emplace_back(i0, i1); });
    check(gaps == runs_t { { 5, 60 } },                                "set: what is not in it, of a range");
}

static void test_rows() {
    llama_kv_rows a(2, 100, 32);
    a.add(0, 5, 6);
    a.add(1, 64, 100);
    check(a.size() == 32 + 36 && a.end() == 100,                       "rows: whole blocks, the last one is smaller");
    check(a.has(0, 31) && !a.has(0, 32) && a.has(1, 99) && !a.has(1, 63), "rows: by stream");
    check(runs_of(a, 1) == runs_t { { 64, 100 } },                     "rows: runs");

    auto b = a.none();
    check(b.size() == 0 && b.end() == 0,                               "rows: none");
    b.set_stream(0, a, 1);
    check(runs_of(b, 0) == runs_of(a, 1) && runs_of(b, 1).empty(),     "rows: a stream of another");
    b.add(3, 3);
    check(runs_of(b, 1).empty(),                                       "rows: an empty range");
    b.add(0, 90, 200);
    check(runs_of(b, 1).empty(),                                       "rows: beyond the end is not the next stream");
    b.add(0, 1);
    check(b.size() == 32 + 36 + 32 && !(b == a),                       "rows: in all streams");
}

static void test_commit() {
    const auto pages = llama_kv_pages_reserve_range(100*SIZE_PAGE - 1);
    check(pages != nullptr && pages->size() == 100*SIZE_PAGE,          "reserve: size");
    check(pages->n_bytes_committed() == 0 && n_resident(*pages) == 0,  "reserve: takes nothing");

    // Memory that is not committed must read as zeros. The read maps pages, so use another range than the one that is checked
    // below.
    const auto other = llama_kv_pages_reserve_range(10*SIZE_PAGE);
    bool zero = true;
    for (size_t i = 0; i < other->size(); ++i) {
        zero = zero && other->data()[i] == 0;
    }
    check(zero, "reserve: reads as zeros");

    auto set = pages->make_set();
    pages->add(set, 10*SIZE_PAGE + 1, SIZE_PAGE); // touches two pages
    pages->add(set, 50*SIZE_PAGE, 20*SIZE_PAGE);
    pages->add(set, 5, 0);                        // touches no page
    check(pages->assign(set),                                          "commit");
    check(pages->n_bytes_committed() == 22*SIZE_PAGE,                  "commit: bytes");
    check(n_resident(*pages) == 22,                                    "commit: resident");

    memset(pages->data() + 10*SIZE_PAGE, 7, 2*SIZE_PAGE);
    memset(pages->data() + 50*SIZE_PAGE, 8, 20*SIZE_PAGE);

    // free pages in the middle, and commit more at the end
    auto next = pages->make_set();
    pages->add(next, 10*SIZE_PAGE, SIZE_PAGE);
    pages->add(next, 50*SIZE_PAGE, 5*SIZE_PAGE);
    pages->add(next, 60*SIZE_PAGE, 40*SIZE_PAGE);
    check(pages->assign(next),                                         "hole");
    check(pages->n_bytes_committed() == 46*SIZE_PAGE,                  "hole: bytes");
    check(n_resident(*pages) == 46,                                    "hole: resident");

    check(pages->data()[10*SIZE_PAGE] == 7 && pages->data()[54*SIZE_PAGE] == 8 && pages->data()[69*SIZE_PAGE] == 8, "hole: the rest is kept");
    check(pages->data()[11*SIZE_PAGE] == 0 && pages->data()[55*SIZE_PAGE] == 0 && pages->data()[70*SIZE_PAGE] == 0, "hole: zeros");

    // in a range that is large enough for huge pages, only the requested pages are resident
    const auto large = llama_kv_pages_reserve_range(size_t(16) << 20);
    auto some = large->make_set();
    large->add(some, 0, size_t(9) << 20);
    check(!has_huge_pages(*large) || !std::filesystem::exists("/sys/kernel/mm/transparent_hugepage"), "large: small pages");
    check(large->assign(some) && n_resident(*large)*SIZE_PAGE == size_t(9) << 20, "large: resident");

    // set bytes to zero across the edges of the committed range
    memset(pages->data() + 60*SIZE_PAGE, 9, 40*SIZE_PAGE);
    const size_t n_before = n_resident(*pages);
    pages->set_zero(59*SIZE_PAGE + 1, SIZE_PAGE);
    check(pages->data()[60*SIZE_PAGE] == 0 && pages->data()[60*SIZE_PAGE + 1] == 9, "zero: the bytes that were named");
    check(n_resident(*pages) == n_before,                              "zero: takes nothing");

    // a write to memory that is not committed does not crash
    pages->data()[30*SIZE_PAGE] = 1;

    check(pages->assign(pages->make_set()),                            "nothing");
    check(pages->n_bytes_committed() == 0,                             "nothing: bytes");

    check(pages->assign(set),                                          "clear: before");
    memset(pages->data(), 1, pages->size());
    pages->clear();
    check(pages->n_bytes_committed() == 22*SIZE_PAGE && n_resident(*pages) == 22, "clear: what is committed stays");
    check(pages->data()[0] == 0 && pages->data()[50*SIZE_PAGE] == 0,   "clear: zeros");

    // fill a buffer with a value, as a program does that detects reads of unwritten memory
    auto buf = llama_kv_pages_reserve_host(8*SIZE_PAGE);
    auto two = buf.pages->make_set();
    buf.pages->add(two, 2*SIZE_PAGE, 2*SIZE_PAGE);
    check(buf.pages->assign(two),                                      "fill: before");
    llama_kv_paged_buffer::show(buf.buf.get(), *buf.pages);
    ggml_backend_buffer_clear(buf.buf.get(), 7);
    check(buf.pages->data()[2*SIZE_PAGE] == 7 && buf.pages->data()[4*SIZE_PAGE - 1] == 7, "fill: what is committed");
    check(n_resident(*buf.pages) == 2,                                 "fill: takes nothing");
    ggml_backend_buffer_clear(buf.buf.get(), 0);
    check(buf.pages->data()[2*SIZE_PAGE] == 0,                         "fill: zeros again");

    auto whole = llama_kv_pages_reserve_host(2*SIZE_PAGE);
    ggml_backend_buffer_clear(whole.buf.get(), 7);
    check(whole.pages->data()[2*SIZE_PAGE - 1] == 7,                   "fill: a buffer that is there as a whole");

    check(llama_kv_pages_reserve_range(0) == nullptr,                       "reserve: nothing");
    check(llama_kv_pages_reserve_range(SIZE_MAX/2) == nullptr,              "reserve: more than there are addresses");
}

// set bytes to zero and free their pages
static void test_vacate() {
    const auto pages = llama_kv_pages_reserve_range(10*SIZE_PAGE);

    auto set = pages->make_set();
    pages->add(set, 0, 10*SIZE_PAGE);
    check(pages->assign(set), "vacate: before");
    memset(pages->data(), 5, 10*SIZE_PAGE);

    const auto is_zero = [&](size_t i0, size_t i1) {
        bool res = pages->data()[i0 - 1] == 5 && pages->data()[i1] == 5;
        for (size_t i = i0; i < i1; ++i) {
            res = res && pages->data()[i] == 0;
        }
        return res;
    };

    pages->vacate(SIZE_PAGE/2, 3*SIZE_PAGE);
    check(pages->n_bytes_committed() == 8*SIZE_PAGE && n_resident(*pages) == 8, "vacate: the pages inside of the bytes are freed");
    check(is_zero(SIZE_PAGE/2, SIZE_PAGE/2 + 3*SIZE_PAGE), "vacate: exactly these bytes are zero");

    pages->vacate(7*SIZE_PAGE + 1, 2);
    pages->vacate(5*SIZE_PAGE + 1, SIZE_PAGE);
    check(is_zero(7*SIZE_PAGE + 1, 7*SIZE_PAGE + 3) && is_zero(5*SIZE_PAGE + 1, 6*SIZE_PAGE + 1), "vacate: within two pages");
    check(pages->n_bytes_committed() == 8*SIZE_PAGE, "vacate: no complete page");

    pages->data()[SIZE_PAGE] = 1; // a write without a commit
    pages->vacate(SIZE_PAGE, 2*SIZE_PAGE); // is_zero() has mapped these pages
    check(n_resident(*pages) == 8 && pages->data()[SIZE_PAGE] == 0, "vacate: a page that was written without a commit");
}

// let every commit of an assign() fail once. Nothing may change
static void test_fail() {
    set_fail("-1");

    int n_commits = 0;

    for (int i_fail = 0; i_fail < 3; ++i_fail) {
        const auto pages = llama_kv_pages_reserve_range(100*SIZE_PAGE);

        auto set = pages->make_set();
        pages->add(set, 0, 10*SIZE_PAGE);
        set_fail("-1");
        check(pages->assign(set), "fail: before");
        n_commits++;
        memset(pages->data(), 3, 10*SIZE_PAGE);

        auto more = pages->make_set();
        pages->add(more, 5*SIZE_PAGE, 10*SIZE_PAGE); // also frees five pages
        pages->add(more, 20*SIZE_PAGE, SIZE_PAGE);
        pages->add(more, 30*SIZE_PAGE, SIZE_PAGE);

        set_fail(std::to_string(n_commits + i_fail + 1).c_str());
        check(!pages->assign(more),                                    "fail: at commit " + std::to_string(i_fail));
        n_commits += i_fail + 1;

        check(pages->n_bytes_committed() == 10*SIZE_PAGE,              "fail: bytes");
        check(n_resident(*pages) == 10,                                "fail: resident");
        check(pages->data()[0] == 3 && pages->data()[10*SIZE_PAGE - 1] == 3, "fail: data");

        set_fail("-1");
        check(pages->assign(more),                                     "fail: later");
        n_commits += 3;
        check(pages->data()[5*SIZE_PAGE] == 3 && pages->data()[0] == 0, "fail: data later");
    }

    set_fail("");
}

#ifdef __linux__
static void write_file(const std::filesystem::path & path, const std::string & text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

static void test_limits() {
    const auto root = std::filesystem::temp_directory_path()/("test-kv-pages-" + std::to_string(std::hash<std::string>()(std::to_string((uintptr_t) &n_failed))));
    std::filesystem::remove_all(root);

    const auto available = [&] { return llama_kv_limits_available(root.string()); };

    check_eq("nothing known", SIZE_MAX, available());

    write_file(root/"proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   50 kB\nSwapTotal: 9 kB\nSwapFree:        7 kB\n");
    check_eq("the machine", 57*1024, available());

    // cgroup v2: the limit of a parent counts, and the page cache can be freed
    write_file(root/"proc/self/cgroup", "0::/a/b\n");
    write_file(root/"sys/fs/cgroup/a/b/memory.max", "max\n");
    write_file(root/"sys/fs/cgroup/a/b/memory.current", "1000\n");
    check_eq("v2: no limit", 57*1024, available());
    write_file(root/"sys/fs/cgroup/a/memory.max", "30000\n");
    write_file(root/"sys/fs/cgroup/a/memory.current", "20000\n");
    write_file(root/"sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 300\nactive_file 400\n");
    check_eq("v2: a parent", 10700, available());
    write_file(root/"sys/fs/cgroup/a/memory.current", "40000\n");
    check_eq("v2: beyond the limit", 0, available());

    // cgroup v1 in a container: the path is the one on the host, and the files are at the mount point
    write_file(root/"proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/123\n");
    write_file(root/"sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
    write_file(root/"sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n");
    write_file(root/"sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_active_file 10\ntotal_inactive_file 20\n");
    check_eq("v1", 1030, available());
    write_file(root/"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    check_eq("v1: no limit", 57*1024, available());

    std::filesystem::remove_all(root);
}

static void test_address_space() {
    rlimit old;
    getrlimit(RLIMIT_AS, &old);

    size_t n_taken = 0; // pages. terabytes under a sanitizer
    std::ifstream("/proc/self/statm") >> n_taken;

    const rlimit low = { rlim_t(n_taken*SIZE_PAGE) + (rlim_t(1) << 32), old.rlim_max };
    setrlimit(RLIMIT_AS, &low);
    check(llama_kv_pages_reserve_range(size_t(1) << 33) == nullptr, "a range beyond RLIMIT_AS");
    check(llama_kv_pages_reserve_range(size_t(1) << 20) != nullptr, "a range within RLIMIT_AS");
    setrlimit(RLIMIT_AS, &old);
}
#endif

int main() {
    ggml_time_init(); // on Windows, the clock that the storage uses must be initialized

    test_set();
    test_rows();
    test_commit();
    test_vacate();
    test_fail();
#ifdef __linux__
    test_limits();
    test_address_space();
#endif

    return report();
}

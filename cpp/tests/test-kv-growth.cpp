// Unit tests of the growth policy of the dynamic KV cache

#include "../src/llama-kv-growth.h"

#include "test-kv.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

// bytes of a cell of Qwen3.5-27B: 16 layers, 4 KV heads of 256, f16
static constexpr size_t SIZE_CELL_QWEN = 2*16*4*256*2;

static void test_start() {
    check_eq("starts at a block and a spare one", 512,  llama_kv_growth { 131072, 1, SIZE_CELL_QWEN }.start());
    check_eq("starts at the maximum if less",     128,  llama_kv_growth { 128,    1, SIZE_CELL_QWEN }.start());
    check_eq("starts at a multiple of the pad",   4096, llama_kv_growth { 131072, 8, SIZE_CELL_QWEN }.start());
    check_eq("no pad is a pad of one",            512,  llama_kv_growth { 131072, 0, SIZE_CELL_QWEN }.start());
    check_eq("an empty cache stays empty",        0,    llama_kv_growth { 0,      1, SIZE_CELL_QWEN }.start());
}

static void test_next() {
    const llama_kv_growth g = { 131072, 1, SIZE_CELL_QWEN };

    check_eq("does not grow when it fits",      512,  g.next(512, 256));
    check_eq("does not shrink",                 512,  g.next(512, 1));
    check_eq("the spare block is not used",     1280, g.next(512, 257));
    check_eq("doubles, and a block",            2816, g.next(1280, 1025));
    check_eq("doubles from 2816",               5888, g.next(2816, 2561));
    check_eq("one growth per batch",            2560, g.next(512, 2049));
    check_eq("doubles up to a step of 1 GiB",   32512, g.next(16384, 16384));
    check_eq("a step of 1 GiB from there",      32512 + 16384, g.next(32512, 32512));
    check_eq("a step of 1 GiB, later",          65792 + 16384, g.next(65792, 65537));
    check_eq("never above the maximum",         131072, g.next(122880, 122881));
    check_eq("a need above the maximum",        131072, g.next(512, 1u << 31));
    check_eq("the last cell",                   131072, g.next(512, 131072));
    check_eq("the maximum has no spare block",  131072, g.next(131072, 131072));

    const llama_kv_growth small_step = { 131072, 1, SIZE_CELL_QWEN, false, size_t(1) << 28 };
    check_eq("a step of 256 MiB",               8448 + 4096, small_step.next(8448, 8449));

    const llama_kv_growth streams = { 131072, 1, 8*SIZE_CELL_QWEN };
    check_eq("an eighth where that is more",    65536 + 8192 - 256, streams.next(65536, 65537));

    const llama_kv_growth fat = { 131072, 1, size_t(1) << 40 };
    check_eq("cells of more than 1 GiB still grow", 1024 + 256, fat.next(1024, 1000));

    const llama_kv_growth thin = { UINT32_MAX, 1, 1 };
    check_eq("no overflow near 2^32", UINT32_MAX, thin.next(UINT32_MAX - 1, UINT32_MAX));

    const llama_kv_growth odd = { 1000, 1, 1 };
    check_eq("a maximum that is no multiple of 256", 1000, odd.next(768, 769));
}

static void test_smallest() {
    const llama_kv_growth g = { 131072, 1, SIZE_CELL_QWEN };

    check_eq("padded to the attention window", 768,    g.smallest(257));
    check_eq("exact",                          768,    g.smallest(512));
    check_eq("capped",                         131072, g.smallest(200000));

    // In a storage of smallest(n_need) cells, a batch must be able to use n_need cells. Unless this size is n_max, it must be
    // larger than n_need rounded up to a multiple of 256.
    for (uint32_t n_need = 1; n_need <= 131072; n_need += 61) {
        const uint32_t n = g.smallest(n_need);
        if (g.usable(n) < n_need || (n < g.n_max && (n_need + 255)/256*256 >= n)) {
            fprintf(stderr, "smallest(%u) = %u\n", n_need, n);
            n_failed++;
            return;
        }
    }
}

// grow from the start until cell 100000 can be used, one token at a time, and check the number of growths and of copied bytes
static void test_total(size_t size_cell, uint32_t n_growth_max, double n_gib_max) {
    const llama_kv_growth g = { 131072, 1, size_cell };

    uint64_t n_copied = 0;
    uint32_t n_growth = 0;

    for (uint32_t n = g.start(); g.usable(n) < 100000; n_growth++) {
        const uint32_t n_used = g.usable(n);
        const uint32_t n_new  = g.next(n, n_used + 1);

        const uint64_t step_max = std::max<uint64_t>({ n/8, (size_t(1) << 30)/size_cell, 256 });

        if (n_new <= n || n_new > g.n_max || n_new % 256 != 0 || n_new - n > (step_max + 255)/256*256) {
            fprintf(stderr, "%zu bytes a cell: bad growth from %u to %u\n", size_cell, n, n_new);
            n_failed++;
            return;
        }

        n_copied += n_used;
        n = n_new;
    }

    const double n_gib = double(n_copied)*size_cell/double(size_t(1) << 30);

    printf("%8zu bytes a cell: %2u growths to 100000 cells, %.1f GiB copied (the cache has %.1f GiB then)\n",
            size_cell, n_growth, n_gib, 100000.0*size_cell/double(size_t(1) << 30));

    check(n_growth <= n_growth_max, std::to_string(size_cell) + " bytes a cell: " + std::to_string(n_growth) + " growths");
    check(n_gib    <= n_gib_max,    std::to_string(size_cell) + " bytes a cell: " + std::to_string(n_gib) + " GiB copied");
}

static void test_next_in_place() {
    const llama_kv_growth g = { 131072, 1, SIZE_CELL_QWEN, true };

    check_eq("in place: small steps at first",        288,  g.next(256, 257));
    check_eq("in place: an eighth of 1024 cells",     1152, g.next(1024, 1025));
    check_eq("in place: 16 MiB at most",              65536 + 256, g.next(65536, 65537));
    check_eq("in place: what the batch needs",        2080, g.next(256, 2049));
    check_eq("in place: never above the maximum",     131072, g.next(131000, 131001));
    check_eq("in place: from nothing",                32,   g.next(0, 1));
    check_eq("in place: starts at 256 cells",         256,  g.start());
    check_eq("in place: starts at the pad",           2048, llama_kv_growth { 131072, 8, SIZE_CELL_QWEN, true }.start());
    check_eq("in place: padded to blocks",            320,  g.smallest(289));

    // from 4096 cells on, never more than 1.4 times the used memory is allocated
    for (uint32_t n_used = 4097, n_cur = 4096; n_used <= 131072; ++n_used) {
        n_cur = g.next(n_cur, n_used);
        if (n_cur < n_used || 10ull*n_cur > 14ull*n_used) {
            fprintf(stderr, "in place: %u cells for %u\n", n_cur, n_used);
            n_failed++;
            break;
        }
    }

    const llama_kv_growth small = { 131072, 1, 1024, true };
    check_eq("in place: an eighth",                   8192 + 1024, small.next(8192, 8193));

    const llama_kv_growth fat = { 131072, 1, size_t(1) << 40, true };
    check_eq("in place: cells of more than 16 MiB still grow", 8192 + 32, fat.next(8192, 8193));
}

static void test_shrink() {
    const llama_kv_growth c = { 131072, 1, SIZE_CELL_QWEN };

    check_eq("all freed: back to the start",              512,   c.shrink(32768, 0, 30000));
    check_eq("all freed: back to the start, if near",     512,   c.shrink(768, 0, 500));
    check_eq("a quarter more than what stays",            1536,  c.shrink(32768, 1000, 30000));
    check_eq("more than half stays",                      32768, c.shrink(32768, 15000, 30000));
    check_eq("a step that was just taken stays",          20480, c.shrink(20480, 4090, 4097));
    check_eq("no larger than it is",                      512,   c.shrink(512, 0, 256));
    check_eq("at the start",                              512,   c.shrink(512, 200, 256));
    check_eq("less than half is freed",                   1024,  c.shrink(1024, 500, 1024));

    const llama_kv_growth p = { 131072, 1, SIZE_CELL_QWEN, true };

    check_eq("in place: all freed",                       256,   p.shrink(32768, 0, 0));
    check_eq("in place: a quarter can go",                24576, p.shrink(32768, 24576, 0));
    check_eq("in place: less than a quarter",             32768, p.shrink(32768, 24577, 0));
    check_eq("in place: the last tokens of a chat",       32768, p.shrink(32768, 32000, 0));
    check_eq("in place: less than 512 cells",             512,   p.shrink(512, 0, 0));
    check_eq("in place: 512 cells",                       256,   p.shrink(768, 0, 0));

    // shrink() must keep at least the first n_keep cells, and at least 256 cells. If it shrinks the storage, it must free at
    // least a quarter of the cells, so that the next growth does not undo the shrink.
    for (const auto & g : { c, p }) {
        for (uint32_t n_cur = 256; n_cur <= 131072; n_cur += 256) {
            for (uint32_t n_keep = 0; n_keep <= n_cur; n_keep += 97) {
                const uint32_t n = g.shrink(n_cur, n_keep, n_cur);
                if (n > n_cur || n < n_keep || n < 256 || (n < n_cur && n > n_cur - n_cur/4)) {
                    fprintf(stderr, "shrink(%u, %u) = %u\n", n_cur, n_keep, n);
                    n_failed++;
                    return;
                }
            }
        }
    }
}

int main() {
    test_next_in_place();
    test_shrink();
    test_start();
    test_next();
    test_smallest();

    // one, eight and 64 streams
    test_total(   SIZE_CELL_QWEN, 12,  20.0);
    test_total( 8*SIZE_CELL_QWEN, 60, 400.0);
    test_total(64*SIZE_CELL_QWEN, 60, 4000.0);

    return report();
}

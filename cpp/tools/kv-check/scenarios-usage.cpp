// Check of the memory of sequences after random operations: llama_memory_seq_usage().

#include "scenarios.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace {

std::vector<llama_seq_usage> usages(const session & c) {
    std::vector<llama_seq_usage> res;
    for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
        res.push_back(llama_memory_seq_usage(c.ctx, (llama_seq_id) seq));
    }
    return res;
}

// end the check with an error if ok is false and the cache is dynamic
// If the static run also failed, kv-check would not report this error. It would report that the model does not support the
// check.
void expect(const side & s, bool ok, uint32_t i, llama_seq_id seq, const std::string & what) {
    if (!ok && s.dynamic) {
        throw check_failed("after operation " + std::to_string(i) + ", sequence " + std::to_string(seq) + ": " + what);
    }
}

void expect_sane(const side & s, uint32_t i, llama_seq_id seq, const llama_seq_cells & cells) {
    expect(s, cells.n_shared <= cells.n_cells, i, seq, "more shared cells than cells");
    expect(s, cells.n_runs <= cells.n_cells && (cells.n_runs > 0) == (cells.n_cells > 0), i, seq, "runs without cells, or cells without runs");
}

void expect_sum(const side & s, const session & c, uint32_t i) {
    size_t sum = 0;
    for (const auto & cur : usages(c)) {
        sum += cur.bytes;
    }
    const size_t used = llama_get_memory_usage(c.ctx).used;

    expect(s, sum == used, i, -1, "they sum to " + std::to_string(sum) + " bytes of " + std::to_string(used));
}

void record(side & s, uint32_t i, const std::vector<llama_seq_usage> & all) {
    for (size_t seq = 0; seq < all.size(); ++seq) {
        const auto & cur = all[seq];

        const std::string name = "usage[" + std::to_string(i) + "][" + std::to_string(seq) + "].";

        s.out.value(name + "bytes",         (int64_t) cur.bytes);
        s.out.value(name + "bytes_window",  (int64_t) cur.bytes_window);
        s.out.value(name + "cells",         cur.cells.n_cells);
        s.out.value(name + "shared",        cur.cells.n_shared);
        s.out.value(name + "runs",          cur.cells.n_runs);
        s.out.value(name + "window.cells",  cur.window.n_cells);
        s.out.value(name + "window.shared", cur.window.n_shared);
        s.out.value(name + "window.runs",   cur.window.n_runs);
    }
}

// return a random number below n. The distributions of the standard library would differ between systems
uint32_t below(std::mt19937 & rng, uint32_t n) {
    return (uint32_t) (rng() % n);
}

// copy all tokens of a sequence. Both sequences then share cells, or the copy has cells of its own
void copy(const side & s, session & c, uint32_t i, llama_seq_id src, llama_seq_id dst) {
    c.rm(dst, -1, -1);
    const size_t used = llama_get_memory_usage(c.ctx).used;
    c.cp(src, dst);
    const bool shares = llama_get_memory_usage(c.ctx).used == used;

    const auto all = usages(c);
    for (const llama_seq_id seq : { src, dst }) {
        const auto & cells = all[seq].cells;
        expect(s, cells.n_shared == (shares ? cells.n_cells : 0), i, seq, "a copy shares " + std::to_string(cells.n_shared) +
                " of " + std::to_string(cells.n_cells) + " cells");
    }
}

void operation(const side & s, session & c, const session_params & sp, std::mt19937 & rng, uint32_t i) {
    const uint32_t what = below(rng, 200);
    const auto     seq  = (llama_seq_id) below(rng, sp.n_seqs);
    const auto     next = (llama_seq_id) ((seq + 1 + below(rng, sp.n_seqs - 1)) % sp.n_seqs);

    if (c.past(seq) > 200) { // some models were trained for 256 positions
        c.rm(seq, -1, -1);
    } else if (what < 90) {
        c.fill_seq(seq, 1 + below(rng, 6), false);
    } else if (what < 110) {
        c.fill(sp.n_seqs, false);
    } else if (what < 140) {
        c.rm(seq, std::max(0, c.past(seq) - 1 - (llama_pos) below(rng, 3)), -1); // not more than a window remembers
    } else if (what < 150) {
        c.rm(seq, -1, -1);
    } else if (what < 198) {
        copy(s, c, i, seq, next);
    } else if (what < 199) {
        c.keep(seq);
    } else {
        c.clear(false);
    }
}

void run(side & s, const session_params & sp) {
    session c(s, sp, std::string("usage.") + (sp.unified ? "unified" : "streams"));

    const uint32_t n = s.params.quick ? 100 : 1000;

    std::mt19937 rng(s.params.seed);

    c.fill(sp.unified ? 320 : 80); // more cells than a stream has at the start

    for (uint32_t i = 0; i < n; ++i) {
        operation(s, c, sp, rng, i);
        expect_sum(s, c, i);

        const auto all = usages(c);
        for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
            expect_sane(s, i, (llama_seq_id) seq, all[seq].cells);
            expect_sane(s, i, (llama_seq_id) seq, all[seq].window);
        }
        if (i % 10 == 0) {
            record(s, i, all);
        }
    }
}

} // namespace

void kv_check_usage(side & s) {
    session_params sp = kv_check_base(s);

    // test a unified cache, and then a cache with one stream per sequence. A quick run tests only the unified cache
    // If the command line has several sequences, test only the kind of cache that it selects.
    const bool any = s.params.n_seqs == 1;

    sp.n_seqs = std::max(sp.n_seqs, 4u);

    for (const bool unified : { true, false }) {
        if (any ? unified || !s.params.quick : unified == s.params.unified) {
            sp.unified = unified;
            run(s, sp);
        }
    }
}

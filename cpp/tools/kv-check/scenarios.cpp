#include "scenarios.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#ifndef _WIN32
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

uint32_t kv_check_n_fill(const kv_check_params & params) {
    const uint32_t n_streams = params.unified ? 1 : params.n_seqs;

    uint32_t res = params.n_fill > 0 ? params.n_fill : params.quick ? 330 : n_streams > 1 ? 560 : 1100;
    if (params.n_ctx > 0 && params.n_fill == 0) {
        res = std::min(res, params.n_ctx/n_streams > 600 ? params.n_ctx/n_streams - 250 : 350); // leaves room, because some checks add cells
    }
    return res;
}

uint32_t kv_check_n_cells(const kv_check_params & params) {
    const uint32_t n_streams = params.unified ? 1 : params.n_seqs;
    if (params.n_ctx > 0) {
        return params.n_ctx/n_streams;
    }
    return 256*((kv_check_n_fill(params) + 255)/256 + 3); // leaves room for tokens that some checks decode after the fill
}

// return the number of cells to fill for a check that needs n cells
// The result can be smaller than n in a quick run, and for a recurrent model, which has no cells.
static uint32_t at_most(const side & s, uint32_t n) {
    return std::min(n, s.is_recurrent ? 330 : kv_check_n_fill(s.params));
}

// return at_most() minus n_added, the number of tokens that the check adds later. The result is at least 10, even with a small
// --fill
static uint32_t at_most_but(const side & s, uint32_t n, uint32_t n_added) {
    return std::max(at_most(s, n), n_added + 10) - n_added;
}

// return the numbers of cells at which a cache must grow, if it starts with 256 cells and doubles
static std::vector<uint32_t> boundaries(const side & s) {
    std::vector<uint32_t> res;
    for (uint32_t b = 256; b + 8 <= at_most(s, UINT32_MAX); b *= 2) {
        res.push_back(b);
    }
    return res;
}

session_params kv_check_base(const side & s) {
    session_params res;
    res.dynamic = s.dynamic;
    res.unified = s.params.unified;
    res.n_seqs  = s.params.n_seqs;
    res.n_cells = kv_check_n_cells(s.params);
    res.types   = { s.params.type_k, s.params.type_v };
    return res;
}

static state_shape shape_of(const side & s, const session_params & sp) {
    state_shape res;
    res.arch   = s.arch;
    res.hybrid = s.is_hybrid;
    res.seqs   = sp.n_seqs;
    res.cells  = llama_model_n_swa(s.model) > 0 ? UINT32_MAX : sp.n_cells; // a window can have more cells than the context, because of its batch
    return res;
}

state_parts kv_check_state_of(const side & s, const session_params & sp, session & c) {
    return state_parse(shape_of(s, sp), c.state_get());
}

static session_params base(const side & s) {
    return kv_check_base(s);
}

// return parameters with at least n sequences
// unified: true means: the sequences share one stream. If the command line has several sequences, its choice replaces `unified`
static session_params multi(const side & s, uint32_t n, bool unified) {
    session_params res = base(s);
    res.n_seqs = std::max(res.n_seqs, n);
    if (s.params.n_seqs == 1) {
        res.unified = unified;
    }
    return res;
}

// return whether to test a unified cache, streams, or both, depending on the command line
static std::vector<bool> stream_kinds(const side & s) {
    if (s.params.n_seqs == 1 && !s.params.quick) {
        return { true, false };
    }
    if (s.params.n_seqs == 1) {
        return { true };
    }
    return { s.params.unified };
}

static const char * kind_name(bool unified) {
    return unified ? "unified" : "streams";
}

//
// decoding
//

static void check_prompt(side & s) {
    const auto     bounds = boundaries(s);
    const uint32_t n_fill = at_most(s, UINT32_MAX);

    // decode batches that end one before, exactly at, and one after each boundary
    for (int delta = -1; delta <= 1; ++delta) {
        if (delta == 1 && s.params.quick) {
            continue;
        }
        session c(s, base(s), "split" + std::to_string(delta));
        uint32_t at = 0;
        for (uint32_t b : bounds) {
            c.fill(b + delta - at);
            at = b + delta;
            while (at < b + 2) {
                c.fill(1);
                at++;
            }
        }
        c.fill(n_fill - at);
    }

    // decode all tokens in one batch. One growth must provide all cells of the batch
    session c(s, base(s), "whole");
    c.fill(n_fill);
    c.generate(2);

    session d(s, base(s), "counted");
    d.fill_unread(n_fill);
    d.record_counted();
}

// decode batches whose results are not read before the next batch. So the device may still compute when the cache grows
static void check_unread(side & s) {
    session c(s, base(s), "unread");
    for (uint32_t n = 0; n < at_most_but(s, UINT32_MAX, 80); n += 60) {
        c.fill_unread(60);
    }
    for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
        c.rm((llama_seq_id) seq, 20, -1);
    }
    c.fill_unread(40);
    c.generate(2);
}

static void check_generate(side & s) {
    session c(s, base(s), "gen");
    uint32_t at = 0;
    for (uint32_t b : boundaries(s)) {
        c.fill(b - 6 - at);
        c.generate(13);
        at = b + 7;
    }
}

static void check_tail(side & s) {
    session_params sp = base(s);
    sp.n_rs_seq = s.is_recurrent || s.is_hybrid ? s.params.n_rs_seq : 0;

    session c(s, sp, "tail");
    const uint32_t n = at_most_but(s, 540, 20);

    const auto remove = [&](llama_seq_id seq, llama_pos n_rm) {
        return c.past(seq) > n_rm && c.rm(seq, c.past(seq) - n_rm, -1);
    };

    for (uint32_t round = 0; round < 2; ++round) {
        c.fill(round == 0 ? n : n/2);
        c.generate(4);
        for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
            // recurrent layers can roll back only a few tokens, or none
            const llama_pos half = c.past((llama_seq_id) seq)/2;
            if (!remove((llama_seq_id) seq, half) && !remove((llama_seq_id) seq, 2)) {
                c.rm((llama_seq_id) seq, -1, -1);
            }
        }
        c.salt(1 + round); // other tokens than before
        c.generate(3);
    }
}

//
// sequences
//

static void check_copy(side & s) {
    for (bool unified : stream_kinds(s)) {
        const session_params sp = multi(s, 2, unified);
        const llama_seq_id   a  = 0;
        const llama_seq_id   b  = (llama_seq_id) sp.n_seqs - 1;

        // a model that supports only 256 positions needs several sequences to fill the cache
        const bool few = s.params.fallback;

        // copy while the cache is small, and grow in the next decode, when the copy may still be pending
        {
            session c(s, sp, std::string("early.") + kind_name(unified));
            c.fill_seq(a, 100);
            c.rm(b, -1, -1);
            c.cp(a, b);
            c.fill_seq(b, few ? 110 : 170);
            c.fill_seq(a, 20);
            c.fill(few ? 40 : 20);
        }
        // copy after a growth, and continue both sequences
        // A sliding window cannot drop cells that two sequences share. So some calls of llama_decode() here find too few free
        // cells, both with the static and with the dynamic cache.
        {
            session c(s, sp, std::string("late.") + kind_name(unified));
            c.fill_seq(a, few ? 100 : 150);
            c.fill(at_most_but(s, 350, 150));
            c.rm(b, -1, -1);
            c.cp(a, b);
            c.generate(4);
            c.fill(few ? 120 : 200, false);
            c.fill(10, false);
            c.rm(a, -1, -1);
            c.fill_seq(b, 15, false);
            if (sp.unified && !s.is_recurrent && !s.is_hybrid) {
                // copy a part of a sequence, which is only possible within a stream
                c.cp(b, a, 0, 40);
                c.fill_seq(a, 5, false);
                c.fill_seq(b, 5, false);
            }
        }
    }
}

#ifndef _WIN32
// return true if f returns. f runs in a child process, because a failed assertion of upstream ends the process. f must not
// compute anything there, because devices do not survive a fork()
template <typename F>
static bool survives(F && f) {
    fflush(nullptr);

    const pid_t pid = fork();
    if (pid < 0) {
        throw check_failed("fork() failed");
    }
    if (pid == 0) {
        ggml_set_abort_callback([](const char *) {});
        setenv("GGML_NO_BACKTRACE", "1", 1);
        signal(SIGABRT, SIG_DFL);
        f();
        _exit(0);
    }

    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
#endif

// check the copy of a part of a stream. Upstream supports only copies of whole streams, and a failed assertion ends the process
// otherwise. Which ranges count as the whole stream must not depend on the current size of a dynamic stream
#ifdef _WIN32
[[noreturn]] static void check_copy_part(side &) {
    throw check_skipped("needs fork()");
}
#else
static void check_copy_part(side & s) {
    const session_params sp = multi(s, 2, false);
    if (sp.unified) {
        throw check_skipped("one stream");
    }

    session c(s, sp, "part");
    c.fill_seq(0, 100);

    const auto mem = llama_get_memory(c.ctx);

    for (const llama_pos p1 : { 50, 300, (int) sp.n_cells - 2, (int) sp.n_cells }) {
        s.out.value("copy to " + std::to_string(p1), survives([&] { llama_memory_seq_cp(mem, 0, 1, -1, p1); }));
    }
    for (const llama_pos p0 : { 50, 300, (int) sp.n_cells - 2 }) {
        s.out.value("copy from " + std::to_string(p0), survives([&] { llama_memory_seq_cp(mem, 0, 1, p0, -1); }));
    }
}
#endif

static void check_keep(side & s) {
    for (bool unified : stream_kinds(s)) {
        session c(s, multi(s, 2, unified), std::string("keep.") + kind_name(unified));
        c.fill(320);
        c.keep(1);
        c.fill_seq(1, 130);
        c.generate(3);
    }
}

// check streams of different lengths. A batch reads all of its streams up to the end of the longest one
static void check_uneven(side & s) {
    for (bool unified : stream_kinds(s)) {
        session c(s, multi(s, 3, unified), std::string("uneven.") + kind_name(unified));

        const uint32_t n = unified ? 320/c.n_seqs() : 320; // cells of a stream, as in other checks

        c.fill_seq(0, n);

        // a copy to another stream waits for the next batch. A state that is read before that must contain the copy
        c.cp(0, 1);
        c.state_seq_get(1);
        c.generate(2);
        c.rm(1, -1, -1);
        c.generate(2);
        c.rm(0, 10, -1);
        c.fill_seq(2, n/2);
        c.generate(2);
        c.fill_seq(1, n/3);
        c.generate(2);
    }
}

static void check_fragmented(side & s) {
    session c(s, multi(s, 3, true), "frag");
    for (uint32_t i = 0; i < 12; ++i) {
        c.fill(i < 6 ? 31 : 30);
    }
    const auto data = c.state_seq_get(1);
    c.rm(1, -1, -1);
    c.fill_seq(0, 60);  // into the holes
    c.fill_seq(2, 140); // after the holes
    if (c.state_seq_set(1, data) != 0) {
        c.generate(6);
        c.fill(60);
    }
}

static void check_clear(side & s) {
    session c(s, base(s), "clear");

    const size_t n_start = llama_get_memory_usage(c.ctx).committed;

    c.fill(at_most_but(s, 530, 10));
    for (bool data : { false, true }) {
        c.clear(data);

        // a cache that grows in place must free the memory of the cleared cells
        const llama_memory_usage usage = llama_get_memory_usage(c.ctx);
        if (data && usage.n_grow > 0 && usage.n_bytes_copied == 0 && usage.committed > n_start) {
            throw check_failed(std::to_string(usage.committed - n_start) + " bytes stay committed after a clear");
        }

        c.salt(data ? 2 : 1);
        c.fill(100);
        c.generate(3);
        c.fill(at_most_but(s, 530, 110));
        c.generate(3);
    }
}

// free cells in the middle and at the end, and use them again
static void check_shrink(side & s) {
    // use enough cells for a shrink, even in a quick run. If the model supports only 256 positions, there are four short sequences
    const uint32_t n = s.is_recurrent ? 330 : s.params.fallback ? 560 : 900;

    for (bool unified : stream_kinds(s)) {
        session_params sp = multi(s, 3, unified);
        sp.n_cells = std::max(sp.n_cells, 1280u);

        session c(s, sp, std::string("shrink.") + kind_name(unified));
        const llama_seq_id last = (llama_seq_id) sp.n_seqs - 1;

        // fill one sequence after the other, so that each has adjacent cells
        c.fill(n);

        // free a run of cells in the middle, or a stream
        c.rm(1, -1, -1);
        c.generate(3);

        // free the last cells
        c.rm(last, -1, -1);
        c.generate(3);

        // copy a stream, and free its cells before the copy is made
        c.cp(0, last);
        c.rm(0, -1, -1);
        c.generate(2);

        // use the freed cells again, and more cells after them
        c.salt(1);
        c.fill(n/4);
        c.generate(3);

        // shift positions while there are holes
        if (!s.is_recurrent && c.can_shift("holes")) {
            c.rm(1, -1, -1);
            c.shift(4, 40);
            c.generate(2);
        }

        // free all sequences except one, and then all
        c.keep(last);
        c.generate(2);
        c.clear(false);
        c.salt(2);
        c.fill(n/2);
        c.generate(3);
        for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
            c.rm((llama_seq_id) seq, -1, -1);
        }
        c.fill(n);
        c.generate(2);
        // The state is not compared, because it contains rows that the model never writes or reads (the indexer of MSA in a
        // unified cache). In a static cache, the shift changes their 0 to -0. In a dynamic cache, rows that were freed and used
        // again are 0.
    }
}

// test growth by copy: grow until all rows exist, free some rows, and grow again to fewer rows than the maximum
// If a model has two caches, a graph can take the number of existing rows from either cache. So both caches must have the same
// number of existing rows, even if different numbers of these rows are in use.
static void check_shrink_full(side & s) {
    session_params sp = multi(s, 2, true);
    sp.n_cells = 5632;

    session c(s, sp, "shrink-full");
    for (const uint32_t n : { 200, 200, 600, 500 }) { // 512 to 2816 rows
        c.fill_seq(0, n);
    }
    c.fill_seq(1, 1100); // all rows exist
    c.fill_seq(1, 1000);
    c.rm(1, -1, -1);
    c.fill_seq(0, 1100);
    c.generate(2);
}

//
// shifts
//

static void check_shift(side & s) {
    session_params sp = base(s);

    // the result of can_shift() must not depend on the size of the cache
    session c(s, sp, "grown");
    const bool ok = c.can_shift("at creation");
    c.fill(100);
    c.can_shift("small");
    c.fill(at_most_but(s, 400, 100));
    c.can_shift("grown");
    if (!ok) {
        throw check_skipped("the static cache cannot be shifted");
    }
    const uint32_t n_each = at_most(s, 400)/(sp.unified ? sp.n_seqs : 1);

    c.shift(4, n_each/2);
    c.generate(3);
    c.fill(at_most(s, 400)/2);
    c.shift(0, n_each/4);
    c.fill(100);

    // a shift is still pending when the batch needs a growth
    session d(s, sp, "pending");
    d.fill(250);
    d.shift(2, 8);
    d.fill(100);
    d.generate(2);

    if (s.params.quick) {
        return;
    }

    // fill the cache, shift, and fill again, as in a generation without end
    sp.n_cells = std::min<uint32_t>(sp.n_cells, 512);
    session e(s, sp, "endless");
    e.fill(sp.n_cells - 4);
    for (uint32_t i = 0; i < 2; ++i) {
        e.generate(4);
        e.shift(4, n_each/4);
    }
    e.generate(3);
}

static void check_div(side & s) {
    session c(s, base(s), "div");
    c.fill(240);
    if (!c.can_shift("small")) {
        throw check_skipped("the static cache cannot be shifted");
    }
    for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
        const llama_pos n = c.past((llama_seq_id) seq);
        c.div((llama_seq_id) seq, n/2, n, 2);
    }
    c.fill(60);
    c.generate(3);
}

//
// state
//

static void state_roundtrip(side & s, bool from_dynamic, bool into_dynamic) {
    for (bool unified : stream_kinds(s)) {
        session_params from = base(s);
        if (s.params.n_seqs == 1 && !unified) {
            from = multi(s, 2, false);
        }
        from.dynamic = from_dynamic;

        session_params into = from;
        into.dynamic = into_dynamic;

        const std::string kind = kind_name(from.unified || from.n_seqs == 1);

        const uint32_t n_big   = at_most_but(s, 560, 50);
        const uint32_t n_small = std::min(100u, n_big/2);

        session a(s, from, "a." + kind);
        a.fill(n_small);
        const auto small = a.state_get();
        if (from.n_streams() > 1) {
            // sequences of different lengths: the first stream fits without a growth, the second stream must grow
            a.fill_seq(1, n_big - n_small);
        } else {
            a.fill(n_big - n_small);
        }
        const auto big = a.state_get();
        s.out.blob("a." + kind + ".small", small);
        s.out.blob("a." + kind + ".big",   big);

        // restore into a new context, and continue in both contexts
        session b(s, into, "b." + kind);
        if (b.state_set(big) == 0) {
            throw check_failed("llama_state_set_data() returned 0: " + s.last_error);
        }
        a.generate(3);
        b.generate(3);
        a.fill(40);
        b.fill(40);
        b.record_state();

        // restore into a context that has computed before. Its old graph must not be reused
        session c(s, into, "c." + kind);
        c.generate(3);
        c.state_set(small);
        c.generate(3);
        c.state_set(big);
        c.generate(3);
        c.state_set(small);
        c.generate(3);
        c.record_state();

        // Restore a large and then a small state. The storage by copy gets new buffers between the two calls of generate(), but
        // the graphs of these calls have the same size. The old graph must not be reused.
        session d(s, into, "d." + kind);
        d.generate(3);
        d.state_set(big);
        d.state_set(small);
        d.generate(3);
    }
}

static void check_state_self        (side & s) { state_roundtrip(s, s.dynamic, s.dynamic); }
static void check_state_into_dynamic(side & s) { state_roundtrip(s, false,     s.dynamic); }
static void check_state_into_static (side & s) { state_roundtrip(s, s.dynamic, false);     }

static void check_state_seq(side & s) {
    for (bool unified : stream_kinds(s)) {
        const session_params sp   = multi(s, 2, unified);
        const std::string    kind = kind_name(sp.unified);
        const llama_seq_id   last = (llama_seq_id) sp.n_seqs - 1;

        session a(s, sp, "a." + kind);
        a.fill_seq(0, 180);
        a.fill(sp.unified ? 40 : 20);
        const auto data = a.state_seq_get(0);
        s.out.blob("a." + kind + ".seq", data);

        // restore into another sequence of the same context, which may need a growth
        a.state_seq_set(last, data);
        a.generate(4);
        a.fill(100);

        // restore into a new context, and then restore the large state into a context that has computed before
        const auto large = a.state_seq_get(last);
        s.out.blob("a." + kind + ".large", large);
        session b(s, sp, "b." + kind);
        b.generate(2);
        b.state_seq_set(last, large);
        b.generate(3);
        b.state_seq_set(0, data);
        b.generate(3);
        b.fill(60);

        // copy a stream, and free the source cells while the copy is pending. Then restore a state that makes the cache grow
        if (!s.params.fallback) {
            session c(s, multi(s, 3, unified), "c." + kind);
            c.fill_seq(0, 200);
            c.cp(0, 1);
            c.rm(0, -1, -1);
            c.state_seq_set(2, large);
            c.generate(3);
        }
    }
}

static void check_state_file(side & s) {
    session a(s, base(s), "a");
    a.fill(at_most_but(s, 560, 150));

    const std::string path = trace_temp_path("state");
    session b(s, base(s), "b");
    const bool saved  = a.file_save(path);
    const bool loaded = saved && b.file_load(path);
    remove(path.c_str());
    if (!loaded) {
        throw check_failed("the state file could not be " + std::string(saved ? "loaded: " : "saved: ") + s.last_error);
    }
    a.generate(2);
    b.generate(2);
    b.fill(120);
}

// check that a context refuses a state with more cells than its maximum, as a static cache with the same maximum does
static void check_state_refuse(side & s) {
    session_params large = base(s);
    large.n_cells = 768;
    session_params small = large;
    small.n_cells = 512;

    session a(s, large, "large");
    a.fill(600);
    const auto data = a.state_get();
    const auto seq  = a.state_seq_get(0);

    session b(s, small, "small");
    b.fill(100);
    b.state_set(data);
    b.fill(50);
    b.generate(2);

    session c(s, small, "seq");
    c.fill(100);
    c.state_seq_set(0, seq);
    c.fill(50);
    c.generate(2);
}

static void check_state_device(side & s) {
    if (ggml_is_quantized(s.params.type_k) || ggml_is_quantized(s.params.type_v)) {
        throw check_skipped("a static cache saves quantized rows incompletely, and a dynamic cache refuses");
    }

    session c(s, base(s), "device");
    c.fill(200);
    const auto data = c.state_seq_get(0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    c.fill(150); // this grows the cache. saved pointers must not refer to freed memory
    c.state_seq_set(0, data, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    c.generate(4);
    c.fill(100);

    // save the same rows again after they have moved
    session d(s, base(s), "again");
    d.fill(200);
    d.state_seq_get(0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
    const auto before = d.positions();
    d.fill(150);
    if (d.rm(0, before[0], -1)) {
        const auto again = d.state_seq_get(0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        d.salt(1);
        d.fill_seq(0, 30);
        d.state_seq_set(0, again, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        d.generate(4);
    }
}

//
// limits
//

static void check_full(side & s) {
    session_params sp = base(s);
    sp.n_cells = 1024;

    session c(s, sp, "full");
    c.fill(1012);
    c.fill(40, false);
    c.fill(12, false);
    c.fill(1, false);
    for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
        const llama_pos n = c.past((llama_seq_id) seq);
        if (!c.rm((llama_seq_id) seq, n - 10, -1)) {
            c.rm((llama_seq_id) seq, -1, -1);
        }
    }
    c.fill(5, false);
    c.fill(1024, false); // fills the whole context
    c.fill(3, false);
}

// the checks of the layers that are linked
static std::vector<kv_check_scenario> & table() {
    static std::vector<kv_check_scenario> res = {
        { "prompt",             check_prompt,             "prompt" },
        { "generate",           check_generate,           "generate" },
        { "unread",             check_unread,             "unread" },
        { "tail",               check_tail,               "tail" },
        { "copy",               check_copy,               "copy" },
        { "copy-part",          check_copy_part,          "copy-part" },
        { "shift",              check_shift,              "shift" },
        { "state-self",         check_state_self,         "state-self" },
        { "state-into-dynamic", check_state_into_dynamic, "state-self" },
        { "state-into-static",  check_state_into_static,  "state-self" },
        { "state-seq",          check_state_seq,          "state-seq" },
        { "clear",              check_clear,              "clear" },
        { "keep",               check_keep,               "keep" },
        { "uneven",             check_uneven,             "uneven" },
        { "shrink",             check_shrink,             "shrink" },
        { "shrink-full",        check_shrink_full,        "shrink-full", false },
        { "full",               check_full,               "full" },
        { "fragmented",         check_fragmented,         "fragmented" },
        { "state-refuse",       check_state_refuse,       "state-refuse" },
        { "state-file",         check_state_file,         "state-file" },
        { "state-device",       check_state_device,       "state-device" },
        { "div",                check_div,                "div" },
        { "draft",              kv_check_draft,           "draft" },
        { "no-memory",          kv_check_no_memory,       "no-memory" },
        { "pages",              kv_check_pages,           "pages" },
        { "rows",               kv_check_rows,            "rows" },
        { "train",              kv_check_train,           "train" },
        { "usage",              kv_check_usage,           "usage" },
    };
    return res;
}

kv_check_registration::kv_check_registration(std::initializer_list<kv_check_scenario> scenarios) {
    table().insert(table().end(), scenarios.begin(), scenarios.end());
}

const std::vector<kv_check_scenario> & kv_check_scenarios() {
    return table();
}

bool kv_check_is_retype(const std::string & name) {
    return name.find("retype-") == 0;
}

bool kv_check_is_default(const std::string & name) {
    return kv_check_find_scenario(name)->is_default;
}

const kv_check_scenario * kv_check_find_scenario(const std::string & name) {
    for (const auto & def : kv_check_scenarios()) {
        if (name == def.name) {
            return &def;
        }
    }
    return nullptr;
}

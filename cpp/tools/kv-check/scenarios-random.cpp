// Random operations on two contexts: one with a random limit of memory, and a static context.
//
// Both contexts are in one process and perform each step together. If the first context refuses a step for lack of memory, the
// static context skips the step. After each step, logits, positions and saved states are compared bit for bit. The sequences are
// short enough that a static cache is never full.
//
// The limit is a random number of pages, and it changes. It is the limit of a budget, the memory of a fake device
// (`--fake-device`), or the memory of the system. To limit the memory of the system, the check lets allocations fail.

#include "resident.h"
#include "scenarios-types.h"
#include "short-of-memory.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

// return a random number below n. The distributions of the standard library would differ between systems
uint32_t below(std::mt19937 & rng, uint32_t n) {
    return (uint32_t) (rng() % n);
}

std::string str(int64_t n) {
    return std::to_string(n);
}

size_t size_page(const kv_check_params & params) {
    return params.fake_devices.empty() || params.fake_devices[0].page_kib == 0 ? 4096 : (size_t) params.fake_devices[0].page_kib << 10;
}

// return the free bytes of all fake devices
size_t n_free_on_devices(const kv_check_params & params) {
    size_t res = 0;
    for (size_t i = 0; i < params.fake_devices.size(); ++i) {
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_dev_memory(ggml_backend_dev_by_name(("FAKE" + str(i)).c_str()), &free, &total);
        res += free;
    }
    return res;
}

//
// the limit of memory
//

class memory_end {
  public:
    enum kind { BUDGET, DEVICE, SYSTEM };

    memory_end(const side & s, kind what) : what(what), failing(s.params), own(llama_memory_budget_init(n_budget, nullptr, 0), llama_memory_budget_free) {
        failing.fail      = "1+";
        failing.limit_mib = 0;
        if (what == DEVICE) {
            dev = ggml_backend_dev_by_name("FAKE0");
        }
    }

    static const char * name(kind what) {
        return what == BUDGET ? "budget" : what == DEVICE ? "device" : "system";
    }

    // return the budget for a context with the limit. null: the limit is not a budget
    llama_memory_budget * budget() const { return what == BUDGET ? own.get() : nullptr; }

    // set the limit to the memory that is in use now, plus n_bytes
    // To limit the memory of the system (SYSTEM), let all allocations fail instead.
    // n_bytes_cells: bytes of the context's cells now
    void set(size_t n_bytes, size_t n_bytes_cells) {
        clear();
        n_bytes_cells_then = n_bytes_cells;
        if (what == BUDGET) {
            llama_memory_budget_set_other(own.get(), n_budget - llama_memory_budget_get_usage(own.get()).committed - n_bytes, nullptr);
        }
        if (what == DEVICE) {
            others.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), n_free() - n_bytes));
        }
        is_near = true;
    }

    // remove the limit
    void clear() {
        if (what == BUDGET) {
            llama_memory_budget_set_other(own.get(), 0, nullptr);
        }
        others.reset();
        is_near = false;
    }

    // return true if a request may be refused for lack of memory
    bool may_refuse() const { return is_near; }

    // return the result of f(), which runs with the limit
    template <typename F>
    auto reach(F && f) const {
        const short_of_memory scope(failing, what == SYSTEM && is_near);
        return f();
    }

    // return the result of f(), which runs without the limit
    // n_outside: is reduced by the device memory that f() allocates, or increased by the memory that f() frees
    template <typename F>
    auto away(const kv_check_params & params, size_t & n_outside, F && f) {
        const size_t n_left = others ? n_free() : 0;
        const bool   is_set = others != nullptr;
        others.reset();

        const size_t n_before = n_free_on_devices(params);
        const auto   res      = f();
        n_outside += n_free_on_devices(params) - n_before;

        if (is_set) {
            others.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(dev), n_free() - n_left));
        }
        return res;
    }

    // return true if a context with cells of this size exceeds the limit
    // The result is false if only the compute buffers have grown, because buffers for existing cells are always allowed.
    bool is_passed(size_t n_bytes_cells) const {
        const auto usage = llama_memory_budget_get_usage(own.get());
        return usage.committed > usage.n_bytes && n_bytes_cells > n_bytes_cells_then;
    }

    // return the bytes of the device that set() has allocated, so that only the memory below the limit is left
    size_t n_others() const { return others ? ggml_backend_buffer_get_size(others.get()) : 0; }

  private:
    static constexpr size_t n_budget = SIZE_MAX/2;

    size_t n_free() const {
        size_t res   = 0;
        size_t total = 0;
        ggml_backend_dev_memory(dev, &res, &total);
        return res;
    }

    const kind      what;
    kv_check_params failing;
    bool            is_near = false;
    size_t          n_bytes_cells_then = 0;

    std::unique_ptr<llama_memory_budget, decltype(&llama_memory_budget_free)> own;

    ggml_backend_dev_t      dev = nullptr;
    ggml_backend_buffer_ptr others;
};

//
// a walk
//

class walk {
  public:
    walk(const side & s, side & nowhere, const session_params & sp, memory_end::kind what, uint32_t seed);

    // run n operations
    void run(uint32_t n);

    uint32_t n_refused() const { return refused; }

  private:
    using seqs = std::vector<llama_seq_id>;

    struct saved_state {
        llama_seq_id         seq; // -1: all sequences
        std::vector<uint8_t> of_is;
        std::vector<uint8_t> of_twin;
    };

    // call f for both contexts. the results must be equal
    void both(const std::function<int64_t(session &)> & f);

    // describe the current operation, for the reason of a failure and the log
    void say(const std::string & what);

    void expect(bool ok, const std::string & what) const;
    void expect_same_positions() const;
    void expect_same_states();
    void expect_accounted() const;
    void expect_no_more_than(const llama_memory_usage & before) const;
    void expect_given_back(uint32_t n_shrink_before) const;

    void step();
    void move_end();
    void decode(const seqs & order);
    void remove_all(llama_seq_id seq);
    void remove(llama_seq_id seq);
    void copy(llama_seq_id src, llama_seq_id dst);
    void keep(llama_seq_id seq);
    void clear(bool data);
    void shift(llama_seq_id seq);
    void retype();
    void set_types(const cell_types & types);
    void save(llama_seq_id seq);
    void restore_any(llama_seq_id seq);
    void restore(const saved_state & from, llama_seq_id seq);

    seqs some_tokens();

    llama_memory_usage usage() const { return llama_get_memory_usage(is.ctx); }

    const side &         s;
    const session_params sp;

    std::mt19937 rng;
    memory_end   end;

    session is;   // the context with the limit
    session twin; // a static context with enough memory

    llama_memory_usage start;
    size_t             n_outside; // bytes of the devices that are free or used by cells of `is`

    bool in_place;
    // the types of both contexts have changed. After that, the cells of `twin` are in pages of host memory, and a K-shift can
    // enlarge the compute buffers
    bool has_retyped = false;
    // DSV4: a saved state contains every row that exists, also rows that are not used. `twin` has more rows than `is`, so the
    // sizes of their states differ
    bool saves_all;
    // the model is an MSA. The V of one of its caches is never written and remains zero, and the bytes of a zero depend on the
    // type. Batches of this model may need larger compute buffers than were reserved for the worst case
    bool is_msa;
    // a copy or a shift is pending until the next batch. If `is` refuses that batch, `is` may still make the copy or shift.
    // `twin` skips the batch, and does not make the copy or shift
    bool is_waiting = false;

    std::vector<saved_state> saved;

    std::string at;
    uint32_t    refused = 0;
};

session_params beside(session_params sp, llama_memory_budget * budget, bool dynamic) {
    sp.dynamic = dynamic;
    kv_check_set_budget(sp, dynamic ? budget : nullptr);
    return sp;
}

walk::walk(const side & s, side & nowhere, const session_params & sp, memory_end::kind what, uint32_t seed) :
    s(s), sp(sp), rng(seed), end(s, what),
    is(nowhere, beside(sp, end.budget(), s.dynamic), "is"), twin(nowhere, beside(sp, nullptr, false), "twin") {
    start     = usage();
    saves_all = s.arch == "deepseek4";
    is_msa    = s.arch == "minimax-m3";
    in_place  = is.is_in_place();
    n_outside = n_free_on_devices(s.params) + start.committed;
}

void walk::run(uint32_t n) {
    // begin with a long sequence, because restoring and copying it fills the cache faster than batches do
    at = "the start";
    decode(std::vector<llama_seq_id>(sp.unified ? 150 : 350, 0));
    save(0);

    move_end();
    for (uint32_t i = 0; i < n; ++i) {
        is.salt(i);
        twin.salt(i);
        at = "operation " + str(i);
        step();
        expect_same_positions();
        expect_accounted();
    }

    // requests that were refused succeed when there is enough memory
    at = "the end";
    end.clear();
    decode({ 0 });
    expect_same_states();
    save(-1);
    clear(true);
    restore(saved.back(), -1);
    decode({ 0 });
    expect_same_states();

    // fill the cache, and then remove all sequences except one
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        restore(saved.front(), (llama_seq_id) seq);
    }
    // The graph of a K-shift over quantized cells needs more memory than the graph of a batch. If there is no memory for it, a
    // static cache continues without the shift.
    set_types({ GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 });
    shift(1);
    if (s.dynamic) {
        end.set(0, usage().committed);
    }
    decode({ 1 });
    const auto late = is_waiting ? is.try_state_get(1) : std::vector<uint8_t>();
    end.clear();
    if (!late.empty()) { // either the sequence has no late copy, or its state contains the shift
        is.rm(1, -1, -1);
        is.state_seq_set(1, late);
    }
    decode({ 1 });
    expect_same_states();

    const uint32_t n_shrink = usage().n_shrink;
    keep(0);
    expect_given_back(n_shrink);
    expect_same_states();

    const int64_t n_resident = resident_bytes_of_pages();
    const size_t  n_taken    = usage().committed + (has_retyped ? llama_get_memory_usage(twin.ctx).committed : 0);
    expect(n_resident <= (int64_t) n_taken, str(n_resident) + " bytes are resident of " + str(n_taken));
}

//
// conditions
//

void walk::say(const std::string & what) {
    at += ", " + what;
    if (s.params.verbose) {
        fprintf(stderr, "%s\n", at.c_str());
    }
}

void walk::expect(bool ok, const std::string & what) const {
    if (!ok) {
        throw check_failed(at + ": " + what);
    }
}

void walk::both(const std::function<int64_t(session &)> & f) {
    const int64_t a = f(is);
    const int64_t b = f(twin);
    expect(a == b, "returns " + str(a) + " instead of " + str(b));
}

void walk::expect_same_positions() const {
    for (uint32_t i = 0; i < sp.n_seqs; ++i) {
        const auto range = [&](const session & c) {
            const auto mem = llama_get_memory(c.ctx);
            return std::make_pair(llama_memory_seq_pos_min(mem, (llama_seq_id) i), llama_memory_seq_pos_max(mem, (llama_seq_id) i));
        };
        expect(range(is) == range(twin), "sequence " + str(i) + " has other positions");
    }
}

void walk::expect_same_states() {
    if (is_waiting || saves_all || (is_msa && has_retyped)) {
        return;
    }
    const auto a = is.state_get();
    const auto b = twin.state_get();
    expect(a.size() == b.size(), "the state has " + str(a.size()) + " bytes instead of " + str(b.size()));
    expect(a == b, "the state differs from byte " + str(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin()));
}

// check that every used page is counted, and that the budget is not exceeded
void walk::expect_accounted() const {
    expect(!end.is_passed(usage().committed), "more than the budget is taken");

    const bool is_all_there = !s.params.fake_devices.empty() && s.params.n_gpu_layers < 0 && s.params.offload_kqv;
    if (in_place && is_all_there && !has_retyped && !is_msa) {
        const size_t n = n_free_on_devices(s.params) + usage().committed + end.n_others();
        expect(n == n_outside, str((int64_t) (n_outside - n)) + " bytes are taken that nobody counts");
    }
}

// check that no more memory is used than before. With growth by copy, a refused request may leave a larger buffer for the same
// number of cells
void walk::expect_no_more_than(const llama_memory_usage & before) const {
    expect(usage().n_cells <= before.n_cells, "there are more cells than before");
    expect(usage().committed <= before.committed || !in_place, "more is taken than before");
}

// check that freed memory is returned
// With growth in place, memory shrinks to the used cells, in blocks of 32 cells, plus one page per tensor at both ends of a
// run of used cells. Memory is freed only if at least 512 cells and at least a quarter of all cells are unused
// (llama_kv_growth::shrink).
// On a device, all rows below the last used row are kept. This function does not know the number of these rows. So on a device,
// it checks the number of cells only if no cell is used.
void walk::expect_given_back(uint32_t n_shrink_before) const {
    if (!in_place || is_waiting || start.n_cells == start.n_cells_max) {
        return;
    }
    const llama_memory_usage cur = usage();

    uint32_t n_runs = 0;
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        n_runs += llama_memory_seq_usage(is.ctx, (llama_seq_id) seq).cells.n_runs;
    }

    const uint32_t n_rest = start.n_cells + cur.n_cells_used + 62*n_runs;

    if (s.params.device.empty() || cur.n_cells_used == 0) {
        expect(cur.n_cells < n_rest + std::max(512u, cur.n_cells/4), str(cur.n_cells) + " cells are there, of " +
                str(cur.n_cells_used) + " in " + str(n_runs) + " runs that are used");
    }
    if (cur.n_shrink > n_shrink_before && llama_model_n_swa(s.model) == 0) { // the cells of a window are in another cache
        const size_t size_cell = (start.reserved - start.committed)/(start.n_cells_max - start.n_cells);
        const size_t n_tensors = 2*llama_model_n_layer(s.model);
        const size_t n_most    = start.committed + (cur.n_cells - start.n_cells)*size_cell + 2*(n_runs + sp.n_streams())*n_tensors*size_page(s.params);

        expect(cur.committed <= n_most, str(cur.committed) + " bytes are taken for " + str(cur.n_cells) + " cells");
    }
}

//
// operations
//

void walk::step() {
    const uint32_t what = below(rng, 100);
    const auto     seq  = (llama_seq_id) below(rng, sp.n_seqs);
    const auto     next = (llama_seq_id) ((seq + 1 + below(rng, sp.n_seqs - 1)) % sp.n_seqs);

    const uint32_t n_shrink = usage().n_shrink;

    if      (what < 36) { decode(some_tokens()); }
    else if (what < 40) { retype(); }
    else if (what < 50) { remove(seq); }
    else if (what < 58) { copy(seq, next); }
    else if (what < 61) { shift(seq); }
    else if (what < 69) { save(below(rng, 3) == 0 ? -1 : seq); }
    else if (what < 84) { restore_any(seq); }
    else if (what < 88) { keep(seq); }
    else if (what < 90) { clear(what == 88); }
    else                { move_end(); }

    if (what >= 40) {
        expect_given_back(n_shrink);
    }
    if (what % 8 == 0) {
        expect_same_states();
    }
}

// set the limit to a random number of additional pages, or remove it
void walk::move_end() {
    const size_t n_pages = (start.reserved - start.committed)/size_page(s.params);

    if (!s.dynamic || n_pages == 0 || below(rng, 4) == 0) {
        say("memory without end");
        end.clear();
    } else {
        const uint32_t n = below(rng, (uint32_t) (below(rng, 2) == 0 ? n_pages : n_pages/8 + 1));
        say(str(n) + " pages are left");
        end.set(n*size_page(s.params), usage().committed);
    }
}

// return a batch for one or several sequences. Each sequence stays short, because some models were trained for 256 positions
walk::seqs walk::some_tokens() {
    const uint32_t n_most = sp.unified ? 200 : 600;
    const uint32_t n_seqs = 1 + below(rng, below(rng, 2) == 0 ? 1 : sp.n_seqs);
    const uint32_t first  = below(rng, sp.n_seqs);

    seqs res;
    for (uint32_t i = 0; i < n_seqs; ++i) {
        const auto     seq = (llama_seq_id) ((first + i) % sp.n_seqs);
        const uint32_t n   = 1 + below(rng, below(rng, 4) > 0 ? 8 : 100);

        res.insert(res.end(), std::min<uint32_t>(n, n_most - std::min<uint32_t>(n_most, is.past(seq))), seq);
    }
    return res;
}

void walk::decode(const seqs & order) {
    if (order.empty()) {
        return;
    }
    const llama_memory_usage before = usage();
    say("decode " + str(order.size()) + " of " + str(order.front()) + " to " + str(order.back()));

    const int32_t rc = end.reach([&] { return is.fill_order(order); });

    if (rc == 1 && end.may_refuse()) {
        refused++;
        say("refused");
        if (!is_waiting) {
            expect_no_more_than(before);
        }
        expect_same_states();
        return;
    }
    const int32_t rc_twin = end.away(s.params, n_outside, [&] { return twin.fill_order(order); });
    expect(rc == rc_twin, "a batch returns " + str(rc) + " instead of " + str(rc_twin));

    const auto & a = is.logits();
    const auto & b = twin.logits();
    expect(a.size() == b.size() && memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0, "the logits of a batch differ");

    is_waiting = is_waiting && rc != 0;
}

void walk::remove_all(llama_seq_id seq) {
    both([&](session & c) { return c.rm(seq, -1, -1); });
}

void walk::remove(llama_seq_id seq) {
    const llama_pos n = is.past(seq);
    say("remove of " + str(seq) + ", " + str(n) + " tokens");

    const uint32_t what = below(rng, 4);
    if (what == 0 || n < 5) {
        remove_all(seq);
    } else if (what == 1) { // not more than a window remembers
        const llama_pos p0 = n - 1 - (llama_pos) below(rng, 3);
        both([&](session & c) { return c.rm(seq, p0, -1); });
    } else {
        const auto p0 = (llama_pos) below(rng, n - 4);
        const auto p1 = p0 + 1 + (llama_pos) below(rng, n - 4 - p0);
        both([&](session & c) { return c.rm(seq, p0, p1); });
    }
}

// copy a sequence completely. Within a stream, both sequences use the same cells then. To another stream, the cells are copied
// before the next batch
void walk::copy(llama_seq_id src, llama_seq_id dst) {
    say("copy " + str(src) + " to " + str(dst));
    remove_all(dst);
    both([&](session & c) { c.cp(src, dst); return 0; });

    is_waiting = is_waiting || !sp.unified;
}

void walk::keep(llama_seq_id seq) {
    say("keep " + str(seq));
    both([&](session & c) { c.keep(seq); return 0; });
}

void walk::clear(bool data) {
    say("clear");
    both([&](session & c) { c.clear(data); return 0; });

    const bool is_first = is.types() == sp.types;

    expect(!in_place || !data || usage().committed == start.committed || (!is_first && usage().committed < start.committed),
            "empty, " + str(usage().committed) + " bytes are taken instead of " + str(start.committed));
}

void walk::shift(llama_seq_id seq) {
    const llama_pos n = is.past(seq);
    if (is_waiting || n < 8 || !llama_memory_can_shift(llama_get_memory(twin.ctx))) {
        return;
    }
    const auto p0 = (llama_pos) below(rng, n/2);
    const auto p1 = p0 + 1 + (llama_pos) below(rng, n/4);

    say("shift " + str(seq) + ": from " + str(p1) + " to " + str(p0));
    bool ok = false;
    both([&](session & c) { return ok = c.rm(seq, p0, p1); });
    if (ok) {
        both([&](session & c) { c.add(seq, p1, -1, p0 - p1); return 0; });
        is_waiting = true;
    }
}

// choose types that are not larger than the first types, because the allowed memory is computed from these
void walk::retype() {
    static const cell_types all[] = {
        { GGML_TYPE_F16,  GGML_TYPE_F16  },
        { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 },
        { GGML_TYPE_Q4_0, GGML_TYPE_Q4_0 },
        { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 },
    };
    set_types(all[below(rng, 4)]);
}

void walk::set_types(const cell_types & types) {
    if (is_waiting || !(sp.types == cell_types{ GGML_TYPE_F16, GGML_TYPE_F16 })) {
        return;
    }
    const llama_memory_usage before = usage();
    say("types " + to_string(types));

    const int32_t rc = end.reach([&] { return is.try_retype(types); });

    if (rc == LLAMA_MEMORY_TYPE_NO_MEMORY && end.may_refuse()) {
        refused++;
        say("refused");
        expect_no_more_than(before);
    } else {
        const int32_t rc_twin = end.away(s.params, n_outside, [&] { return twin.try_retype(types); });

        has_retyped = has_retyped || rc_twin == LLAMA_MEMORY_TYPE_OK;
        expect(rc == rc_twin, std::string("a change of the types returns ") + llama_memory_type_reason(rc) + " instead of " +
                llama_memory_type_reason(rc_twin));
    }
    expect_same_states();
}

void walk::save(llama_seq_id seq) {
    if (is_waiting) {
        return;
    }
    say("save " + str(seq));
    const auto get = [&](session & c) { return seq < 0 ? c.state_get() : c.state_seq_get(seq); };

    saved.push_back({ seq, get(is), get(twin) });
}

void walk::restore_any(llama_seq_id seq) {
    if (!is_waiting && !saved.empty()) {
        restore(saved[below(rng, 2) == 0 ? 0 : below(rng, (uint32_t) saved.size())], seq);
    }
}

// restore a state of one sequence, or of all sequences
// If the dynamic cache refuses the state, its sequences are empty afterwards. This function then also removes them from the static
// cache, and removes their recurrent states, as a program would do.
void walk::restore(const saved_state & from, llama_seq_id seq) {
    say("restore " + str(from.seq) + " to " + str(seq));
    const llama_memory_usage before = usage();

    const auto set = [&](session & c, const std::vector<uint8_t> & data) {
        return (from.seq < 0 ? c.state_set(data) : c.state_seq_set(seq, data)) == data.size();
    };
    if (end.reach([&] { return set(is, from.of_is); })) {
        expect(set(twin, from.of_twin), "only the static cache refuses the state");
    } else {
        expect(end.may_refuse(), "the state is refused");
        refused++;
        say("refused");
        from.seq < 0 ? clear(true) : remove_all(seq);
        expect_no_more_than(before);
    }
    expect_same_states();
}

} // namespace

static void kv_check_random(side & s) {
    const uint32_t n_walks = s.params.quick ? 4 : 50;
    const uint32_t n       = 60;

    const bool is_there = !s.params.fake_devices.empty() && s.params.device.find("FAKE0") == 0;

    trace_writer out(nullptr);
    side         nowhere(s, out);

    uint32_t n_refused = 0;
    for (uint32_t i = 0; i < n_walks; ++i) {
        session_params sp = kv_check_base(s);

        // test unified caches and streams, unless the command line selects one
        sp.unified  = s.params.n_seqs == 1 ? i/2 % 2 == 0 : s.params.unified;
        sp.n_seqs   = std::max(s.params.n_seqs, sp.unified ? 8u : 3u);
        sp.n_cells  = sp.unified ? 256*sp.n_seqs : 768;
        sp.n_rs_seq = 0; // upstream's saved states do not contain the snapshots for a rollback

        const auto what = i % 2 == 0 ? memory_end::BUDGET : is_there ? memory_end::DEVICE : memory_end::SYSTEM;

        try {
            walk w(s, nowhere, sp, what, s.params.seed*1000 + i);
            w.run(n);
            n_refused += w.n_refused();
        } catch (const check_failed & err) {
            throw check_failed("walk " + str(i) + " (" + (sp.unified ? "one stream, " : "streams, ") + memory_end::name(what) + "), " + err.what());
        }
    }
    s.out.measure("walks",      n_walks);
    s.out.measure("operations", n_walks*n);
    s.out.measure("refused",    n_refused);
}

static const kv_check_registration scenarios({
    { "random",          kv_check_random,          "random", false },
});

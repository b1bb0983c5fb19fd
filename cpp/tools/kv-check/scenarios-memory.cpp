// Checks what happens if memory runs out while the cache grows. `--fail` selects the allocations that fail. `--limit` limits
// the memory that the process can still allocate.
//
// The return code of the failed batch is not compared, because no batch fails with a static cache. The state after the failed
// batch is compared: the old cells are unchanged, and everything that fits is decoded.

#include "scenarios.h"
#include "short-of-memory.h"

#include <algorithm>
#include <string>
#include <vector>

namespace {

// test a copy of a stream for which there is no memory. No batch may run before the copy is made
// is_shifted: a K-shift of the copied cells is also pending. It can be made only after the copy
void late_copy(side & s, const session_params & sp, const std::string & name, bool is_shifted) {
    session c(s, sp, name);
    if (is_shifted && !c.can_shift("of a copy")) {
        return;
    }
    c.fill_seq(0, 300);
    c.rm(0, 0, 50); // frees rows, but no page. so the source needs no memory, and only the copy does

    const auto last_logits = [&] {
        const float * row = llama_get_logits_ith(c.ctx, -1);
        return row ? std::vector<float>(row, row + s.n_vocab) : std::vector<float>();
    };

    std::vector<llama_pos> before;
    std::vector<float>     logits; // logits of the batch, if it succeeded

    const auto try_batch = [&] {
        before = c.positions();
        logits = c.try_fill(4) == 0 ? last_logits() : std::vector<float>();
        c.go_back(before);
    };
    {
        const short_of_memory scope(s.params, s.dynamic);
        c.cp(0, 1);
        try_batch();
        if (is_shifted) {
            c.rm(1, 100, 140);
            c.add(1, 140, -1, -40);
            try_batch();
        }
    }
    if (c.try_fill(4) != 0 || (!logits.empty() && logits != last_logits())) {
        throw check_failed("a batch ran without the copy that it reads, or does not run with enough memory");
    }

    // The next copy also waits for a batch, as in a static cache. A state that is saved before the batch must have the same bytes
    // as with a static cache.
    if (sp.n_streams() > 2) {
        c.cp(0, 2);
        s.out.blob(name + ".second", c.try_state_get(2));
    }

    c.go_back(before);
    c.generate(3);
}

enum class late_state { none, saved, into_source, into_copy, into_other };

struct after_late_state {
    bool                 is_refused;
    std::vector<uint8_t> copy; // state of the second sequence at the end. its copy is pending while a state is saved or read
};

after_late_state try_late_state(side & s, const session_params & sp, late_state what, const std::vector<uint8_t> & state, bool is_short) {
    after_late_state res = {};

    session c(s, sp, "copy, state");

    const bool in_place = c.is_in_place();

    c.fill_seq(0, 300);
    c.rm(0, 0, 50);
    if (what == late_state::into_other) {
        c.fill_seq(2, 800);
    }
    {
        const short_of_memory scope(s.params, is_short);
        c.cp(0, 1);

        const auto before = c.positions();
        c.try_fill(4);
        c.go_back(before);

        if (what == late_state::saved) {
            if (c.try_state_get(0).empty()) {
                throw check_failed("a sequence cannot be saved while the copy of another one waits");
            }
            res.copy       = c.try_state_get(1);
            res.is_refused = res.copy.empty();
            return res;
        }
        if (what == late_state::into_other) {
            const size_t n_taken = llama_get_memory_usage(c.ctx).committed;

            c.rm(0, -1, -1);
            c.rm(2, -1, -1);

            if (in_place && llama_get_memory_usage(c.ctx).committed >= n_taken) {
                throw check_failed("nothing is freed while a copy of other cells waits");
            }
        }
        if (what != late_state::none) {
            res.is_refused = c.try_state(state, what == late_state::into_source ? 0 : what == late_state::into_copy ? 1 : 2) == 0;
        }
    }
    c.go_back(c.positions()); // the positions may not exceed the old ones, which are known

    const auto before = c.positions();
    if (c.try_fill(4) != 0) {
        throw check_failed("no batch runs after a state that was read while a copy waited");
    }
    c.go_back(before);

    res.copy = c.try_state_get(1);

    return res;
}

// save or read a state while a copied sequence (llama_memory_seq_cp) waits for memory for its rows
// Either the result equals the result with enough memory, or the call is refused and the copied sequence is intact. A read must
// succeed for two targets: the copied sequence, which the state replaces, and a third sequence. The third sequence is neither
// the source of the copy nor the copied sequence.
void late_copy_state(side & s, const session_params & sp) {
    if (!s.dynamic) {
        return;
    }
    trace_writer out(nullptr);
    side         nowhere(s, out); // without a trace, because a static cache has nothing to compare

    session other(nowhere, sp, "other");
    other.salt(1);
    other.fill_seq(0, 200);
    const auto state = other.try_state_get(0);

    for (const auto what : { late_state::saved, late_state::into_source, late_state::into_copy, late_state::into_other }) {
        if (what == late_state::into_other && sp.n_streams() < 3) {
            continue;
        }
        const auto is = try_late_state(nowhere, sp, what, state, true);

        if (is.is_refused && what == late_state::saved) {
            continue;
        }
        if (is.is_refused && what == late_state::into_copy) {
            throw check_failed("a state is refused because of a copy that is no longer needed");
        }
        if (is.is_refused && what == late_state::into_other) {
            throw check_failed("a state is refused because of a copy of other cells");
        }
        if (is.copy != try_late_state(nowhere, sp, is.is_refused ? late_state::none : what, state, false).copy) {
            throw check_failed(std::string("a state that was ") + (what == late_state::saved ? "saved" : "read") + " while a copy waited is wrong, or the copy");
        }
    }
}

// test that DSV4's rows without cells are copied with their sequence, even if the copy waits for memory
void late_copy_rows(side & s, session_params sp) {
    if (!s.dynamic) {
        return;
    }
    trace_writer out(nullptr);
    side         nowhere(s, out);

    sp.n_cells = 2048;

    // return the logits of the copied sequence, and of a new sequence 0, which replaces the source of the copy
    const auto logits_of = [&](bool is_short) -> std::vector<float> {
        session c(nowhere, sp, "copy, rows");

        std::vector<float> res;

        const auto note = [&] {
            const float * row = llama_get_logits_ith(c.ctx, -1);
            res.insert(res.end(), row, row + s.n_vocab);
        };

        c.fill_seq(0, 1300); // 325 rows, because a row belongs to four positions
        c.fill_seq(1, 20);
        c.rm(1, -1, -1);
        if (is_short) {
            const short_of_memory scope(s.params);
            c.cp(0, 1);
            const auto before = c.positions();
            if (c.fill_order({ 1 }) == 0) {
                return {}; // by copy, all streams have the same rows, so the copy needs no memory
            }
            c.go_back(before);
            c.rm(0, -1, -1);
        } else {
            c.cp(0, 1);
        }
        c.fill_order({ 1 }, true);
        note();
        if (!is_short) {
            c.rm(0, -1, -1);
        }
        c.fill_seq(0, 40);
        note();

        return res;
    };

    const auto is = logits_of(true);

    if (!is.empty() && is != logits_of(false)) {
        throw check_failed("a copy was made after its source was freed");
    }
}

// test that a batch without memory leaves all sequences unchanged
void try_batch(session & c, uint32_t n, bool can_look) {
    if (!can_look) {
        c.try_fill(n);
        return;
    }

    const auto   before = c.states();
    const size_t n_used = llama_get_memory_usage(c.ctx).used;

    if (c.try_fill(n) != 0 && (c.states() != before || llama_get_memory_usage(c.ctx).used > n_used)) {
        throw check_failed("a batch of " + std::to_string(n) + " tokens found no memory, but changed the cells");
    }
}

} // namespace

void kv_check_no_memory(side & s) {
    if (s.params.fail.empty() && s.params.limit_mib == 0) {
        throw check_skipped("no failing allocation is requested (--fail, --limit)");
    }
    session_params sp = kv_check_base(s);

    // By default, the cache must not grow before the batch that runs out of memory, so fill only 240 cells. `--fill N` sets a
    // larger number, because a row can belong to several positions (DSV4).
    const uint32_t n_before = s.params.n_fill > 340 ? s.params.n_fill - 100 : 240;

    session_params large = sp;
    large.dynamic = false;
    session a(s, large, "large");
    a.fill(n_before + 200);
    const auto state = a.state_get();

    // After a failed batch, continue from the positions before the batch, except in two cases. With a window, the failed batch
    // has removed old positions. Recurrent layers cannot roll back.
    const bool keeps = !s.is_recurrent && !s.is_hybrid && llama_model_n_swa(s.model) == 0;

    session c(s, sp, "short");
    c.fill(n_before);

    for (const uint32_t n : { 60u, 90u, 300u }) {
        const auto before = c.positions();
        {
            const short_of_memory scope(s.params, s.dynamic);
            const bool can_look = s.params.limit_mib == 0; // saving the states needs memory as well, so it is not possible with a limit
            try_batch(c, std::min(n, sp.n_cells - n_before), can_look);
            try_batch(c, 20, can_look);
            c.can_shift("after a growth that failed");
            if (keeps) {
                c.go_back(before);
                c.generate(3);
            }
        }
        if (keeps) {
            c.go_back(before);
        } else {
            c.clear(true);
            c.fill(n_before);
        }
    }

    if (keeps && sp.n_streams() > 1) {
        late_copy(s, sp, "copy", false);
        late_copy(s, sp, "copy, shifted", true);
        late_copy_state(s, sp);
    }

    if (s.arch == "deepseek4" && sp.n_streams() > 1) {
        late_copy_rows(s, sp);
    }

    session d(s, sp, "state");
    d.fill(20);
    {
        const short_of_memory scope(s.params, s.dynamic);
        if (d.try_state(state) == 0 && s.dynamic && llama_get_memory_usage(d.ctx).n_cells_used > 0) {
            throw check_failed("a refused state has left cells");
        }
    }
    d.clear(true);
    d.fill(n_before);
    d.generate(40);
}

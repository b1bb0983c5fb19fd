// Checks of changes of the types of the KV cells while the cells contain sequences (llama_set_memory_type()).
//
// Each check compares the cells after a change with the cells that a reference implementation computes. The reference shares no
// code with llama_set_memory_type() (reference.h). kv-check also compares the run with the static cache and the run with the
// dynamic cache. In these checks, both runs execute code of the patches. So a failure of the static run counts as a failure of
// the patches, while in other checks it counts as a failure of upstream.

#include "scenarios-types.h"
#include "short-of-memory.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

namespace {

constexpr cell_types f16 = { GGML_TYPE_F16, GGML_TYPE_F16 };

using retype_chain = std::vector<cell_types>; // the first types, and the types after each change

// return the changes of type to test. Without flash attention, V cannot be quantized
std::vector<retype_chain> default_chains(const side & s) {
    constexpr ggml_type q8 = GGML_TYPE_Q8_0;
    constexpr ggml_type q4 = GGML_TYPE_Q4_0;
    constexpr ggml_type h  = GGML_TYPE_F16;

    const cell_types f32  = { GGML_TYPE_F32,  GGML_TYPE_F32  };
    const cell_types bf16 = { GGML_TYPE_BF16, GGML_TYPE_BF16 };

    std::vector<retype_chain> res;
    if (s.params.flash_attn == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        res = { { f16, { q8, h }, f16 }, { f32, f16, f32 } };
        if (!s.params.quick) {
            res.push_back({ f16, bf16, f16 });
            res.push_back({ { q8, h }, { q4, h } });
        }
        return res;
    }
    res = { { f16, { q8, q8 } }, { f16, { q4, q4 } }, { { q8, q8 }, { q4, q4 } }, { { q8, q8 }, f16 } };
    if (!s.params.quick) {
        res.push_back({ f16, bf16, f16 });
        res.push_back({ f32, f16, f32 });
        res.push_back({ f16, { h, q4 }, { q8, h } });
        res.push_back({ { q4, q4 }, { GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_1 }, { GGML_TYPE_Q4_1, GGML_TYPE_Q5_0 }, { q8, q8 } });
    }
    return res;
}

std::string to_string(const retype_chain & chain) {
    std::string res;
    for (const auto & types : chain) {
        res += (res.empty() ? "" : ":") + to_string(types);
    }
    return res;
}

// return the number of cells to fill for a check that needs n cells. In a quick run, the result can be smaller than n
uint32_t n_cells_of(const side & s, uint32_t n) {
    return std::min(n, kv_check_n_fill(s.params));
}

// return the saved state of a context that has these types from the start
state_parts state_like(side & s, const session_params & sp, const cell_types & types) {
    session c(s, session_with_types(sp, types), "like");
    c.fill(1);
    return kv_check_state_of(s, sp, c);
}

// a change that the context supports, and the state of a context that has the new types from the start
struct retype_step {
    cell_types  to;
    state_parts like;
};

void must_refuse(side & s, session & c, const cell_types & to) {
    const auto before = c.state_get();
    if (c.retype(to) == LLAMA_MEMORY_TYPE_OK) {
        throw check_failed("no context can be created with " + to_string(to) + ", but one can be changed to it");
    }
    if (c.state_get() != before) {
        throw check_failed("a change to " + to_string(to) + " is refused, but something has changed");
    }
    s.out.value("refused", 1);
}

// return true if the key of one attention head consists of whole blocks of type_k
// With flash attention, upstream refuses other lengths of the key. Without flash attention, upstream accepts other lengths, but
// computes different values for them.
bool is_head_whole(const side & s, ggml_type type_k) {
    char val[32];
    const int32_t n = llama_model_meta_val_str(s.model, (s.arch + ".attention.key_length").c_str(), val, sizeof(val));
    return n <= 0 || atoll(val) % ggml_blck_size(type_k) == 0;
}

// call f for each chain of types that a context of this model supports. Check that other changes are refused
void for_each_chain(side & s, const session_params & sp, const std::function<void(const session_params &, const std::vector<retype_step> &, const std::string &)> & f) {
    if (s.is_recurrent) {
        session c(s, sp, "recurrent");
        must_refuse(s, c, { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 });
        throw check_skipped("the model has only recurrent state, without cells");
    }
    {
        // without a change of types, fill at least as many cells as each of the checks that change types. If the model fails
        // here, the failure is one of upstream
        session c(s, sp, "long");
        c.fill(1);
        if (s.params.fallback) {
            c.fill(n_cells_of(s, 420));
        } else {
            c.fill_seq(0, n_cells_of(s, 420));
        }
        if (c.types().k == GGML_TYPE_COUNT) {
            throw check_skipped("the types of these cells cannot change: this upstream does not support it, or there are no cells");
        }
    }
    size_t n_run = 0;
    for (const auto & chain : s.params.retypes.empty() ? default_chains(s) : s.params.retypes) {
        const session_params start = session_with_types(sp, chain.front());
        s.out.event(TRACE_OURS, "", 0);
        if (!is_head_whole(s, start.types.k) || !session_can_create(s, start)) {
            continue;
        }
        std::vector<retype_step> steps;
        for (size_t i = 1; i < chain.size(); ++i) {
            if (chain[i] == (steps.empty() ? chain.front() : steps.back().to)) {
                continue; // the step to these types was refused before, so there is no change to make
            }
            if (is_head_whole(s, chain[i].k) && session_can_create(s, session_with_types(sp, chain[i]))) {
                steps.push_back({ chain[i], state_like(s, sp, chain[i]) });
                continue;
            }
            session c(s, start, "refused");
            c.fill(20);
            must_refuse(s, c, chain[i]);
        }
        if (!steps.empty()) {
            f(start, steps, to_string(chain));
            n_run++;
        }
    }
    if (n_run == 0) {
        throw check_skipped("no context can be created with these types");
    }
}

void must_be(const session & c, const cell_types & types) {
    if (!(c.types() == types)) {
        throw check_failed("the types are " + to_string(c.types()) + " instead of " + to_string(types));
    }
}

// compare the state after a change of types with the state that the reference computes from the state before
// If the two states differ, the error message can contain a hint. The hint names a wrong rule for the rotation of caches
// (enum class basis) with which the reference would compute the state after the change.
void must_equal(const state_parts & before, const retype_step & step, const std::vector<uint8_t> & after, const std::string & what) {
    const std::string diff = state_difference(state_convert(before, step.like, step.to), after);
    if (diff.empty()) {
        return;
    }
    std::string hint;
    for (const auto & other : { std::make_pair(basis::kept, "is kept"), std::make_pair(basis::by_type, "follows the type alone") }) {
        if (state_difference(state_convert(before, step.like, step.to, other.first), after).empty()) {
            hint = std::string("; it would be right if the basis ") + other.second;
        }
    }
    throw check_failed(what + ": " + diff + hint);
}

void retype(side & s, const session_params & sp, session & c, const retype_step & step, const std::string & what) {
    const auto before = kv_check_state_of(s, sp, c);

    llama_set_abort_callback(c.ctx, [](void *) { return true; }, nullptr); // a change must not be interrupted by the callback
    const int32_t rc = c.retype(step.to);
    llama_set_abort_callback(c.ctx, nullptr, nullptr);

    if (rc != LLAMA_MEMORY_TYPE_OK) {
        throw check_failed(what + " to " + to_string(step.to) + " is refused: " + llama_memory_type_reason(rc));
    }
    const auto after = c.state_get();
    must_equal(before, step, after, what + " to " + to_string(step.to));
    must_be(c, step.to);
    s.out.blob(what + " to " + to_string(step.to), after);
}

// create sequences of different lengths, and with holes if the model supports them
void fill_unevenly(side & s, session & c, uint32_t n) {
    const bool few = s.params.fallback || c.n_seqs() > 1;
    c.fill(few ? n/2 : n);
    if (few) {
        c.fill_seq((llama_seq_id) c.n_seqs() - 1, n/4);
    }
    if (s.is_hybrid) {
        return;
    }
    for (uint32_t seq = 0; seq < c.n_seqs(); seq += 2) {
        const llama_pos end = c.past((llama_seq_id) seq);
        c.rm((llama_seq_id) seq, end/4, end/2);
    }
}

} // namespace

// compare every byte of the saved state
static void kv_check_retype_bits(side & s) {
    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        session c(s, sp, name);
        fill_unevenly(s, c, n_cells_of(s, 400));
        for (const auto & step : steps) {
            retype(s, sp, c, step, name);
        }
        c.generate(2);
    });
}

// change types after a K-shift, and while a K-shift is pending
// The change must first compute the pending K-shift, and then add or remove the rotation (Hadamard transform) of the keys.
static void kv_check_retype_shift(side & s) {
    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        session c(s, sp, name + ".done");
        if (!c.can_shift("at creation")) {
            throw check_skipped("the static cache cannot be shifted");
        }
        const uint32_t n_each = n_cells_of(s, 300)/(sp.unified ? sp.n_seqs : 1);
        c.fill(n_cells_of(s, 300));
        c.shift(4, n_each/2);
        c.generate(2);
        retype(s, sp, c, steps.front(), name + ", shifted,");
        if (c.can_shift("changed")) {
            c.shift(2, n_each/8);
            c.generate(2);
        }

        // The next batch computes a pending K-shift. So to see the result, decode a batch of one token per stream, and remove
        // the token. With a window or a recurrent state, removing the token does not restore exactly the state before it.
        if (s.is_hybrid || llama_model_n_swa(s.model) > 0) {
            return;
        }
        session done(s, sp, name + ".applied");
        session todo(s, sp, name + ".pending");
        for (session * d : { &done, &todo }) {
            d->fill(n_cells_of(s, 300));
            d->shift(4, n_each/2);
        }
        const auto at = done.positions();
        done.generate(1);
        done.go_back(at);
        const auto before = kv_check_state_of(s, sp, done);
        if (todo.retype(steps.front().to) != LLAMA_MEMORY_TYPE_OK) {
            throw check_failed("a change while a shift is pending is refused");
        }
        must_equal(before, steps.front(), todo.state_get(), name + ", with a shift pending,");
        todo.generate(2);
    });
}

// check that a continuation gives the same answers as in a context that has the types from the start and the same cells
static void kv_check_retype_generate(side & s) {
    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        session c(s, sp, name);
        c.fill(n_cells_of(s, 220));

        // decode two tokens in this context and in a new context that has read its state. Return true if the logits are equal
        const auto answers_as_restored = [&](const cell_types & types) {
            session d(s, session_with_types(sp, types), name + ".restored");
            if (d.state_set(c.state_get()) == 0) {
                throw check_failed("a context with " + to_string(types) + " cannot read the state: " + s.last_error);
            }
            for (session * e : { &c, &d }) {
                e->fill_seq(0, 1);
                e->fill_seq(0, 1);
            }
            return c.logits() == d.logits();
        };
        // Without a change of types, the logits can already differ, because restored cells can have another order than the
        // original cells. This happens for example after a window has wrapped around.
        const bool is_exact = answers_as_restored(sp.types);
        for (const auto & step : steps) {
            retype(s, sp, c, step, name);
            if (!answers_as_restored(step.to) && is_exact) {
                throw check_failed(name + ": the continuation differs from that of a context with these cells from the start");
            }
        }

        // grow the cache after the change, and use rows again that had other content before the change. The old content of
        // these rows must not have an effect
        c.fill(n_cells_of(s, 320) - 220);
        for (uint32_t seq = 0; seq < c.n_seqs(); ++seq) {
            const llama_pos end = c.past((llama_seq_id) seq);
            if (!s.is_hybrid) {
                c.rm((llama_seq_id) seq, end/2, -1);
            }
        }
        retype(s, sp, c, { sp.types, state_like(s, sp, sp.types) }, name + ", back");
        c.generate(3);
        c.clear(false);
        c.retype(steps.front().to);
        c.fill(n_cells_of(s, 300));
        c.generate(2);
    });
}

// restore states whose types differ from the types of the cells
// A state that was saved before a change of types is read after the change, and is converted to the new types. A state that was
// saved after the change is read by a context with the old types, and is converted to the old types.
static void kv_check_retype_restore(side & s) {
    session_params sp = kv_check_base(s);
    if (sp.n_seqs == 1) {
        sp.n_seqs  = 3;
        sp.unified = true;
    }
    for_each_chain(s, sp, [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        const retype_step & step = steps.front();
        const retype_step   back = { sp.types, state_like(s, sp, sp.types) };

        session c(s, sp, name);
        fill_unevenly(s, c, n_cells_of(s, 300));
        const auto before = kv_check_state_of(s, sp, c);
        retype(s, sp, c, step, name);
        const auto after = kv_check_state_of(s, sp, c);

        const auto restore = [&](session & to, const state_parts & state, const retype_step & change, const std::string & what) {
            session native(s, session_with_types(sp, change.to), name + ", not converted");
            to.fill_seq(0, 1); // the graph of this batch must not be reused
            native.state_set(state_convert(state, change.like, change.to).data);
            to.state_set(state.data);
            must_equal(state, change, to.state_get(), name + what);
            must_be(to, change.to);
            for (uint32_t i = 0; i < 2; ++i) {
                to.fill_seq(0, 1);
                native.fill_seq(0, 1);
                if (to.logits() != native.logits()) {
                    throw check_failed(name + what + ": the continuation differs from that of the converted cells");
                }
            }
        };
        restore(c, before, step, ", restored after the change");

        session d(s, sp, name + ".other");
        restore(d, after, back, ", restored elsewhere");
        restore(d, after, back, ", restored again");

        // Restore a state between the cells of other sequences. A window would drop some of these cells, and recurrent states
        // have no cells.
        if (s.is_hybrid || llama_model_n_swa(s.model) > 0) {
            return;
        }
        session e(s, sp, name + ".holes");
        for (uint32_t i = 0; i < 6; ++i) {
            e.fill(30);
        }
        const auto all = kv_check_state_of(s, sp, e);
        const auto one = e.state_seq_get(1);
        e.rm(1, -1, -1);
        e.retype(step.to);
        e.state_seq_set(1, one);
        must_equal(all, step, e.state_get(), name + ", restored into holes");
    });
}

// check that a growth after the change gives the same result as a change after the growth
static void kv_check_retype_grow(side & s) {
    session_params sp = kv_check_base(s);
    if (sp.n_seqs == 1) {
        sp.n_seqs  = 2;
        sp.unified = true;
    }
    for_each_chain(s, sp, [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        session before(s, sp, name + ".before");
        session after (s, sp, name + ".after");
        const auto grow = [&](session & c) {
            for (uint32_t seq = 1; seq < sp.n_seqs; ++seq) {
                c.fill_seq((llama_seq_id) seq, n_cells_of(s, 400)/(sp.unified ? sp.n_seqs - 1 : 1));
            }
            for (uint32_t seq = 1; seq < sp.n_seqs; ++seq) {
                c.rm((llama_seq_id) seq, -1, -1);
            }
        };
        for (session * c : { &before, &after }) {
            c->fill_seq(0, 100);
        }
        retype(s, sp, before, steps.front(), name + " before the growth");
        grow(before);
        grow(after);
        retype(s, sp, after, steps.front(), name + " after the growth");
        for (session * c : { &before, &after }) {
            for (uint32_t i = 0; i < 3; ++i) {
                c->fill_seq(0, 1);
            }
        }
        const std::string diff = state_difference(kv_check_state_of(s, sp, before), after.state_get());
        if (!diff.empty()) {
            throw check_failed(name + ": a change after the growth and one before it have different results: " + diff);
        }
    });
}

//
// quality
//

namespace {

// errors of the logits in comparison with the logits of an f16 cache: the median over the compared tokens
// The mean would be dominated by a few tokens for which several cells get nearly the same attention. The errors of these tokens
// change with each difference of rounding.
struct error {
    double rms = 0.0;
    double kl  = 0.0; // Kullback-Leibler divergence
};

double log_sum_exp(const float * x, uint32_t n) {
    const double max = *std::max_element(x, x + n);
    double sum = 0.0;
    for (uint32_t i = 0; i < n; ++i) {
        sum += exp(x[i] - max);
    }
    return max + log(sum);
}

error error_of_row(const float * is, const float * expected, uint32_t n) {
    const double z_is       = log_sum_exp(is,       n);
    const double z_expected = log_sum_exp(expected, n);

    error res;
    for (uint32_t i = 0; i < n; ++i) {
        const double lp = expected[i] - z_expected;
        const double lq = is[i]       - z_is;
        res.kl  += exp(lp)*(lp - lq);
        res.rms += ((double) is[i] - expected[i])*((double) is[i] - expected[i]);
    }
    res.rms = sqrt(res.rms/n);
    return res;
}

double median(std::vector<double> values) {
    if (values.empty()) {
        return 0.0;
    }
    std::nth_element(values.begin(), values.begin() + (ptrdiff_t) values.size()/2, values.end());
    return values[values.size()/2];
}

error error_of(const std::vector<float> & is, const std::vector<float> & expected, uint32_t n_vocab) {
    std::vector<double> rms;
    std::vector<double> kl;
    for (size_t i = 0; i + n_vocab <= expected.size(); i += n_vocab) {
        const error row = error_of_row(is.data() + i, expected.data() + i, n_vocab);
        rms.push_back(row.rms);
        kl .push_back(row.kl);
    }
    return { median(rms), median(kl) };
}

// return the error a divided by the error b. The result is 1 if a equals b, even if both are 0
// Both errors can be 0 for example if one of two types represents all values of the other type.
double ratio(double a, double b) {
    return a == b ? 1.0 : a/b;
}

constexpr double kl_slack = 1e-9; // toy models have a divergence of about 1e-8

// return the logits that a context computes after each of several prompts. f changes the context after each prompt
std::vector<float> answers(side & s, const session_params & sp, const std::string & name, const std::function<void(session &)> & f) {
    std::vector<float> res;
    for (uint32_t i = 0; i < (s.params.quick ? 2u : 4u); ++i) {
        session c(s, sp, name);
        c.salt(i);
        c.fill(n_cells_of(s, 160));
        f(c);
        c.fill(64);
        res.insert(res.end(), c.logits().begin(), c.logits().end());
    }
    return res;
}

void nothing(session &) {
}

} // namespace

// test the reference itself, without changing the types of a context
// The reference converts the saved cells of a context to other types. A context with these types reads the converted cells. The
// error of its logits must be about as small as without a conversion.
// Then the reference converts the cells with each wrong rule for the rotation (enum class basis). In at least one chain, the
// error must then be more than 1.5 times as large, unless the rule has no effect.
static void kv_check_retype_basis(side & s) {
    // for each wrong rule: the error of the logits divided by the error with the right rule, maximum over all chains
    std::map<std::string, double> worst;

    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        const retype_step & step = steps.front();

        const auto exact = answers(s, session_with_types(sp, f16),     name + ".f16",  nothing);
        const auto start = answers(s, sp,                              name + ".from", nothing);
        const auto type  = answers(s, session_with_types(sp, step.to), name + ".to",   nothing);

        const error from  = error_of(start, exact, s.n_vocab);
        const error to    = error_of(type,  exact, s.n_vocab);
        const error bound = { std::max(from.rms, to.rms), std::max(from.kl, to.kl) };

        std::vector<state_parts> saved;
        answers(s, sp, name + ".saved", [&](session & c) { saved.push_back(kv_check_state_of(s, sp, c)); });

        const auto error_with = [&](basis how) {
            size_t i = 0;
            return error_of(answers(s, session_with_types(sp, step.to), name + ".converted", [&](session & c) {
                c.clear(true);
                if (c.state_set(state_convert(saved[i++], step.like, step.to, how).data) == 0) {
                    throw check_failed("the converted state cannot be read: " + s.last_error);
                }
            }), exact, s.n_vocab);
        };
        const error is = error_with(basis::by_graph);
        s.out.measure(name + " rms", ratio(is.rms, bound.rms));
        s.out.measure(name + " kl",  ratio(is.kl,  bound.kl));
        if (!(is.rms <= 1.5*bound.rms)) {
            throw check_failed(name + ": over converted cells the logits are off by " + std::to_string(ratio(is.rms, bound.rms)) + " times the error of the type");
        }
        const state_parts right = state_convert(saved[0], step.like, step.to);
        for (const basis how : { basis::kept, basis::by_type }) {
            if (state_convert(saved[0], step.like, step.to, how).data == right.data) {
                continue;
            }
            const std::string what = how == basis::kept ? "kept" : "by type";
            const double      more = ratio(error_with(how).rms, is.rms);
            s.out.measure(name + " " + what, more);
            worst[what] = std::max(worst[what], more);
        }
    });
    for (const auto & basis : worst) {
        // A ratio of 1 means that the rule has no effect on the logits. One cause is an indexer that selects all cells whatever
        // its keys are. `--override` can make the indexer of a toy select fewer cells.
        if (basis.second != 1.0 && !(basis.second > 1.5)) {
            throw check_failed("another basis (" + basis.first + ") gives " + std::to_string(basis.second) + " times the error at most: the right basis cannot be determined");
        }
    }
}

// check that a change of types does not make the logits worse
// An error is the distance of logits from the logits of an f16 cache. The error of a context after the change may be at most
// 1.5 times a bound. The bound is the larger error of two contexts: one has the old types, and the other has the new types from
// the start.
static void kv_check_retype_quality(side & s) {
    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        const retype_step & step = steps.front();

        const auto exact = answers(s, session_with_types(sp, f16), name + ".f16", nothing);
        const auto error_from = [&](const session_params & sp, const char * what, const std::function<void(session &)> & f) {
            return error_of(answers(s, sp, name + what, f), exact, s.n_vocab);
        };
        const error from = error_from(sp, ".from", nothing);
        const error to   = error_from(session_with_types(sp, step.to), ".to", nothing);
        const error is   = error_from(sp, ".changed", [&](session & c) { retype(s, sp, c, step, name); });

        const error bound = { std::max(from.rms, to.rms), std::max(from.kl, to.kl) };
        s.out.measure(name + " rms", ratio(is.rms, bound.rms));
        s.out.measure(name + " kl",  ratio(is.kl,  bound.kl));
        s.out.measure(name + " kl changed",        is.kl);
        s.out.measure(name + " kl from the start", bound.kl);
        if (!(is.rms <= 1.5*bound.rms) || !(is.kl <= 1.5*bound.kl + kl_slack)) {
            throw check_failed(name + ": changed, the logits are off by " + std::to_string(ratio(is.rms, bound.rms)) +
                " times the error of the type from the start, in KL divergence by " + std::to_string(ratio(is.kl, bound.kl)) + " times");
        }
    });
}

// test a change of types during which the device fails, so that all cells are lost
// Until a lost sequence is removed, a batch that continues this sequence must fail.
// The check needs a llama.cpp library that was built with such a failure of the device. With other libraries, it is skipped.
static void kv_check_lost(side & s) {
    const struct {
        const char * what;
        void      (* f)(llama_memory_t);
        llama_seq_id seq; // the sequence that continues
        int32_t      rc;
    } tries[] = {
        { "nothing else happened",    [](llama_memory_t) {},                                           0, -3 },
        { "a part of it is removed",  [](llama_memory_t mem) { llama_memory_seq_rm(mem,  0,  0,  5); }, 0, -3 },
        { "it is removed",            [](llama_memory_t mem) { llama_memory_seq_rm(mem,  0, -1, -1); }, 0,  0 },
        { "all sequences are",        [](llama_memory_t mem) { llama_memory_seq_rm(mem, -1, -1, -1); }, 0,  0 },
        { "the memory is cleared",    [](llama_memory_t mem) { llama_memory_clear(mem, true); },        0,  0 },
        { "another one had no cells", [](llama_memory_t) {},                                           1,  0 },
        { "it is copied to another",  [](llama_memory_t mem) { llama_memory_seq_cp(mem, 0, 1, -1, -1); }, 1, -3 },
    };
    for (const auto & t : tries) {
        session c(s, kv_check_base(s), "lost");
        if (t.seq >= (llama_seq_id) c.n_seqs()) {
            continue;
        }
        c.fill_seq(0, 100);
        if (c.try_retype({ GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }) != LLAMA_MEMORY_TYPE_LOST) {
            throw check_skipped("no device fails");
        }
        t.f(llama_get_memory(c.ctx));

        llama_batch batch = llama_batch_init(1, 0, 1);
        batch.n_tokens     = 1;
        batch.token[0]     = 1;
        batch.pos[0]       = 100;
        batch.n_seq_id[0]  = 1;
        batch.seq_id[0][0] = t.seq;
        batch.logits[0]    = true;
        const int32_t rc = llama_decode(c.ctx, batch);
        llama_batch_free(batch);

        if (rc != t.rc) {
            throw check_failed("a batch that continues after the cells were lost and " + std::string(t.what) + " returns " + std::to_string(rc));
        }
    }
}

// check that a change to q5_0 is refused if the device has no kernel that writes cells of type q5_0
// `--fake-device MIB,KIB,f16` makes such a device. On this device, a context with cells of type q5_0 could not be created
// either.
static void kv_check_no_kernel(side & s) {
    session c(s, kv_check_base(s), "no-kernel");
    c.fill(kv_check_n_fill(s.params));
    const auto before = c.state_get();
    const int32_t rc = c.try_retype({ GGML_TYPE_Q5_0, GGML_TYPE_Q5_0 });
    if (rc == LLAMA_MEMORY_TYPE_OK) {
        throw check_skipped("the device has such a kernel");
    }
    if (rc != LLAMA_MEMORY_TYPE_BACKEND || c.state_get() != before) {
        throw check_failed(std::string("a change to q5_0 is refused, but something has changed: ") + llama_memory_type_reason(rc));
    }
    c.generate(2);
}

// let an allocation fail during a change of types (--fail, --limit)
// After that, either all cells have the new types, or nothing has changed. In both cases the context can decode more tokens.
static void kv_check_retype_fail(side & s) {
    if (s.params.fail.empty() && s.params.limit_mib == 0) {
        throw check_skipped("no failing allocation is requested (--fail, --limit)");
    }
    for_each_chain(s, kv_check_base(s), [&](const session_params & sp, const std::vector<retype_step> & steps, const std::string & name) {
        session c(s, sp, name);
        c.fill(n_cells_of(s, 300));
        const auto before = kv_check_state_of(s, sp, c);
        const retype_step & step = steps.front();

        int32_t rc = 0;
        {
            const short_of_memory scope(s.params);
            rc = c.try_retype(step.to);
        }
        const auto after = c.state_get();
        if (rc == LLAMA_MEMORY_TYPE_OK) {
            must_equal(before, step, after, name + ", short of memory,");
            must_be(c, step.to);
        } else {
            if (rc != LLAMA_MEMORY_TYPE_NO_MEMORY) {
                throw check_failed(name + ", short of memory, is refused: " + llama_memory_type_reason(rc));
            }
            if (after != before.data) {
                throw check_failed(name + " finds no memory, but something has changed");
            }
            must_be(c, sp.types);
            c.try_retype(step.to);
            must_equal(before, step, c.state_get(), name + ", with memory again,");
        }
        c.generate(2);
    });
}

//
// functions of the sessions
//

int32_t session::try_retype(const cell_types & types) {
    s.out.event(TRACE_OURS, "", 1);
    return llama_set_memory_type(ctx, types.k, types.v);
}

int32_t session::retype(const cell_types & types) {
    const int32_t rc = try_retype(types);
    s.out.value(name + ".retype(" + to_string(types) + ")", rc);
    return rc;
}

cell_types session::types() const {
    cell_types res;
    llama_get_memory_type(ctx, &res.k, &res.v);
    return res;
}

void kv_check_set_budget(session_params & sp, llama_memory_budget * budget) {
    sp.on_create = nullptr;
    if (budget) {
        sp.on_create = [budget](llama_context * ctx) { return llama_memory_budget_add(budget, ctx); };
    }
}

static const kv_check_registration scenarios({
    { "retype-bits",     kv_check_retype_bits,     "retype-bits", false },
    { "retype-shift",    kv_check_retype_shift,    "retype-shift", false },
    { "retype-generate", kv_check_retype_generate, "retype-generate", false },
    { "retype-restore",  kv_check_retype_restore,  "retype-restore", false },
    { "retype-grow",     kv_check_retype_grow,     "retype-grow", false },
    { "retype-basis",    kv_check_retype_basis,    "retype-basis", false },
    { "retype-quality",  kv_check_retype_quality,  "retype-quality", false },
    { "retype-fail",     kv_check_retype_fail,     "retype-fail", false },
    { "lost",            kv_check_lost,            "lost", false },
    { "no-kernel",       kv_check_no_kernel,       "no-kernel", false },
});

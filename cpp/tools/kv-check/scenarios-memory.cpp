// Memory runs out while the cache grows: --fail says at which allocation, --limit how much the system still gives.
//
// What the failed batch returned is not compared, the static side has none that fails. Compared is what is left: the old
// cells are as they were, and what fits is served.

#include "scenarios.h"
#include "short-of-memory.h"

#include <algorithm>
#include <vector>

void kv_check_no_memory(side & s) {
    if (s.params.fail.empty() && s.params.limit_mib == 0) {
        throw check_skipped("no allocation is to fail (--fail, --limit)");
    }
    session_params sp = kv_check_base(s);

    // the cache has not grown yet. --fill N: up to there, for rows that come with every so many positions (DSV4)
    const uint32_t n_before = s.params.n_fill > 340 ? s.params.n_fill - 100 : 240;

    session_params large = sp;
    large.dynamic = false;
    session a(s, large, "large");
    a.fill(n_before + 200);
    const auto state = a.state_get();

    // a window forgets positions for a batch that then fails, and recurrent layers cannot go back
    const bool keeps = !s.is_recurrent && !s.is_hybrid && llama_model_n_swa(s.model) == 0;

    session c(s, sp, "short");
    c.fill(n_before);

    for (const uint32_t n : { 60u, 90u, 300u }) {
        const auto before = c.positions();
        {
            const short_of_memory scope(s.params, s.dynamic);
            c.try_fill(std::min(n, sp.n_cells - n_before));
            c.try_fill(20);
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

    // a copy of a stream that finds no memory waits: no batch runs without it
    if (keeps && sp.n_streams() > 1) {
        session e(s, sp, "copy");
        e.fill_seq(0, 300);
        e.rm(0, 0, 50); // room where there are pages already: the copy alone wants more

        const auto last_logits = [&] {
            const float * row = llama_get_logits_ith(e.ctx, -1);
            return row ? std::vector<float>(row, row + s.n_vocab) : std::vector<float>();
        };

        std::vector<llama_pos> before;
        std::vector<float>     logits; // of the batch, if it ran
        {
            const short_of_memory scope(s.params, s.dynamic);
            e.cp(0, 1);
            before = e.positions();
            if (e.try_fill(4) == 0) {
                logits = last_logits();
            }
            e.go_back(before);
        }
        if (e.try_fill(4) != 0 || (!logits.empty() && logits != last_logits())) {
            throw check_failed("a batch ran without the copy that it reads, or does not run at all");
        }
        e.go_back(before);
        e.generate(3);
    }

    session d(s, sp, "state");
    d.fill(20);
    {
        const short_of_memory scope(s.params, s.dynamic);
        d.try_state(state);
    }
    d.clear(true);
    d.fill(n_before);
    d.generate(40);
}

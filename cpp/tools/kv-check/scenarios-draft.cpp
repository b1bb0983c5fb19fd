// Checks two kinds of drafts. The first kind (gemma4-assistant) has no cells: it reads the cells of its target, whose storage
// moves when it grows. The second kind is the MTP layer of a model, whose context has cells of its own.

#include "scenarios.h"

#include <algorithm>
#include <vector>

namespace {

// the context of a draft model
class draft_session {
  public:
    draft_session(side & s, const session_params & sp, const session & target, const std::string & name) : s(s), target(target), name(name) {
        llama_context_params cparams = session_context_params(s.params, sp);
        cparams.ctx_other = target.ctx;
        // both kinds of drafts read tokens and hidden states of the target, as contexts of an MTP layer do
        cparams.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
        ctx = llama_init_from_model(s.draft, cparams);
        if (ctx == nullptr) {
            throw check_failed("the draft context cannot be created: " + s.last_error);
        }
        n_batch = llama_n_batch(ctx);
        batch   = llama_batch_init((int32_t) n_batch, llama_model_n_embd_inp(s.draft), 1);
        tokens.resize(n_batch);
        batch.token = tokens.data(); // llama_batch_init() allocates only one kind of input, and a draft needs tokens and embeddings
        n_past.resize(target.n_seqs(), 0);
    }

    ~draft_session() {
        batch.token = nullptr;
        llama_batch_free(batch);
        llama_free(ctx);
    }

    draft_session(const draft_session &) = delete;
    draft_session & operator=(const draft_session &) = delete;

    // draft one token for each sequence, after the target's tokens
    void draft() {
        for (uint32_t seq = 0; seq < target.n_seqs(); ++seq) {
            draft_seq((llama_seq_id) seq);
        }
    }

    // draft one token for each sequence in one batch. Call this only for a draft without cells of its own
    void draft_together() {
        batch.n_tokens = 0;
        for (uint32_t seq = 0; seq < target.n_seqs(); ++seq) {
            add((llama_seq_id) seq, target.past((llama_seq_id) seq), seq + 1 == target.n_seqs());
        }
        decode();
    }

  private:
    void draft_seq(llama_seq_id seq) {
        if (!s.params.mtp) {
            decode(seq, target.past(seq), target.past(seq) + 1);
            return;
        }

        // a draft with its own cells: remove the positions that the target has removed, and decode the missing ones
        if (n_past[seq] > target.past(seq)) {
            llama_memory_seq_rm(llama_get_memory(ctx), seq, target.past(seq), -1);
            n_past[seq] = target.past(seq);
        }
        while (n_past[seq] <= target.past(seq)) {
            const llama_pos end = std::min(target.past(seq) + 1, n_past[seq] + (llama_pos) n_batch);
            decode(seq, n_past[seq], end);
            n_past[seq] = end;
        }
    }

    // decode the tokens at the positions [p0, p1). The output of the last token is compared: it depends on all cells
    void decode(llama_seq_id seq, llama_pos p0, llama_pos p1) {
        batch.n_tokens = 0;
        for (llama_pos pos = p0; pos < p1; ++pos) {
            add(seq, pos, pos + 1 == p1);
        }
        decode();
    }

    void add(llama_seq_id seq, llama_pos pos, bool output) {
        const int32_t n_embd  = llama_model_n_embd_inp(s.draft);
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(s.draft));
        const int32_t it      = batch.n_tokens++;

        // use any numbers instead of the target's hidden state
        for (int32_t i = 0; i < n_embd; ++i) {
            batch.embd[it*n_embd + i] = (float) ((i*37 + pos*11 + seq*5) % 64)/32.0f - 1.0f;
        }
        tokens[it]          = (llama_token) ((pos*7 + seq) % n_vocab);
        batch.pos[it]       = pos;
        batch.n_seq_id[it]  = 1;
        batch.seq_id[it][0] = seq;
        batch.logits[it]    = output;
    }

    void decode() {
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(s.draft));

        const int32_t rc = llama_decode(ctx, batch);
        const float * row = rc == 0 ? llama_get_logits_ith(ctx, -1) : nullptr;

        std::vector<float> data;
        if (row != nullptr) {
            data.assign(row, row + n_vocab);
        }
        s.out.decode(name + ".draft[" + std::to_string(n_drafts++) + "]", rc, row != nullptr, (uint32_t) n_vocab, data);
        if (rc != 0) {
            throw check_failed("llama_decode() of the draft returned " + std::to_string(rc) + ": " + s.last_error);
        }
    }

    side &          s;
    const session & target;
    std::string     name;
    llama_context * ctx = nullptr;
    llama_batch     batch;
    uint32_t        n_batch;
    uint32_t        n_drafts = 0;

    std::vector<llama_token> tokens;
    std::vector<llama_pos>   n_past; // number of positions of each sequence in an MTP context
};

} // namespace

void kv_check_draft(side & s) {
    if (s.draft == nullptr) {
        throw check_skipped("no draft model is given (--draft, --mtp)");
    }
    const session_params sp = kv_check_base(s);

    session       target(s, sp, "target");
    draft_session d(s, sp, target, "draft");

    // let the target grow between two drafts: during generation, in a prompt, and when it restores a state
    target.fill(200);
    d.draft();
    const auto small = target.state_get();
    for (uint32_t i = 0; i < 6; ++i) {
        target.fill(12);
        d.draft();
    }
    target.fill(std::max<uint32_t>(kv_check_n_fill(s.params), 330) - 280);
    d.draft();
    const auto large = target.state_get();

    session       fresh(s, sp, "fresh");
    draft_session e(s, sp, fresh, "draft-of-fresh");
    fresh.state_set(small);
    e.draft();
    fresh.state_set(large);
    fresh.state_set(small); // as many cells as at the last draft, but at another address
    e.draft();
    fresh.state_set(large);
    e.draft();
    fresh.generate(2);
    e.draft();

    // remove the last tokens of the target, and let it grow again
    for (uint32_t seq = 0; seq < target.n_seqs(); ++seq) {
        target.rm((llama_seq_id) seq, target.past((llama_seq_id) seq) - 5, -1);
    }
    d.draft();
    target.fill(100);
    d.draft();

    if (s.params.mtp || sp.n_seqs < 2) {
        return;
    }

    // sequences of different lengths, which the target has never decoded in one batch
    session       uneven(s, sp, "uneven");
    draft_session f(s, sp, uneven, "draft-of-uneven");
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        uneven.fill_seq((llama_seq_id) seq, seq % 2 ? 500 : 60);
    }
    f.draft_together();
}

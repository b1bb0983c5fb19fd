#include "session.h"

#include <algorithm>

void session_set_dynamic(llama_context_params & cparams, bool dynamic) {
    cparams.kv_dynamic = dynamic;
}

llama_context_params session_context_params(const kv_check_params & params, const session_params & sp) {
    llama_context_params res = llama_context_default_params();

    res.n_ctx           = sp.n_cells*sp.n_streams();
    res.n_batch         = sp.n_cells*sp.n_streams(); // one llama_decode() may fill the whole context
    res.n_ubatch        = params.n_ubatch;
    res.n_seq_max       = sp.n_seqs;
    res.n_threads       = params.n_threads;
    res.n_threads_batch = params.n_threads;
    res.flash_attn_type = params.flash_attn;
    res.type_k          = sp.types.k;
    res.type_v          = sp.types.v;
    res.embeddings      = params.embeddings;
    res.offload_kqv     = params.offload_kqv;
    res.swa_full        = params.swa_full;
    res.kv_unified      = sp.unified;
    res.no_perf         = false;
    if (params.embeddings) {
        res.pooling_type = params.pooling;
    }
    res.n_rs_seq = sp.n_rs_seq;
    session_set_dynamic(res, sp.dynamic);

    return res;
}

session_params session_with_types(session_params sp, const cell_types & types) {
    sp.types = types;
    return sp;
}

bool session_can_create(const side & s, session_params sp) {
    sp.dynamic = false;
    llama_context * ctx = llama_init_from_model(s.model, session_context_params(s.params, sp));
    llama_free(ctx);
    return ctx != nullptr;
}

session::session(side & s, const session_params & sp, const std::string & name) : s(s), sp(sp), name(name) {
    ctx = llama_init_from_model(s.model, session_context_params(s.params, sp));
    if (ctx == nullptr) {
        throw check_failed("the context cannot be created: " + s.last_error);
    }
    if (sp.on_create && !sp.on_create(ctx) && sp.dynamic) {
        llama_free(ctx);
        throw check_skipped("this upstream has no budget");
    }
    if (s.first_context) {
        s.out.event(TRACE_KV_SIZE, "", (int64_t) llama_get_memory_usage(ctx).committed);
    }
    s.first_context = false;
    if (s.params.self_ctx == 0) {
        // llama_n_ctx() must return the full size of the context, also with a cache that starts small
        s.out.value(name + ".n_ctx",     llama_n_ctx(ctx));
        s.out.value(name + ".n_ctx_seq", llama_n_ctx_seq(ctx));
    }
    mem = llama_get_memory(ctx);
    if (mem == nullptr) {
        llama_free(ctx);
        throw check_skipped("this model has no memory");
    }
    n_past.resize(sp.n_seqs, 0);
    try {
        encode();
    } catch (...) {
        llama_free(ctx);
        throw;
    }
}

session::~session() {
    llama_free(ctx);
}

llama_token session::token(llama_seq_id seq, llama_pos pos) const {
    if (!s.text.empty()) {
        // each sequence begins at another place of the text, and so does each value of token_salt
        return s.text[((size_t) pos + 499*(size_t) seq + 2003*(size_t) token_salt) % s.text.size()];
    }
    uint32_t x = (uint32_t) pos*2654435761u ^ ((uint32_t) seq + 1)*40503u ^ (token_salt + 1)*2246822519u ^ s.params.seed*3266489917u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (llama_token) (x % s.n_vocab);
}

// run the encoder of an encoder-decoder model, which is needed before the first llama_decode()
void session::encode() {
    if (!llama_model_has_encoder(s.model) || !llama_model_has_decoder(s.model)) {
        return;
    }
    const int32_t n = 32;
    llama_batch batch = llama_batch_init(n, 0, (int32_t) sp.n_seqs);
    for (int32_t i = 0; i < n; ++i) {
        batch.token[i]    = token(0, 1000 + i);
        batch.pos[i]      = i;
        batch.n_seq_id[i] = (int32_t) sp.n_seqs;
        for (uint32_t j = 0; j < sp.n_seqs; ++j) {
            batch.seq_id[i][j] = (llama_seq_id) j;
        }
        batch.logits[i]   = true;
    }
    batch.n_tokens = n;
    const int32_t rc = llama_encode(ctx, batch);
    llama_batch_free(batch);
    s.out.value(name + ".encode", rc);
    if (rc != 0) {
        throw check_failed("llama_encode() returned " + std::to_string(rc) + ": " + s.last_error);
    }
}

std::vector<llama_seq_id> session::next_order(uint32_t n) {
    std::vector<llama_seq_id> order;
    if (sp.unified) {
        // place many tokens one sequence after the other, as in prompts. With few tokens, alternate between the sequences, as
        // in generation
        for (uint32_t i = 0; i < n; ++i) {
            order.push_back((llama_seq_id) ((turn + i) % sp.n_seqs));
        }
        turn = (turn + n) % sp.n_seqs;
        if (n/sp.n_seqs >= 32) {
            std::stable_sort(order.begin(), order.end());
        }
    } else {
        for (uint32_t i = 0; i < n; ++i) {
            for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
                order.push_back((llama_seq_id) seq);
            }
        }
        if (n >= 32) {
            std::stable_sort(order.begin(), order.end());
        }
    }
    return order;
}

int32_t session::fill(uint32_t n, bool must) {
    return decode(next_order(n), must);
}

void session::fill_unread(uint32_t n) {
    decode(next_order(n), true, record::code);
}

int32_t session::try_fill(uint32_t n) {
    return decode(next_order(n), false, record::nothing);
}

int32_t session::fill_seq(llama_seq_id seq, uint32_t n, bool must) {
    return decode(std::vector<llama_seq_id>(n, seq), must);
}

void session::generate(uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        fill(1);
    }
}

int32_t session::decode(const std::vector<llama_seq_id> & order, bool must, record what) {
    const int32_t n = (int32_t) order.size();
    if (n == 0) {
        return 0;
    }

    // With a large vocabulary, the logits of all tokens would need gigabytes. Then compare the logits of every stride-th token,
    // and always those of the last token.
    const int32_t stride = 1 + (int32_t) (s.n_vocab/8192);

    std::vector<llama_pos> pos_next = n_past;
    std::vector<int32_t>   outputs;

    llama_batch batch = llama_batch_init(n, 0, 1);
    for (int32_t i = 0; i < n; ++i) {
        const llama_seq_id seq = order[i];
        batch.token[i]     = token(seq, pos_next[seq]);
        batch.pos[i]       = pos_next[seq]++;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = i == n - 1 || (what == record::rows && (s.params.embeddings || i % stride == stride - 1));
        if (batch.logits[i]) {
            outputs.push_back(i);
        }
    }
    batch.n_tokens = n;

    const std::string label = name + ".decode[" + std::to_string(n_decodes) + "](" + std::to_string(n) + ")";
    if (what != record::nothing) {
        n_decodes++;
    }

    const int32_t rc = llama_decode(ctx, batch);
    if (what != record::code) {
        llama_synchronize(ctx);
    }
    llama_batch_free(batch);

    if (rc == 0) {
        n_past = pos_next;
    } else {
        outputs.clear();
    }
    if (what == record::rows) {
        record_rows(label, rc, outputs);
    } else if (what == record::code) {
        s.out.value(label, rc);
    }
    if (what != record::nothing) {
        record_positions();
    }

    if (rc != 0 && must) {
        throw check_failed(label + " returned " + std::to_string(rc) + (s.last_error.empty() ? "" : ": " + s.last_error));
    }
    return rc;
}

void session::record_counted() {
    // If llama_decode() waited for the device during a growth, the library would already count the tokens of the batch there,
    // but almost none of the time of their computation. So n_p_eval must be equal with the static and the dynamic cache.
    s.out.value(name + ".tokens", llama_perf_context(ctx).n_p_eval);
}

void session::record_rows(const std::string & label, int32_t rc, const std::vector<int32_t> & outputs) {
    std::vector<float> data;

    if (s.params.embeddings) {
        uint32_t rows = 0;
        const bool pooled = llama_pooling_type(ctx) != LLAMA_POOLING_TYPE_NONE;
        const size_t n = outputs.empty() ? 0 : pooled ? sp.n_seqs : outputs.size();
        for (size_t i = 0; i < n; ++i) {
            const float * row = pooled ? llama_get_embeddings_seq(ctx, (llama_seq_id) i) : llama_get_embeddings_ith(ctx, outputs[i]);
            if (row != nullptr) {
                data.insert(data.end(), row, row + s.n_embd_out);
                rows++;
            }
        }
        s.out.decode(label + ".embd", rc, rows, s.n_embd_out, data);
        if (pooled) {
            return; // with pooling, there are no logits
        }
        data.clear();
    }

    uint32_t rows = 0;
    for (int32_t i : outputs) {
        const float * row = llama_get_logits_ith(ctx, i);
        if (row != nullptr) {
            data.insert(data.end(), row, row + s.n_vocab);
            rows++;
        }
    }
    s.out.decode(label, rc, rows, s.n_vocab, data);
    last_logits = std::move(data);
}

void session::record_positions() {
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        s.out.value(name + ".pos_min[" + std::to_string(seq) + "]", llama_memory_seq_pos_min(mem, (llama_seq_id) seq));
        s.out.value(name + ".pos_max[" + std::to_string(seq) + "]", llama_memory_seq_pos_max(mem, (llama_seq_id) seq));
    }
}

void session::sync_positions() {
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        n_past[seq] = llama_memory_seq_pos_max(mem, (llama_seq_id) seq) + 1;
    }
    record_positions();
}

bool session::rm(llama_seq_id seq, llama_pos p0, llama_pos p1) {
    const bool ok = llama_memory_seq_rm(mem, seq, p0, p1);
    s.out.value(name + ".seq_rm(" + std::to_string(seq) + "," + std::to_string(p0) + "," + std::to_string(p1) + ")", ok);
    sync_positions();
    return ok;
}

void session::go_back(const std::vector<llama_pos> & to) {
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        llama_memory_seq_rm(mem, (llama_seq_id) seq, to[seq], -1);
    }
    sync_positions();
}

void session::cp(llama_seq_id src, llama_seq_id dst, llama_pos p0, llama_pos p1) {
    llama_memory_seq_cp(mem, src, dst, p0, p1);
    sync_positions();
}

void session::keep(llama_seq_id seq) {
    llama_memory_seq_keep(mem, seq);
    sync_positions();
}

void session::add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta) {
    llama_memory_seq_add(mem, seq, p0, p1, delta);
    sync_positions();
}

void session::div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d) {
    llama_memory_seq_div(mem, seq, p0, p1, d);
    sync_positions();
}

void session::clear(bool data) {
    llama_memory_clear(mem, data);
    sync_positions();
    turn = 0; // a batch that only one side refused must not change the order of the sequences in later batches
}

bool session::can_shift(const std::string & label) {
    const bool res = llama_memory_can_shift(mem);
    s.out.value(name + ".can_shift " + label, res);
    return res;
}

void session::shift(uint32_t n_keep, uint32_t n_drop) {
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        const llama_pos p0 = (llama_pos) n_keep;
        const llama_pos p1 = (llama_pos) (n_keep + n_drop);
        if (n_past[seq] <= p1) {
            continue;
        }
        if (rm((llama_seq_id) seq, p0, p1)) {
            add((llama_seq_id) seq, p1, -1, -(llama_pos) n_drop);
        }
    }
}

std::vector<uint8_t> session::state_get() {
    std::vector<uint8_t> res(llama_state_get_size(ctx));
    const size_t n = llama_state_get_data(ctx, res.data(), res.size());
    if (n == 0 || n != res.size()) {
        throw check_failed("llama_state_get_data() returned " + std::to_string(n) + " of " + std::to_string(res.size()) + " bytes: " + s.last_error);
    }
    return res;
}

size_t session::state_set(const std::vector<uint8_t> & data) {
    const size_t n = llama_state_set_data(ctx, data.data(), data.size());
    s.out.value(name + ".state_set complete", n == data.size());
    sync_positions();
    return n;
}

size_t session::try_state(const std::vector<uint8_t> & data, llama_seq_id seq) {
    return seq < 0 ? llama_state_set_data(ctx, data.data(), data.size()) : llama_state_seq_set_data(ctx, data.data(), data.size(), seq);
}

std::vector<uint8_t> session::try_state_get(llama_seq_id seq) {
    std::vector<uint8_t> res(llama_state_seq_get_size(ctx, seq));
    res.resize(llama_state_seq_get_data(ctx, res.data(), res.size(), seq));
    return res;
}

std::vector<std::vector<uint8_t>> session::states() {
    std::vector<std::vector<uint8_t>> res;
    for (uint32_t seq = 0; seq < sp.n_seqs; ++seq) {
        res.push_back(try_state_get((llama_seq_id) seq));
    }
    return res;
}

std::vector<uint8_t> session::state_seq_get(llama_seq_id seq, llama_state_seq_flags flags) {
    std::vector<uint8_t> res(llama_state_seq_get_size_ext(ctx, seq, flags));
    const size_t n = llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq, flags);
    if (n == 0 || n != res.size()) {
        throw check_failed("llama_state_seq_get_data_ext() returned " + std::to_string(n) + " of " + std::to_string(res.size()) + " bytes: " + s.last_error);
    }
    return res;
}

size_t session::state_seq_set(llama_seq_id seq, const std::vector<uint8_t> & data, llama_state_seq_flags flags) {
    const size_t n = llama_state_seq_set_data_ext(ctx, data.data(), data.size(), seq, flags);
    s.out.value(name + ".state_seq_set complete", n == data.size());
    sync_positions();
    return n;
}

bool session::file_save(const std::string & path) {
    const llama_token tokens[] = { 1, 2, 3 };
    const bool res = llama_state_save_file(ctx, path.c_str(), tokens, 3);
    s.out.value(name + ".file_save", res);
    return res;
}

bool session::file_load(const std::string & path) {
    llama_token tokens[8];
    size_t n_tokens = 0;
    const bool res = llama_state_load_file(ctx, path.c_str(), tokens, 8, &n_tokens);
    s.out.value(name + ".file_load", res);
    s.out.value(name + ".file_load tokens", (int64_t) n_tokens);
    sync_positions();
    return res;
}

void session::record_state() {
    s.out.blob(name + ".state", state_get());
}

#pragma once

#include "args.h"
#include "trace.h"

#include "llama-kv.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// thrown if a check cannot continue. The text is the reason
struct check_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// thrown if a check does not apply to this model
struct check_skipped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// the run with the static cache, or the run with the dynamic cache: the model, and the trace of the results
struct side {
    side(const kv_check_params & params, llama_model * model, trace_writer & out, bool dynamic) :
        params(params), model(model), out(out), dynamic(dynamic) {}

    const kv_check_params & params;
    llama_model *           model;
    trace_writer &          out;
    bool                    dynamic;

    llama_model * draft = nullptr; // the model of --draft. null: none

    std::vector<llama_token> text; // the tokens of --text. empty without --text

    std::string last_error; // the last line that was logged as an error

    std::string arch;

    uint32_t n_vocab      = 0;
    uint32_t n_embd_out   = 0;
    bool     is_recurrent = false; // the model has only recurrent states
    bool     is_hybrid    = false; // the model has recurrent states and a KV cache

    bool first_context = true; // the buffer sizes of the next context are recorded

    // the same run with another trace
    side(const side & s, trace_writer & out) : side(s.params, s.model, out, s.dynamic) {
        arch          = s.arch;
        n_vocab       = s.n_vocab;
        n_embd_out    = s.n_embd_out;
        is_recurrent  = s.is_recurrent;
        is_hybrid     = s.is_hybrid;
        first_context = false;
        text          = s.text;
    }
};

// parameters that differ between the contexts of a check
struct session_params {
    bool     dynamic;
    bool     unified;
    uint32_t n_seqs;
    uint32_t n_cells;  // cells per stream
    uint32_t n_rs_seq = 0;

    cell_types types; // types of the cells

    std::function<bool(llama_context *)> on_create; // called with each new context. if it returns false, the check does not apply

    uint32_t n_streams() const { return unified ? 1 : n_seqs; }
};

// set llama_context_params::kv_dynamic
void session_set_dynamic(llama_context_params & cparams, bool dynamic);

llama_context_params session_context_params(const kv_check_params & params, const session_params & sp);

session_params session_with_types(session_params sp, const cell_types & types);

// return true if a context with these parameters and a static cache can be created
bool session_can_create(const side & s, session_params sp);

// a context and the positions of its sequences. Every call records its result in the trace
class session {
  public:
    session(side & s, const session_params & sp, const std::string & name);
    ~session();

    session(const session &) = delete;
    session & operator=(const session &) = delete;

    // decode n more cells in each stream with one llama_decode(). The cells are spread over the sequences of the stream
    // must: true means: the check fails if llama_decode() does not return 0. false means: the return code is only recorded
    int32_t fill(uint32_t n, bool must = true);

    // decode n more tokens of one sequence
    int32_t fill_seq(llama_seq_id seq, uint32_t n, bool must = true);

    // decode one token for each of these sequences
    int32_t fill_order(const std::vector<llama_seq_id> & order, bool must = false) { return decode(order, must); }

    // decode n more cells in each stream, one token at a time
    void generate(uint32_t n);

    // do the same as fill() without reading the results, so that the device still computes during the next call
    void fill_unread(uint32_t n);

    // do the same as fill(), state_set() and state_seq_get() without a record, because they may fail with only one of the caches
    int32_t try_fill(uint32_t n);
    size_t  try_state(const std::vector<uint8_t> & data, llama_seq_id seq = -1); // -1: all sequences
    std::vector<uint8_t> try_state_get(llama_seq_id seq);

    std::vector<std::vector<uint8_t>> states(); // state of each sequence, without a record

    // return the next position of each sequence
    std::vector<llama_pos> positions() const { return n_past; }

    // remove the tokens that were decoded after positions() had returned `to`
    void go_back(const std::vector<llama_pos> & to);

    // record the number of prompt tokens that the library has counted as computed (n_p_eval). Call this after fill_unread() and
    // before llama_synchronize()
    // The library counts tokens when it waits for the device. With many outputs, llama_decode() itself waits, so the number is
    // larger.
    void record_counted();

    // memory operations. They record their result and update the positions
    bool rm (llama_seq_id seq, llama_pos p0, llama_pos p1);
    void cp (llama_seq_id src, llama_seq_id dst, llama_pos p0 = -1, llama_pos p1 = -1);
    void keep(llama_seq_id seq);
    void add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta);
    void div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d);
    void clear(bool data);
    bool can_shift(const std::string & label);

    // change the types of the cells, see scenarios-types.cpp
    // A static cache also runs code of the patches during the change. So from the first call on, a failure with the static
    // cache counts as a failure of the patches, not of upstream.
    int32_t    retype(const cell_types & types);
    int32_t    try_retype(const cell_types & types); // without a record
    cell_types types() const;

    // remove n_drop tokens of each sequence after the first n_keep, and move the later tokens down, as llama-server does
    void shift(uint32_t n_keep, uint32_t n_drop);

    std::vector<uint8_t> state_get();
    size_t               state_set(const std::vector<uint8_t> & data);
    std::vector<uint8_t> state_seq_get(llama_seq_id seq, llama_state_seq_flags flags = 0);
    size_t               state_seq_set(llama_seq_id seq, const std::vector<uint8_t> & data, llama_state_seq_flags flags = 0);

    bool file_save(const std::string & path);
    bool file_load(const std::string & path);

    // record the bytes of the state, for the comparison
    void record_state();

    uint32_t n_seqs() const { return sp.n_seqs; }
    uint32_t n_cells() const { return sp.n_cells; }
    llama_pos past(llama_seq_id seq) const { return n_past[seq]; }

    // return true if the cache grows in place. Call this before the first decode: a cache that grows by copy starts with twice as
    // many cells
    bool is_in_place() const { return llama_get_memory_usage(ctx).n_cells == 256*sp.n_streams(); }

    void salt(uint32_t val) { token_salt = val; } // use other tokens from here on

    // return the logits of the last recorded batch
    const std::vector<float> & logits() const { return last_logits; }

    llama_context * ctx = nullptr;

  private:
    std::vector<llama_seq_id> next_order(uint32_t n);

    // the results of a batch that are recorded
    enum class record { rows, code, nothing };

    int32_t decode(const std::vector<llama_seq_id> & order, bool must, record what = record::rows);
    void    record_rows(const std::string & label, int32_t rc, const std::vector<int32_t> & outputs);
    void    record_positions();
    void    sync_positions();
    void    encode();

    llama_token token(llama_seq_id seq, llama_pos pos) const;

    side &         s;
    session_params sp;
    std::string    name;

    llama_memory_t mem = nullptr;

    std::vector<llama_pos> n_past;
    std::vector<float>     last_logits;

    uint32_t turn       = 0; // sequence of the next token in a unified cache
    uint32_t token_salt = 0;
    uint32_t n_decodes  = 0;
};

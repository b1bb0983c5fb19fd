#pragma once

#include "args.h"
#include "trace.h"

#include "llama-kv.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// thrown if a check cannot continue; the text is its reason
struct check_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// thrown if a check does not apply to this model
struct check_skipped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// one of the two compared sides: its model, and the trace of its results
struct side {
    side(const kv_check_params & params, llama_model * model, trace_writer & out, bool dynamic) :
        params(params), model(model), out(out), dynamic(dynamic) {}

    const kv_check_params & params;
    llama_model *           model;
    trace_writer &          out;
    bool                    dynamic;

    llama_model * draft = nullptr; // the model of --draft

    std::vector<llama_token> text; // the tokens of --text, empty without it

    std::string last_error; // the last logged error line

    std::string arch;

    uint32_t n_vocab      = 0;
    uint32_t n_embd_out   = 0;
    bool     is_recurrent = false; // only recurrent state
    bool     is_hybrid    = false; // recurrent state and a KV cache

    bool first_context = true; // its buffer sizes are recorded

    // the same side, with another trace
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
    uint32_t n_cells;  // per stream
    uint32_t n_rs_seq = 0;

    cell_types types; // of the cells

    std::function<bool(llama_context *)> on_create; // called with the new context. false: the check does not apply

    uint32_t n_streams() const { return unified ? 1 : n_seqs; }
};

// the value of llama_context_params::kv_dynamic
void session_set_dynamic(llama_context_params & cparams, bool dynamic);

llama_context_params session_context_params(const kv_check_params & params, const session_params & sp);

session_params session_with_types(session_params sp, const cell_types & types);

// return true if a static context with these parameters can be created
bool session_can_create(const side & s, session_params sp);

// a context and the position of each of its sequences; every call records its result in the side's trace
class session {
  public:
    session(side & s, const session_params & sp, const std::string & name);
    ~session();

    session(const session &) = delete;
    session & operator=(const session &) = delete;

    // decode n more cells in each stream, spread over its sequences, in one llama_decode(). must: a return code other
    // than 0 ends the check, otherwise it is only recorded
    int32_t fill(uint32_t n, bool must = true);

    // decode n more tokens of one sequence
    int32_t fill_seq(llama_seq_id seq, uint32_t n, bool must = true);

    // decode a token for each of these sequences
    int32_t fill_order(const std::vector<llama_seq_id> & order, bool must = false) { return decode(order, must); }

    // the same, one token at a time
    void generate(uint32_t n);

    // fill() without reading the results: the device still works during the next call
    void fill_unread(uint32_t n);

    // fill(), state_set() and state_seq_get() without a record, because they may fail on one side
    int32_t try_fill(uint32_t n);
    size_t  try_state(const std::vector<uint8_t> & data, llama_seq_id seq = -1); // -1: of all sequences
    std::vector<uint8_t> try_state_get(llama_seq_id seq);

    std::vector<std::vector<uint8_t>> states(); // of each sequence, without a record

    // return the next position of each sequence, or return to these positions
    std::vector<llama_pos> positions() const { return n_past; }
    void go_back(const std::vector<llama_pos> & to);

    // return the tokens that the library counts as computed before a wait. with many outputs it waits itself
    void record_counted();

    // memory operations, which record their result and update the positions
    bool rm (llama_seq_id seq, llama_pos p0, llama_pos p1);
    void cp (llama_seq_id src, llama_seq_id dst, llama_pos p0 = -1, llama_pos p1 = -1);
    void keep(llama_seq_id seq);
    void add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta);
    void div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d);
    void clear(bool data);
    bool can_shift(const std::string & label);

    // change the types of the cells, see scenarios-types.cpp. after the first call, the static side also runs code of
    // this series, so its failures count
    int32_t    retype(const cell_types & types);
    int32_t    try_retype(const cell_types & types); // without a record
    cell_types types() const;

    // remove n tokens of each sequence after the first n_keep and move the rest down, like llama-server
    void shift(uint32_t n_keep, uint32_t n_drop);

    std::vector<uint8_t> state_get();
    size_t               state_set(const std::vector<uint8_t> & data);
    std::vector<uint8_t> state_seq_get(llama_seq_id seq, llama_state_seq_flags flags = 0);
    size_t               state_seq_set(llama_seq_id seq, const std::vector<uint8_t> & data, llama_state_seq_flags flags = 0);

    bool file_save(const std::string & path);
    bool file_load(const std::string & path);

    // record the state's bytes for the comparison
    void record_state();

    uint32_t n_seqs() const { return sp.n_seqs; }
    uint32_t n_cells() const { return sp.n_cells; }
    llama_pos past(llama_seq_id seq) const { return n_past[seq]; }

    // before the first decode: by copy it starts with twice as many
    bool is_in_place() const { return llama_get_memory_usage(ctx).n_cells == 256*sp.n_streams(); }

    void salt(uint32_t val) { token_salt = val; } // use other tokens from here on

    // return the logits of the last recorded batch
    const std::vector<float> & logits() const { return last_logits; }

    llama_context * ctx = nullptr;

  private:
    std::vector<llama_seq_id> next_order(uint32_t n);

    // record the results of a batch
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

    uint32_t turn       = 0; // the sequence of the next token in a unified cache
    uint32_t token_salt = 0;
    uint32_t n_decodes  = 0;
};

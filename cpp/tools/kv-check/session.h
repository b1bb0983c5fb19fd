#pragma once

#include "args.h"
#include "trace.h"

#include "llama-kv.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

// a check cannot go on; the text becomes its reason
struct check_failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// a check does not apply to this model
struct check_skipped : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// one of the two sides that are compared: its model, and where it writes down what it sees
struct side {
    side(const kv_check_params & params, llama_model * model, trace_writer & out, bool dynamic) :
        params(params), model(model), out(out), dynamic(dynamic) {}

    const kv_check_params & params;
    llama_model *           model;
    trace_writer &          out;
    bool                    dynamic;

    llama_model * draft = nullptr; // the model of --draft

    std::vector<llama_token> text; // the tokens of --text, empty without it

    std::string last_error; // the last error line that was logged

    std::string arch;

    uint32_t n_vocab      = 0;
    uint32_t n_embd_out   = 0;
    bool     is_recurrent = false; // nothing but recurrent state
    bool     is_hybrid    = false; // recurrent state beside a KV cache

    bool first_context = true; // whose buffer sizes are worth writing down

    // the same, which writes down what it sees elsewhere
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

// what distinguishes one context from another within a check
struct session_params {
    bool     dynamic;
    bool     unified;
    uint32_t n_seqs;
    uint32_t n_cells;  // per stream
    uint32_t n_rs_seq = 0;

    cell_types types; // of the cells

    std::function<bool(llama_context *)> on_create; // called with the new context. false: what the check needs is not here

    uint32_t n_streams() const { return unified ? 1 : n_seqs; }
};

// sets llama_context_params::kv_dynamic
void session_set_dynamic(llama_context_params & cparams, bool dynamic);

llama_context_params session_context_params(const kv_check_params & params, const session_params & sp);

session_params session_with_types(session_params sp, const cell_types & types);

// whether a static context can be created so
bool session_can_create(const side & s, session_params sp);

// a context and how far each of its sequences is; every call writes its result into the side's trace
class session {
  public:
    session(side & s, const session_params & sp, const std::string & name);
    ~session();

    session(const session &) = delete;
    session & operator=(const session &) = delete;

    // n more cells in each stream, spread over its sequences, in one llama_decode()
    // must: a return code other than 0 ends the check, otherwise it is only written down
    int32_t fill(uint32_t n, bool must = true);

    // n more tokens of one sequence
    int32_t fill_seq(llama_seq_id seq, uint32_t n, bool must = true);

    // a token for each of these sequences
    int32_t fill_order(const std::vector<llama_seq_id> & order, bool must = false) { return decode(order, must); }

    // the same one token at a time
    void generate(uint32_t n);

    // fill() whose results are not read: the next call finds the device at work
    void fill_unread(uint32_t n);

    // fill(), state_set() and state_seq_get() of which nothing is written down: on one side they may fail
    int32_t try_fill(uint32_t n);
    size_t  try_state(const std::vector<uint8_t> & data, llama_seq_id seq = -1); // -1: of all sequences
    std::vector<uint8_t> try_state_get(llama_seq_id seq);

    std::vector<std::vector<uint8_t>> states(); // of each sequence; nothing is written down

    // next position of each sequence, and back to it
    std::vector<llama_pos> positions() const { return n_past; }
    void go_back(const std::vector<llama_pos> & to);

    // the tokens that the library counts as computed before anybody has waited for them. with many outputs it waits itself
    void record_counted();

    // memory operations, with their result written down and the positions kept up to date
    bool rm (llama_seq_id seq, llama_pos p0, llama_pos p1);
    void cp (llama_seq_id src, llama_seq_id dst, llama_pos p0 = -1, llama_pos p1 = -1);
    void keep(llama_seq_id seq);
    void add(llama_seq_id seq, llama_pos p0, llama_pos p1, llama_pos delta);
    void div(llama_seq_id seq, llama_pos p0, llama_pos p1, int d);
    void clear(bool data);
    bool can_shift(const std::string & label);

    // other types for the cells, see scenarios-types.cpp. From the first call on the static side runs code of this series, too: its
    // failures count
    int32_t    retype(const cell_types & types);
    int32_t    try_retype(const cell_types & types); // of which nothing is written down
    cell_types types() const;

    // drops n tokens of each sequence after the first n_keep and moves the rest down, as llama-server does
    void shift(uint32_t n_keep, uint32_t n_drop);

    std::vector<uint8_t> state_get();
    size_t               state_set(const std::vector<uint8_t> & data);
    std::vector<uint8_t> state_seq_get(llama_seq_id seq, llama_state_seq_flags flags = 0);
    size_t               state_seq_set(llama_seq_id seq, const std::vector<uint8_t> & data, llama_state_seq_flags flags = 0);

    bool file_save(const std::string & path);
    bool file_load(const std::string & path);

    // the state's bytes as something to compare
    void record_state();

    uint32_t n_seqs() const { return sp.n_seqs; }
    uint32_t n_cells() const { return sp.n_cells; }
    llama_pos past(llama_seq_id seq) const { return n_past[seq]; }

    // before anything is decoded: by copy it starts with twice as many
    bool is_in_place() const { return llama_get_memory_usage(ctx).n_cells == 256*sp.n_streams(); }

    void salt(uint32_t val) { token_salt = val; } // other tokens from here on

    // the logits of the last batch that were written down
    const std::vector<float> & logits() const { return last_logits; }

    llama_context * ctx = nullptr;

  private:
    std::vector<llama_seq_id> next_order(uint32_t n);

    // what is written down of a batch
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

    uint32_t turn       = 0; // whose token comes next in a unified cache
    uint32_t token_salt = 0;
    uint32_t n_decodes  = 0;
};

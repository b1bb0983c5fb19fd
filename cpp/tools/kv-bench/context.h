#pragma once

// One model and one context of a libllama, and the measured calls.
//
// Attention over a long context makes a prompt slow, but it is not measured. So the cache is filled without it: each
// batch is decoded as a separate sequence, at its positions in the whole, and then moved to sequence 0 (seq_cp,
// seq_rm). Everything else equals a prompt: llama_decode() computes and writes every row into the same cells, and the
// cache grows at the same places. Only a token of one batch does not see the tokens of another batch, and the backend
// skips masked cells.

#include "api.h"
#include "args.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Return the processor time of this process in seconds. With one thread, it is the time of a call on an idle machine,
// independent of other load. With several threads or a device, return the time of the clock: threads that wait use
// processor time, and a device uses none.
double seconds_of(const kv_bench_params & params);

// null: no device is named or found
ggml_backend_dev_t device_of(const kv_bench_params & params);

// one llama_decode(), with llama_synchronize()
struct call_result {
    uint32_t depth;    // cells in use before
    uint32_t n_tokens;
    double   seconds;

    uint32_t n_grow;         // growths in this call
    double   grow_seconds;   // spent in them
    uint64_t n_bytes_copied; // by them
    uint64_t n_bytes_added;  // committed in them
    uint32_t n_cells_added;
};

// the last logged error
struct error_log {
    bool verbose = false;
    std::string last;
};

// throws std::runtime_error if the model cannot be loaded
class bench_model {
  public:
    bench_model(const llama_api & api, const kv_bench_params & params, error_log & log);
    ~bench_model();

    bench_model(const bench_model &) = delete;
    bench_model & operator=(const bench_model &) = delete;

    const llama_api & api;
    llama_model *     model;
};

// no cell is free, or memory ran out
struct cache_full {};

// throws std::runtime_error if the context cannot be created or a call fails, and cache_full
class bench_context {
  public:
    bench_context(const bench_model & model, const kv_bench_params & params);
    ~bench_context();

    bench_context(const bench_context &) = delete;
    bench_context & operator=(const bench_context &) = delete;

    call_result fill(uint32_t n);   // without attention to the context
    void fill_by_copy(uint32_t n);  // the same, with copies of the cells of a previous call of as many tokens, if possible
    call_result decode(uint32_t n); // with attention to the whole context

    void clear();

    ggml_type type() const; // of K

    // return the seconds of the change. throws std::runtime_error if it is refused
    double retype(ggml_type type);

    llama_memory_usage usage() const; // zeros without the patches

    uint32_t depth() const { return n_past; }

  private:
    call_result call(llama_seq_id seq, uint32_t n);

    const llama_api &       api;
    const kv_bench_params & params;

#ifdef KV_BENCH_TYPES
    std::unique_ptr<llama_memory_budget, decltype(&llama_memory_budget_free)> budget;
#endif

    llama_context * ctx;
    llama_memory_t  mem;
    llama_batch     batch;

    int32_t  n_vocab;
    uint32_t n_past = 0;

    std::vector<uint8_t> filled; // state of n_filled tokens at the positions from pos_filled
    uint32_t n_filled   = 0;
    uint32_t pos_filled = 0;
};

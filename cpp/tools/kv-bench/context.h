#pragma once

// Loads a model and creates a context with a given libllama, and measures the time of calls.
//
// While a cache is filled, attention over the long context would make each batch slow, although this time is not measured. So
// each batch is decoded as a sequence of its own, at its positions in the whole context. Then it is moved to sequence 0
// (seq_cp, seq_rm). llama_decode() computes and writes every row into the same cells as for a prompt, and the cache grows at
// the same places. Only attention differs: a token does not see the tokens of other batches. Their cells are masked, and the
// backend skips masked cells.

#include "api.h"
#include "args.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Return the processor time of this process in seconds. With one thread, this is the time that a call needs on an idle machine,
// whatever the other load. With several threads or a device, return the time of the clock instead, because waiting threads use
// processor time, and a device uses none.
double seconds_of(const kv_bench_params & params);

// return the device of the command line. The result is null if none is named or found
ggml_backend_dev_t device_of(const kv_bench_params & params);

// one llama_decode(), including llama_synchronize()
struct call_result {
    uint32_t depth;    // cells in use before the call
    uint32_t n_tokens;
    double   seconds;

    uint32_t n_grow;         // growths in this call
    double   grow_seconds;   // time of the growths
    uint64_t n_bytes_copied; // bytes that the growths copied
    uint64_t n_bytes_added;  // bytes that the growths committed
    uint32_t n_cells_added;
};

// the last logged error
struct error_log {
    bool verbose = false;
    std::string last;
};

// a loaded model. The constructor throws std::runtime_error if it cannot be loaded
class bench_model {
  public:
    bench_model(const llama_api & api, const kv_bench_params & params, error_log & log);
    ~bench_model();

    bench_model(const bench_model &) = delete;
    bench_model & operator=(const bench_model &) = delete;

    const llama_api & api;
    llama_model *     model;
};

// thrown if no cell is free, or memory has run out
struct cache_full {};

// a context of the model. The functions throw cache_full if there is no cell or no memory, and std::runtime_error if a call fails
class bench_context {
  public:
    bench_context(const bench_model & model, const kv_bench_params & params);
    ~bench_context();

    bench_context(const bench_context &) = delete;
    bench_context & operator=(const bench_context &) = delete;

    call_result fill(uint32_t n);   // without attention to the context
    void fill_by_copy(uint32_t n);  // as fill(), but if possible, copy the cells of an earlier call with as many tokens
    call_result decode(uint32_t n); // with attention to the whole context

    void clear();

    ggml_type type() const; // type of K

    // change the types of the cells, and return the seconds that this took. throws std::runtime_error if the change is refused
    double retype(ggml_type type);

    llama_memory_usage usage() const; // all members are 0 without the patches

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

    std::vector<uint8_t> filled; // state of n_filled tokens, which begin at position pos_filled
    uint32_t n_filled   = 0;
    uint32_t pos_filled = 0;
};

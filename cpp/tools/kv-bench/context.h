#pragma once

// One model and one context of a libllama, and the calls that are measured.
//
// How the cache is filled: attention over a long context is what makes a prompt slow, and it is not what is measured.
// So each batch is decoded as a sequence of its own, at the positions that it has in the whole, and given to sequence 0 when it is
// done (seq_cp, seq_rm). Nothing else differs from a prompt: every row is computed and written by llama_decode(), into the
// cells that a prompt gets, and the cache grows where it grows for a prompt. Only, a token of one batch does not see those
// of another while it is computed, and the backend skips what is masked.

#include "api.h"
#include "args.h"

#include <cstdint>
#include <memory>
#include <string>

// Seconds of processor time of this process: with one thread what a call takes on an idle machine, whatever else runs on it. With
// a device seconds of the clock: what it does takes no processor time.
double seconds_of(const kv_bench_params & params);

// null: there is no such device, or none is named
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

// the last error that was logged
struct error_log {
    bool verbose = false;
    std::string last;
};

// throws std::runtime_error when it cannot be loaded
class bench_model {
  public:
    bench_model(const llama_api & api, const kv_bench_params & params, error_log & log);
    ~bench_model();

    bench_model(const bench_model &) = delete;
    bench_model & operator=(const bench_model &) = delete;

    const llama_api & api;
    llama_model *     model;
};

// there is no cell left, nor memory for one
struct cache_full {};

// throws std::runtime_error when it cannot be made, or when a call fails, and cache_full
class bench_context {
  public:
    bench_context(const bench_model & model, const kv_bench_params & params, bool kv_dynamic);
    ~bench_context();

    bench_context(const bench_context &) = delete;
    bench_context & operator=(const bench_context &) = delete;

    call_result fill(uint32_t n);   // cheaply
    call_result decode(uint32_t n); // with attention to all there is

    void clear();

    ggml_type type() const; // of K

    // seconds. throws std::runtime_error when it is refused
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
};

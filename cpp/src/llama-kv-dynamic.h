#pragma once

// Dynamic KV cache (--kv-dynamic): what ties the growth of the caches of one llama_context together.
//
// Every llama_kv_cache keeps its cells (the meta data) at the full size from the start, so tokens get the same cells as in
// a static cache, in every memory class and after any sequence of operations. Only the storage behind the cells starts
// small (llama-kv-storage.h). What is left to do is to have rows behind a cell before it is used:
//
//   llama_kv_cache::prepare()      notes the cells that a batch was given                -> llama_kv_dynamic_cache::request()
//   llama_context::decode()        grows all caches that asked, before the batch runs    -> llama_kv_dynamic::grow()
//   llama_kv_cache::state_read*()  grows its own cache before it reads rows into it      -> llama_kv_dynamic_cache::reserve()
//
// A growth is all or nothing, over all caches of the context and its compute buffers. It first takes as much as the growth
// policy wants, then only what is needed. Caches that mirror each other, and from either of which the graphs take their size,
// so keep one size.
//
// A context that reads the storage of another (a draft that shares the cells of its target) follows when it decodes next.
//
// The caches find the llama_kv_dynamic of their context through a scope around llama_model::create_memory(): the
// alternative, one more constructor argument, would touch all wrappers and all 20 places that create a cache.
//
// Memory goes back when llama_memory_seq_rm(), _seq_keep() or _clear() have freed cells, as llama-kv-growth.h says, and not
// from within the caches: prepare() removes cells that it puts back. A copy of a stream that waits for the next batch
// may be of cells that are free by now: their rows stay. The rows of DSV4 have no cells to be freed: theirs goes with clear() alone.
// Compute buffers keep the size that they have grown to.
//
// Rejected: to fail in prepare() and grow in memory_update(true), the retry that decode() has. It allows one retry, and the
// wrappers log an error for what is an ordinary growth.
//
// All of it runs on the thread that uses the context.

#include "llama-kv.h"

#include "llama-cparams.h"

#include "ggml-backend.h"

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

// llama_context_default_params().kv_dynamic: the environment variable LLAMA_KV_DYNAMIC is set, and neither empty nor 0. so every
// program that loads the library can have it, also one that knows nothing of the parameter
bool llama_kv_dynamic_default();

struct llama_memory_budget;
class llama_batch_allocr;
class llama_kv_dynamic_cache;

// per llama_context
class llama_kv_dynamic {
    friend llama_kv_dynamic_cache;

public:
    // enabled: the caches of the context are dynamic. a static context is known here, too: it can read dynamic storage
    llama_kv_dynamic(llama_context * lctx, bool enabled);
    ~llama_kv_dynamic();

    // while it lives, caches created on this thread belong to dyn. null: to no context
    class scope {
    public:
        explicit scope(std::shared_ptr<llama_kv_dynamic> dyn);
        ~scope();

        scope(const scope &) = delete;
        scope & operator=(const scope &) = delete;

    private:
        std::shared_ptr<llama_kv_dynamic> prev;
    };

    static std::shared_ptr<llama_kv_dynamic> current();

    // that of a context. null: the context has no memory
    static llama_kv_dynamic * of(const llama_context & ctx);

    // when it goes, mem gives back the memory of the cells that were freed meanwhile
    // seq_id: that is removed as a whole, if one is. -1: all of them
    class release_scope {
    public:
        explicit release_scope(const llama_memory_i * mem, llama_seq_id seq_id = -1, bool is_whole = false);
        ~release_scope();

        release_scope(const release_scope &) = delete;
        release_scope & operator=(const release_scope &) = delete;

    private:
        const llama_memory_i * mem;

        const llama_seq_id seq_id;
        const bool         is_whole;
    };

    // a sequence goes on with the cells of another one, which may have lost them
    static void follow_copy(const llama_memory_i * mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst);

    // the first graphs are reserved: have the cells elsewhere, if their storage does not do where these read them
    // throws std::runtime_error when there is no memory, and the context cannot be used
    void begin();

    // another context that reads the storage of the caches here (a draft model that shares the cells of the target)
    void add_reader(const std::shared_ptr<llama_kv_dynamic> & reader);

    // have what was asked for, if anything was
    // is_batch: for the batch at hand, which also needs the copies of streams that wait
    // may_step_down: cells may take smaller types for it, see llama-kv-budget.cpp
    // returns false when there is no memory for all of it. nothing has changed then, and nothing is asked for any more
    bool grow(bool is_batch = true, bool may_step_down = true);

    // llama_decode(), when all is updated for a batch, and when its cells are known
    // returns what that is to return, nothing else has changed then:
    //    1: there is no memory, for a copy or a K-shift that is still to be done, or for the cells
    //   -3: the batch goes on with a sequence whose cells were lost with the device, in a change of types
    int32_t begin_batch(const llama_batch_allocr & balloc);
    int32_t grow_batch (const llama_batch_allocr & balloc);

    // there was no memory for a graph, which has cost the scheduler its buffers
    void set_sched_lost() { is_sched_lost = true; }

    void forget(); // what was asked for

    // tensors have got other addresses or strides: no graph that was built so far may run again, here and in the readers
    // is_larger: and the compute buffers have to follow
    void set_moved(bool is_larger);

    // grow all caches to their maximum, for good: nothing goes back any more
    bool grow_max();

    // llama_set_memory_type(), of all caches
    static int32_t set_types_of(llama_context & ctx, ggml_type type_k, ggml_type type_v);
    int32_t set_types(ggml_type type_k, ggml_type type_v);

    // GGML_TYPE_COUNT: there are no cells
    std::pair<ggml_type, ggml_type> types() const;

    // which caches are rotated by the graphs. builds a graph the first time, so no compute may be in flight
    void find_rotation();

    // what the caches here may take together with those of other contexts, and the types to step down through. null: no limit
    // it has to outlive this
    // returns whether there is one
    bool set_budget(llama_memory_budget * budget);

    // something else takes more or less of the budget than before. false: it has no room, and nothing has changed
    static bool follow_budget_of(llama_context & ctx);

    // f(converter), after which no graph that was built before runs again
    void convert(const std::function<void(class llama_kv_converter &)> & f);

    // wait for the compute that may use the storage
    // not llama_context::synchronize(): it would count the tokens of the batch that is being prepared as evaluated
    void synchronize() const;

    // shifts and copies of streams that wait
    void update();

    // whether f(cache) is true of one of them
    template <typename F>
    bool any(F && f) const {
        return std::any_of(caches.begin(), caches.end(), f);
    }

    // a copy, or a shift that a batch found no memory for, is still to be made, of all sequences (-1)
    bool awaits(llama_seq_id seq_id) const;

    // a state of the sequence, or of all (-1), finds no memory in one cache: no other one keeps its part
    void drop_seq(llama_seq_id seq_id);

    // bytes and cells of all caches, and the counters below
    llama_memory_usage usage() const;

    // what of that is a sequence's. looks at every cell
    llama_seq_usage seq_usage(llama_seq_id seq_id) const;

    void count_shrink(size_t n_bytes_copied); // that were moved for it

    bool fits(bool ahead) const; // the rows that were asked for, as far as that is known before
    void account();              // tell the budget what is taken

private:
    // grow all caches that asked, with the compute buffers, or none
    bool try_grow(bool ahead);

    // copies and shifts that found no memory. false: there is still none
    bool finish_copies();
    bool finish_update();

    // llama-kv-dynamic-lost.cpp: all cells are gone with the device
    void lose_cells();
    bool goes_on_lost(const llama_batch_allocr & balloc);

    // compute buffers for the worst case of the caches as they are
    // last: if need be from scratch, and without pipeline parallelism
    bool reserve(bool last);
    bool reserve_graph();

    // the graph for the worst case, with its compute buffers or only split over the backends. null: no memory
    ggml_cgraph * build_graph(bool split_only);

    //
    // the budget, see llama-kv-budget.cpp
    //

    // bytes of the caches with the rows that were asked for, in these types
    size_t n_bytes_next(bool ahead, ggml_type type_k, ggml_type type_v) const;

    size_t n_bytes_caches()  const;
    size_t n_bytes_sched()   const; // of the compute buffers
    size_t n_bytes_compute() const; // that they have grown by

    // of the budget, if the caches took that
    size_t n_bytes_above(size_t n_bytes_caches) const;
    bool   is_within    (size_t n_bytes_caches) const;
    void begin_account(); // before a cache grows or shrinks
    void fit_compute();   // after a K-shift, which can take more than any batch

    // take the next types with which they would fit. false: there are none
    // is_full: what is there already is too much
    bool step_down(bool is_full = false);
    void step_up();   // take the first types again, if no cell is in use

    // what llama_set_memory_type() returns for what can be known before it begins
    int32_t check_types(ggml_type type_k, ggml_type type_v) const;

    // have the graphs work with the new types, and the memory for the change. false: nothing has changed
    // sched: the one that the context computes with, unchanged in the end
    int32_t prepare_types(ggml_type type_k, ggml_type type_v);

    // of all caches, see llama_kv_dynamic_cache: the number of views of each tensor
    std::unordered_map<const ggml_tensor *, size_t> read_elsewhere(ggml_cgraph * gf) const;

    // the scheduler has lost its buffers: go on with a new one, empty if need be, which gives each graph what it needs
    void reset_sched();
    void new_sched(); // not while the context trains, which keeps the scheduler

    void reset_graphs(); // none that was built so far runs again

    llama_context * lctx;

    const bool enabled;

    std::vector<llama_kv_dynamic_cache *> caches; // of the context, also those that cannot grow

    std::vector<std::weak_ptr<llama_kv_dynamic>> readers;

    bool is_larger     = false; // than the compute buffers are for
    bool is_failed     = false; // it could not be noted what is asked for: the next grow() fails
    bool is_sched_lost = false; // the compute buffers
    bool is_shifted    = false; // since the last batch
    bool is_late_shift = false; // there was no memory for its graph

    bool is_rotation_known = false;

    std::bitset<LLAMA_MAX_SEQ> seqs_lost; // had cells when the device failed, and go on only from their start

    llama_memory_budget * budget = nullptr;

    size_t n_bytes_accounted        = 0; // of the budget
    size_t n_bytes_accounted_caches = 0; // of these, without compute buffers
    std::optional<size_t> n_bytes_compute_start; // of the compute buffers, before a cache has grown

    std::pair<ggml_type, ggml_type> types_first = { GGML_TYPE_COUNT, GGML_TYPE_COUNT }; // to step up to

    llama_memory_usage counters = {}; // only the counters are set

    bool has_shrunk = false; // in the scope at hand, which counts once for all caches
};

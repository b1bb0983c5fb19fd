#pragma once

// Dynamic KV cache (--kv-dynamic): the coordinator of one llama_context, which ties the growth of its caches together.
//
// Every llama_kv_cache keeps its cells (the metadata) at full size from the start, so tokens get the same cells as in a static
// cache, in every memory class and after any sequence of operations. Only the storage of the cells starts small
// (llama-kv-storage.h). The remaining task is to create the rows of a cell before the cell is used:
//
//   llama_kv_cache::prepare()      notes the cells that a batch was given              -> llama_kv_dynamic_cache::request()
//   llama_context::decode()        grows all caches with requests, before the batch runs -> llama_kv_dynamic::grow_batch()
//   llama_kv_cache::state_read*()  grows its own cache before it reads rows into it    -> llama_kv_state_rows::reserve()
//
// A growth changes all caches of the context and its compute buffers, or none. It first allocates as much as the growth policy
// wants, then only the required rows. Caches of one shape, any of which can set the size of a graph, keep one size.
//
// A context that reads the storage of another (a draft that shares the cells of its target) follows when it decodes next.
//
// The caches find the llama_kv_dynamic of their context through a scope around llama_model::create_memory(): the
// alternative, one more constructor argument, would touch all wrappers and all 20 places that create a cache.
//
// Memory is freed after llama_memory_seq_rm(), _seq_keep() or _clear() have freed cells, by the rules of llama-kv-growth.h. The
// caches never free rows themselves, since prepare() removes cells and restores them. A pending copy of a stream may read cells
// that are free by now: their rows stay. The rows of DSV4 have no cells: only clear() frees them.
//
// The parts are classes of their own:
//
//   compute   compute buffers, which follow the caches
//   copies    pending copies of streams and K-shifts
//   usage     accounting
//   lost      sequences whose cells were lost with a device
//   limit     limit on the memory of the caches: the machine's, or a budget (llama-kv-budget-member.h)
//   retype    changes of type (llama-kv-retype.h), if the layer `types` is applied
//
// Rejected: failing in prepare() and growing in memory_update(true), decode()'s own retry. It allows one retry, and the wrappers log an
// error although a growth is ordinary.
//
// All of it runs on the thread that uses the context.

#include "llama-kv-compute.h"
#include "llama-kv-copies.h"
#include "llama-kv-limit.h"
#include "llama-kv-lost-seqs.h"
#include "llama-kv-usage.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

class llama_batch_allocr;
class llama_kv_dynamic_cache;
class llama_kv_retype;
struct llama_memory_i;

// the default of llama_context_params::kv_dynamic: the environment variable LLAMA_KV_DYNAMIC is set, and neither empty nor 0. so
// every program that loads the library can have it, also a program that does not know the parameter
bool llama_kv_dynamic_default();

// per llama_context
class llama_kv_dynamic {
public:
    // enabled: the caches of the context are dynamic. a static context has a coordinator, too: it can read dynamic storage
    llama_kv_dynamic(llama_context * lctx, bool enabled);
    ~llama_kv_dynamic();

    llama_kv_dynamic(const llama_kv_dynamic &) = delete;
    llama_kv_dynamic & operator=(const llama_kv_dynamic &) = delete;

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

    // return the coordinator of a context. null: the context has no memory
    static std::shared_ptr<llama_kv_dynamic> of(const llama_context & ctx);

    // free the memory of cells that mem has freed during the life of this object, in the destructor
    // seq_id: the sequence that is removed as a whole, if any. -1: all of them
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

    // note that a sequence is a copy of another one, which may have lost its cells
    static void copy_seq(const llama_memory_i * mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst);

    //
    // called by the context
    //

    // the first graphs are reserved: replace the storage if graphs cannot read it where they run
    // throws std::runtime_error when there is no memory, and the context cannot be used
    void begin();

    // called by llama_decode(), first after all updates for a batch, then after the choice of its cells
    // return the value for llama_decode() to return. nothing else has changed then
    //    1: no memory for a pending copy, a pending K-shift or the cells
    //   -3: the batch continues a sequence whose cells were lost with the device, in a change of types
    int32_t begin_batch(const llama_batch_allocr & balloc);
    int32_t grow_batch (const llama_batch_allocr & balloc);

    // there was no memory for a graph, which has cost the scheduler its buffers
    void set_sched_lost() { compute.set_lost(); }

    // grow all caches to their maximum for good: they never shrink again
    bool grow_max();

    //
    // called by the caches and the parts
    //

    // register a cache of the context, including caches that cannot grow
    void add_cache   (llama_kv_dynamic_cache * cache);
    void remove_cache(llama_kv_dynamic_cache * cache);

    // register another context that reads the storage of these caches, for example a draft that shares its target's cells
    void add_reader(const std::shared_ptr<llama_kv_dynamic> & reader);

    bool is_enabled() const { return enabled; }

    const std::vector<llama_kv_dynamic_cache *> & caches() const { return all; }

    // check whether f(cache) is true of one of the caches
    template <typename F>
    bool any(F && f) const {
        return std::any_of(all.begin(), all.end(), f);
    }

    // grow all caches that have requests
    // is_batch: for the current batch, which also needs the late copies
    // may_step_down: the cells may change to smaller types, see llama-kv-limit.h
    // returns false if there is not enough memory for all caches. nothing has changed then, and all requests are cleared
    bool grow(bool is_batch = true, bool may_step_down = true);

    // clear all requests
    void forget();

    // a request could not be noted: the next grow() fails
    void fail_request() { has_failed = true; }
    bool has_failed_request() const { return has_failed; }

    // tensors have got other addresses or strides: no graph that was built so far may run again, here and in the readers
    // too_small: and the compute buffers have to follow
    void set_moved(bool too_small);

    // wait for the compute that may use the storage, here and in the readers
    void synchronize() const;

    // drop a state of a sequence, or of all (-1), that found no memory in one cache: no other one keeps its part
    void drop_seq(llama_seq_id seq_id);

    llama_kv_limit & limit() { return *cur_limit; }
    void set_limit(std::unique_ptr<llama_kv_limit> limit) { cur_limit = std::move(limit); }

    //
    // parts
    //

    llama_context & lctx;

    llama_kv_compute   compute;
    llama_kv_copies    copies;
    llama_kv_usage     usage;
    llama_kv_lost_seqs lost;

    std::shared_ptr<llama_kv_retype> retype; // null: types cannot change

private:
    // grow all caches with requests, and the compute buffers, or none
    bool try_grow(bool ahead);

    // do the work of grow(), which has checked that a growth is needed
    // throws std::bad_alloc
    bool grow_requested(bool may_step_down);

    bool has_request() const;

    const bool enabled;

    std::vector<llama_kv_dynamic_cache *> all;

    std::vector<std::weak_ptr<llama_kv_dynamic>> readers;

    bool has_failed = false;

    std::unique_ptr<llama_kv_limit> cur_limit = std::make_unique<llama_kv_limit>();
};

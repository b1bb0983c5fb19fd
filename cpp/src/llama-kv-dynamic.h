#pragma once

// Dynamic KV cache (--kv-dynamic): the coordinator of one llama_context. It grows all caches of the context together
//
// Each llama_kv_cache keeps its cells (the metadata) at full size from the start. So a token gets the same cell as in a static
// cache, with every kind of memory and after any sequence of operations. Only the storage, which is the memory of the cells,
// starts small (llama-kv-storage.h). A row is the memory of one cell. The remaining task is to allocate the row of a cell
// before the cell is used:
//
//   llama_kv_cache::prepare()      requests rows for the cells of a batch                -> llama_kv_dynamic_cache::request()
//   llama_context::decode()        grows all caches with requests, before the batch runs -> llama_kv_dynamic::grow_batch()
//   llama_kv_cache::state_read*()  grows its own cache before it reads rows into it      -> llama_kv_state_rows::reserve()
//
// A growth changes all caches of the context and its compute buffers, or nothing. It first tries to allocate the rows that the
// growth policy wants, and then only the required rows. Caches of the same shape keep the same size, because any of them can
// determine the size of a graph.
//
// A context can read the storage of another context, for example a draft that shares the cells of its target. After a growth,
// such a context builds new graphs and enlarges its compute buffers when it decodes next.
//
// The caches find the llama_kv_dynamic of their context through a scope around llama_model::create_memory(). The alternative is
// another constructor argument. It would change all wrappers and all 20 places that create a cache.
//
// Memory is freed after llama_memory_seq_rm(), _seq_keep() or _clear() have freed cells, by the rules of llama-kv-growth.h. The
// caches never free rows by themselves, because prepare() removes cells temporarily and restores them. A pending copy of a stream
// may read cells that are free by now, so the rows of these cells stay. The compressed rows of DSV4 have no cells. They are
// freed when the cache is cleared or a whole sequence is removed (llama-kv-planned-rows.h).
//
// This class has these members, each with a class of its own:
//
//   compute   compute buffers, whose size follows the caches
//   copies    pending copies of streams and K-shifts
//   usage     accounting
//   lost      sequences whose cells were lost because a device failed
//   limit     limit on the memory of the caches: the memory of the machine, or a budget (llama-kv-budget-member.h)
//   retype    changes of type (llama-kv-retype.h), if the layer `types` is applied
//
// Rejected: let prepare() fail if a row has no memory. decode() then calls memory_update(true), which would grow the caches,
// and tries again. But decode() tries again only once, and the wrappers would log an error although a growth is ordinary.
//
// All functions run on the thread that uses the context.

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

// return the default of llama_context_params::kv_dynamic
// It is true if the environment variable LLAMA_KV_DYNAMIC is set, and neither empty nor 0. So every program that loads the
// library can use the dynamic cache, even if the program does not know the parameter.
bool llama_kv_dynamic_default();

// the coordinator of one llama_context
class llama_kv_dynamic {
public:
    // enabled: the caches of the context are dynamic. A static context also has a coordinator, because it can share the dynamic
    // storage of another context
    llama_kv_dynamic(llama_context * lctx, bool enabled);
    ~llama_kv_dynamic();

    llama_kv_dynamic(const llama_kv_dynamic &) = delete;
    llama_kv_dynamic & operator=(const llama_kv_dynamic &) = delete;

    // while a scope exists, caches that are created on this thread belong to dyn. null: they belong to no context
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

    // free, in the destructor of this object, the memory of the cells that `mem` has freed while this object existed
    // seq_id:   sequence whose cells are removed. -1: all sequences
    // is_whole: the sequence is removed completely, not only a range of positions
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

    // note that a sequence is a copy of another one. If the source has lost its cells, the copy has lost them, too
    static void copy_seq(const llama_memory_i * mem, llama_seq_id seq_id_src, llama_seq_id seq_id_dst);

    //
    // called by the context
    //

    // check the storage in place after the first graphs were reserved. If the scheduler would copy rows without memory to
    // another device, replace the storage by storage by copy
    // throws std::runtime_error if there is no memory. the context cannot be used then
    void begin();

    // prepare a batch. llama_decode() calls begin_batch() after all pending updates, and grow_batch() after the cells of the
    // batch are chosen
    // return 0, or the error that llama_decode() returns
    //    0: llama_decode() continues with the batch. after any other value, the batch has used no cell
    //    1: no memory for a pending copy, a pending K-shift or the cells
    //   -3: the batch continues a sequence whose cells were lost, because the device failed during a change of types
    int32_t begin_batch(const llama_batch_allocr & balloc);
    int32_t grow_batch (const llama_batch_allocr & balloc);

    // note that the scheduler has lost its compute buffers, because there was no memory for a graph
    void set_sched_lost() { compute.set_lost(); }

    // grow all caches to their maximum. they never shrink again
    bool grow_max();

    //
    // called by the caches and by the members of this class
    //

    // register a cache of the context, including caches that cannot grow
    void add_cache   (llama_kv_dynamic_cache * cache);
    void remove_cache(llama_kv_dynamic_cache * cache);

    // register another context that reads the storage of these caches, for example a draft that shares its target's cells
    void add_reader(const std::shared_ptr<llama_kv_dynamic> & reader);

    bool is_enabled() const { return enabled; }

    const std::vector<llama_kv_dynamic_cache *> & caches() const { return all; }

    // check whether f(cache) is true for at least one cache
    template <typename F>
    bool any(F && f) const {
        return std::any_of(all.begin(), all.end(), f);
    }

    // grow all caches that have requests
    // is_batch:      the growth is for a batch, which also needs the late copies
    // may_step_down: the cells may change to smaller types, see llama-kv-limit.h
    // returns false if there is not enough memory for all caches. no cache has grown then, and all requests are cleared
    bool grow(bool is_batch = true, bool may_step_down = true);

    // clear all requests
    void forget();

    // let the next grow() fail, because there was no memory to record a request, or to grow the target of this draft
    void fail_request() { has_failed = true; }
    bool has_failed_request() const { return has_failed; }

    // drop all graphs of this context and its readers, because tensors have new addresses or strides
    // too_small: the compute buffers must grow as well
    void set_moved(bool too_small);

    // wait until the computations of this context and its readers are done, because they may use the storage
    void synchronize() const;

    // remove a sequence from all caches, because one cache had no memory to restore the sequence. -1: all sequences
    void drop_seq(llama_seq_id seq_id);

    llama_kv_limit & limit() { return *cur_limit; }
    void set_limit(std::unique_ptr<llama_kv_limit> limit) { cur_limit = std::move(limit); }

    //
    // members, see the list at the beginning of this file
    //

    llama_context & lctx;

    llama_kv_compute   compute;
    llama_kv_copies    copies;
    llama_kv_usage     usage;
    llama_kv_lost_seqs lost;

    std::shared_ptr<llama_kv_retype> retype; // null: types cannot change

private:
    // grow the compute buffers, and all caches with requests. if one growth fails, undo all growths
    // ahead: include the rows that the growth policy allocates in advance
    bool try_grow(bool ahead);

    // grow the caches and the compute buffers for grow(), which calls this function only if a cache or the compute buffers must
    // change
    // throws std::bad_alloc
    bool grow_requested(bool may_step_down);

    bool has_request() const;

    const bool enabled;

    std::vector<llama_kv_dynamic_cache *> all;

    std::vector<std::weak_ptr<llama_kv_dynamic>> readers;

    bool has_failed = false;

    std::unique_ptr<llama_kv_limit> cur_limit = std::make_unique<llama_kv_limit>();
};

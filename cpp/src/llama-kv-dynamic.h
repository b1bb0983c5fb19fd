#pragma once

// Dynamic KV cache (--kv-dynamic): what ties the growth of the caches of one llama_context together.
//
// Every llama_kv_cache keeps its cells (the meta data) at the full size from the start, so tokens get the same cells as in
// a static cache, in every memory class and after any sequence of operations. Only the storage behind the cells starts
// small. What is left to do is to have storage behind a cell before it is used:
//
//   llama_kv_cache::prepare()      notes the cells that a batch was given                    -> request()
//   llama_context::decode()        grows all caches that asked before the batch runs         -> pending(), grow()
//   llama_kv_cache::state_read*()  grows its own cache before it reads rows into it          -> try_resize()
//
// The caches find the llama_kv_dynamic of their context through a scope around llama_model::create_memory(): the
// alternative, one more constructor argument, would touch all wrappers and all 20 places that create a cache.
//
// Where the memory is plain host memory the storage is in place (llama-kv-inplace.h): the layout is the static one, what
// grows is the set of blocks of cells with pages behind them, each stream on its own. Elsewhere it grows by copy
// (llama-kv-storage.h), all streams alike.
//
// Memory goes back when llama_memory_seq_rm(), _seq_keep() or _clear() have freed cells, as llama-kv-growth.h says, and not
// from within the caches: prepare() removes cells that it puts back. Not while a copy of a stream waits for the next batch,
// which may be of cells that are free by now. The rows of DSV4 have no cells to be freed: theirs goes with clear() alone.
// Compute buffers keep the size that they have grown to.
//
// Rejected: to fail in prepare() and grow in memory_update(true), the retry that decode() has. It allows one retry, which
// mirrored caches exceed, the wrappers log an error for what is an ordinary growth, and a second prepare() is not the
// first one again: that of a sliding window purges positions that it does not restore, which changes the bits.
//
// Known limit: for the same reason a batch that a window was prepared for and that then finds no memory to grow may have
// purged positions of the window that a smaller batch, tried next, would still have seen.
//
// All of it runs on the thread that uses the context.

#include "llama.h"

#include "llama-kv-growth.h"
#include "llama-kv-inplace.h"
#include "llama-kv-storage.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

class llama_kv_cache;

struct llama_context;
struct llama_memory_i;
struct llama_ubatch;

// llama_context_default_params().kv_dynamic: the environment variable LLAMA_KV_DYNAMIC is set, and neither empty nor 0. so every
// program that loads the library can have it, also one that knows nothing of the parameter
bool llama_kv_dynamic_default();

// per llama_context
class llama_kv_dynamic {
public:
    // enabled: the caches of the context are dynamic. a static context is known here, too: it can read dynamic storage
    llama_kv_dynamic(llama_context * lctx, bool enabled);

    // while it lives, caches created on this thread belong to dyn. null: they are static
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

    ~llama_kv_dynamic();

    // when it goes, mem gives back the memory of the cells that were freed meanwhile
    class release_scope {
    public:
        explicit release_scope(const llama_memory_i * mem) : mem(mem) {}
        ~release_scope();

        release_scope(const release_scope &) = delete;
        release_scope & operator=(const release_scope &) = delete;

    private:
        const llama_memory_i * mem;
    };

    bool is_enabled() const;

    // every cache of the context, also one that cannot grow
    void add   (llama_kv_cache * kv);
    void remove(llama_kv_cache * kv);

    // another context that reads the storage of the caches here (a draft model that shares the cells of the target)
    void add_reader(const std::shared_ptr<llama_kv_dynamic> & reader);

    // a cache has given out cells that have no storage yet, or it has grown and the compute buffers have to follow
    void request();
    bool pending() const;

    // grow the caches that asked. on failure they keep what they have, and nothing is pending either
    bool grow();

    // what the batch at hand reads could not be made, and stays to be done: the next grow() fails
    void set_failed();

    // shrink the caches that grow by copy to what is in use, and with is_given to what the batch at hand was given as well
    // true: something has shrunk
    bool give_back(bool is_given);

    // a cache got less than the policy wanted, or nothing. caches that mirror each other have one size, which the graphs
    // take from either: the next grow() evens them out
    void set_short();

    // the storage moved or grew: stale graphs here and in the contexts that read it, whose compute buffers have to follow
    void set_moved();

    // true once after the layout of a cache has changed: the compute buffers have to follow
    bool resized();

    // grow all caches to their maximum, for good: nothing goes back any more
    bool grow_max();
    bool is_max() const;

    // bytes behind one cell index over all streams of the caches of n_max cells: they mirror each other, and the graphs take
    // their size from either, so that they have to take the same steps
    size_t n_bytes_cell(uint32_t n_max) const;

    // wait for the compute that may use the storage
    // not llama_context::synchronize(): it would count the tokens of the batch that is being prepared as evaluated
    void synchronize() const;

    // no graph that was built so far may run again, in any context
    static void drop_graphs();

    // bytes and cells of all caches, and the counters below
    llama_memory_usage usage() const;

    // a growth in the scope of a timer is counted, with the time that the scope took
    class timer {
    public:
        explicit timer(llama_kv_dynamic & dyn);
        ~timer();

        timer(const timer &) = delete;
        timer & operator=(const timer &) = delete;

    private:
        llama_kv_dynamic & dyn;

        const int64_t  t_start_us;
        const uint64_t n_resize;
    };

    // a cache has grown or shrunk, and this many bytes of it were moved
    void count_grow  (size_t n_bytes_copied);
    void count_shrink(size_t n_bytes_copied);

    // true once after storage moved anywhere in the process: the graphs of this context may have stale addresses
    bool moved();

private:
    llama_context * lctx;

    const llama_memory_i * mem = nullptr; // of lctx, known when it has been created

    const bool enabled;

    std::vector<llama_kv_cache *> caches;

    std::vector<std::weak_ptr<llama_kv_dynamic>> readers;

    // shrink the caches of one maximum to the smallest of them
    // is_given: the cells that the batch at hand was given have to stay
    void even_out(bool is_given);

    bool is_pending = false;
    bool is_grown   = false; // by grow_max()
    bool is_resized = false;
    bool is_short   = false;
    bool is_failed  = false;

    uint64_t n_moves = 0; // those that moved() has reported

    llama_memory_usage counters = {}; // only the counters are set

    uint64_t n_resize = 0; // growths of single caches
    bool     is_timed = false;
    bool     has_shrunk = false; // in the scope at hand, which counts once for all caches
};

// per llama_kv_cache
struct llama_kv_dynamic_cache {
    llama_kv_dynamic_cache(llama_kv_cache * kv, std::shared_ptr<llama_kv_dynamic> dyn);
    ~llama_kv_dynamic_cache();

    llama_kv_dynamic_cache(const llama_kv_dynamic_cache &) = delete;
    llama_kv_dynamic_cache & operator=(const llama_kv_dynamic_cache &) = delete;

    // n_rows rows of each stream are going to be used, and the last one
    void set_rows(uint32_t n_rows);

    // env: LLAMA_KV_DYNAMIC_STEP=BYTES instead of steps of 1 GiB, for tests with caches that are smaller than that
    // by copy without the bytes of a cell, which only a growth looks at
    llama_kv_growth policy() const;

    llama_kv_cache * kv;

    std::shared_ptr<llama_kv_dynamic> dyn;

    uint32_t n_max; // cells of the static cache
    uint32_t n_pad;

    uint32_t n_cells;    // cells that have storage. n_max: a static cache
    uint32_t n_need = 0; // cells that were given out
    uint32_t n_given = 0; // cells that the slots of the last batch reach

    // rows are written without a cell being occupied (the compressed caches of DSV4), and the last one is scratch
    bool has_rows = false;

    uint32_t n_rows_used = 0; // of each stream, at most

    // the most cells that had to stay since the last resize, see llama_kv_growth::shrink()
    uint32_t n_peak = 0;

    // by copy: created with the first growth, when the tensors exist
    std::unique_ptr<llama_kv_storage> storage;
    std::unique_ptr<llama_kv_pages>   created; // that the tensors in host memory are in until then

    //
    // in place: n_cells is n_max
    //

    bool is_inplace = false;

    std::unique_ptr<llama_kv_inplace> inplace; // null before the tensors exist, and without layers

    llama_kv_blocks wanted; // blocks that were given out
    bool            is_wanted = false;

    bool has_late_copy = false; // a copy of a stream found no memory: it waits for the next batch

    // ask for cells [i0, i1) of stream s
    void want(uint32_t s, uint32_t i0, uint32_t i1);
    void want(uint32_t i0, uint32_t i1); // of all streams
};

// in place nothing that a plan contains changes: grow at once where a plan takes something that a failure has to leave (the
// rollback of DSV4 that is pending). true by copy, where decode() grows
bool llama_kv_dynamic_commit(llama_kv_cache & kv);

// the cells that a state can be read into, or cleared in, where llama_kv_cache has the cells of a static cache there. none
// where some of the cells at hand have no storage: they hold nothing
struct llama_kv_dynamic_room {
    uint32_t n_cells;

    uint32_t size() const {
        return n_cells;
    }
};

// For a memory whose batch plans contain the sizes of its caches (DSV4): ask for what the plans will need.
//   window: takes its full size. its prepare() purges what it does not restore, so it cannot be asked twice
//   rows:   caches that have a row for every so many positions
// returns false when something has to grow before the batch can be planned
bool llama_kv_dynamic_plan(
        llama_kv_cache & window,
        const std::vector<std::pair<llama_kv_cache *, uint32_t>> & rows,
        const std::vector<llama_ubatch> & ubatches);

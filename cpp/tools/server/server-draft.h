#pragma once

#include "server-common.h"
#include "server-component.h"
#include "server-contexts.h"
#include "server-conversations.h"
#include "server-memory-stats.h"
#include "server-queue.h"
#include "server-slot.h"
#include "server-task.h"

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// The draft of a server, loaded and freed while the server runs: GET and POST /speculative.
//
// No request waits for a draft: without one, each request continues one token at a time. An unload also frees the draft's part
// of the caches. After a load, the draft processes the prompts of the slots (server_draft_catch_up::catch_up()).
//
// This works for models that draft from tokens alone (draft-simple) and for MTP layers (draft-mtp). MTP layers are usually part
// of the target's file, so only their context is freed. They need states of the target that do not exist any more after a load:
// in a conversation that is under way, they start with its next tokens. Other kinds of drafts need more of these states.
//
// On demand (--draft-lazy-auto), a request that can use a draft loads it when it is launched. If that fails, the request
// continues without a draft.
class server_draft {
public:
    server_draft(
        common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations,
        server_memory_stats & stats, server_queue & queue_tasks, server_response & queue_results);

    // return the response to GET /speculative
    json to_json() const;

    // add the state to /health or /props. add nothing if the draft is always loaded, as in upstream's server
    void add_state(json & res) const;

    // return the functions for POST /speculative. call on an HTTP thread
    server_component component(const std::function<bool()> & should_stop);

    // load_model(): return true if a draft has to be loaded now
    bool init();

    // load_model(): the draft could not be loaded. return false if it must be, as a draft that is always loaded
    bool continue_without();

    // load_model(): the draft does not work with this target
    void set_unsupported();

    // the models are about to be freed
    void sleep();

    // load the draft for a request that is about to be launched, if it is on demand
    void load_for(const server_task & task);

    // return true if a request has loaded the draft
    bool is_loaded_on_demand() const;

    // main loop: free a draft that was loaded on demand, because its memory is needed. return false if there is none
    // note: there must be no draft in the batch (server_oom::drop_drafts())
    bool free_on_demand();

    // return true if others may lose memory for the draft: a client has asked for it by name
    bool may_take_others() const { return !is_for_request; }

    // load_model(): set the function that receives the bytes of the weights before a load and after an unload
    // it may throw server_refusal
    void set_on_bytes(std::function<void(size_t)> func);

    // load_model(): set the function that returns false if the budget has no room for the draft's first cells
    void set_fits(std::function<bool(bool may_take_others)> func);

    // load_model() of a server that wakes: there is no room for the draft. return false if it must be loaded, or is not
    bool stay_unloaded();

    // main loop, each tick: free a draft that was loaded on demand and was not used for its time
    void unload_unused();

    // return the drafters that are possible without the draft model, or with it if it is loaded
    common_speculative * make_speculative();

    // add the draft's state to a checkpoint, unless the draft lacks tokens
    void save_checkpoint(int id_slot, common_prompt_checkpoint & ckpt);

    // a checkpoint was restored: drop the draft's cells if the checkpoint has no state for them
    void checkpoint_restored(int id_slot, const common_prompt_checkpoint & ckpt);

private:
    enum state_t {
        STATE_NONE, // the server was started without a draft
        STATE_UNLOADED,
        STATE_LOADED,
    };

    static constexpr const char * names[] = { "none", "unloaded", "loaded" };

    enum kind_t {
        KIND_OTHER,
        KIND_SIMPLE,
        KIND_MTP,
    };

    bool has_type(common_speculative_type type) const;

    kind_t find_kind() const;

    // return true if the server can run without the draft
    bool is_optional() const;

    const char * get_name() const;

    // the functions from here on run on the main loop

    // throw server_refusal unless the draft can be loaded and unloaded
    void check() const;

    json load();
    json unload();

    // load the model and create its context. throw server_refusal if that fails, nothing is loaded then
    void open();
    void close();

    bool has_file() const;

    // return the bytes of the weights, 0 for MTP layers of the target. throw server_refusal
    size_t n_bytes_file() const;

    const std::string & path() const;

    void set(llama_model * model, llama_context * ctx);

    // inform the slots that the draft has changed
    void attach();

    // return the devices that have memory of their own and are used for the draft
    std::vector<ggml_backend_dev_t> devices() const;

    common_params         & params;
    const server_contexts & ctxs;
    server_slots          & slots;

    server_conversations & conversations;

    server_memory_stats & stats;
    server_queue        & queue_tasks;
    server_response     & queue_results;

    std::atomic<state_t> state      { STATE_NONE };
    std::atomic<bool>    is_asleep  { false };
    std::atomic<bool>    is_managed { false }; // it is lazy, or a client has loaded or unloaded it

    std::function<void(size_t)> on_bytes = [](size_t) {};
    std::function<bool(bool)>   fits     = [](bool)   { return true; };

    kind_t      kind = KIND_OTHER;
    server_lazy lazy = {};

    bool is_for_request = false; // the current load is for a request that can do without it
    bool has_read_files = false; // the lookup caches were read once
};

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

// The draft of the server, which can be loaded and freed while the server runs: GET and POST /speculative.
//
// No request waits for a draft. Without a draft, each request continues with one token at a time. An unload also frees the
// cells of the draft, and the states of the draft in saved conversations. After a load, the draft processes the prompts of the
// slots (server_draft_catch_up::catch_up()).
//
// This class supports models that draft from tokens alone (draft-simple), and MTP layers (draft-mtp). MTP layers are usually in
// the target's file, so an unload frees only the context of the MTP layers. MTP layers need states of the target from the time
// when the target computed the tokens. After a load, the states for earlier tokens are gone. So if a conversation began before
// the load, MTP layers start with its next tokens. Other kinds of drafts need more states of the target, and are not supported.
//
// With --draft-lazy-auto, a request that can use a draft loads it when the request is launched. If loading fails, the request
// continues without a draft.
class server_draft {
public:
    server_draft(
        common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations,
        server_memory_stats & stats, server_queue & queue_tasks, server_response & queue_results);

    // return the response to GET /speculative
    json to_json() const;

    // add the state of the draft to /health or /props. If the draft is always loaded, add nothing, as in upstream's server
    void add_state(json & res) const;

    // return the functions for POST /speculative. Call this on an HTTP thread
    server_component component(const std::function<bool()> & should_stop);

    // return true if load_model() must load a draft now
    bool init();

    // called by load_model() if the draft could not be loaded
    // return false if the draft is always loaded, because then the server cannot start without the draft
    bool continue_without();

    // called by load_model() if the draft does not work with this target
    void set_unsupported();

    // called before the models are freed, because the server falls asleep
    void sleep();

    // load a draft on demand for a request that is about to be launched. Do nothing if the draft is not loaded on demand
    void load_for(const server_task & task);

    // return true if the draft was loaded on demand by a request
    bool is_loaded_on_demand() const;

    // free a draft that was loaded on demand, because its memory is needed. return false if there is none
    // Call this on the main loop. The batch must not contain draft tokens (see server_oom::drop_drafts()).
    bool free_on_demand();

    // return true if the server may free cells or the projector to load the draft
    // The result is true if a client loads the draft with POST /speculative. It is false while the draft is loaded on demand
    // for a request.
    bool may_take_others() const { return !is_for_request; }

    // set the function that receives the bytes of the draft's weights before a load, and 0 after an unload
    // `func` may throw server_refusal. server_budget calls set_on_bytes() while load_model() runs.
    void set_on_bytes(std::function<void(size_t)> func);

    // set the function that returns false if the budget has no room for the first cells of the draft
    // server_budget calls set_fits() while load_model() runs.
    void set_fits(std::function<bool(bool may_take_others)> func);

    // unload the draft, because the server has woken up and there is no room for the draft. load_model() runs at that time
    // return false if no draft is loaded, or if the draft is always loaded, because then the server needs it
    bool stay_unloaded();

    // free a draft that was loaded on demand, if no request has used it for the seconds of --draft-lazy-auto
    // The main loop calls unload_unused() at each tick.
    void unload_unused();

    // create the drafters that need no draft model. If the draft model is loaded, also create the drafters that use it
    common_speculative * make_speculative();

    // add the state of the draft to a checkpoint, unless the draft lacks tokens
    void save_checkpoint(int id_slot, common_prompt_checkpoint & ckpt);

    // called after a checkpoint was restored: free the draft's cells if the checkpoint has no state for them
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

    // functions for the main loop

    // throw server_refusal if the draft cannot be loaded and unloaded while the server runs
    void check() const;

    json load();
    json unload();

    // load the model of the draft and create its context. throw server_refusal if that fails. Nothing is loaded then
    void open();
    void close();

    bool has_file() const;

    // return the bytes of the weights that a load allocates. They are 0 for MTP layers in the target's file
    // throw server_refusal if the file cannot be read
    size_t n_bytes_file() const;

    const std::string & path() const;

    void set(llama_model * model, llama_context * ctx);

    // update the references of the slots to the draft, because the draft has changed
    void attach();

    // return the devices that the draft uses and that have memory of their own
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
    std::atomic<bool>    is_managed { false }; // the draft is lazy, or a client has loaded or unloaded it

    std::function<void(size_t)> on_bytes = [](size_t) {};
    std::function<bool(bool)>   fits     = [](bool)   { return true; };

    kind_t      kind = KIND_OTHER;
    server_lazy lazy = {};

    bool is_for_request = false; // the draft is being loaded for a request that can also continue without it
    bool has_read_files = false; // the files of the lookup caches were read
};

#pragma once

#include "server-common.h"
#include "server-component.h"
#include "server-projector-ref.h"
#include "server-queue.h"
#include "server-refusal.h"

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

// The multimodal projector (mmproj) of a server, loaded and freed while the server runs: GET and POST /mmproj.
//
// A user of the projector holds a server_projector_ref, which is counted under a lock: an HTTP thread while it tokenizes, and
// a slot until the last media of its prompt are in the cache. A slot without a place in the pool does not hold a projector
// that was loaded on demand (server-pool.h). The main loop loads and frees the projector, and frees it only without users.
// Without a projector, the server tokenizes text as a server that has none, to the same tokens.
//
// On demand (--mmproj-lazy-auto), a request with media loads the projector: an HTTP thread waits for the main loop. The main
// loop reloads it when it launches a task that waited long enough for the projector to be unloaded.
//
// The server reads the supported kinds of media from the file at its start, and the caches contain results of that projector. So a
// file with another header than at the start is refused, and no other check is needed.
//
// Rejected: a reference for each task that waits for a slot. Clients that queue for hours would keep the projector loaded. A
// task that finds no projector is refused with the reason.
class server_projector {
public:
    server_projector(server_queue & queue_tasks, server_response & queue_results);

    // return true if the server has a projector, loaded or not
    explicit operator bool() const { return exists; }

    // load_model(), also when the server wakes: load the projector unless it is lazy. return false if that fails
    // usage: result of mtmd_get_memory_usage()
    bool init(
            const std::string & path_new, const llama_model * model_new, const mtmd_context_params & params_new,
            const mtmd_memory_usage & usage_new, const server_lazy & lazy_new);

    // free the projector before the models are freed. init() loads it again, unless it is loaded on demand
    void sleep();

    bool has_vision() const { return caps.inp_vision; }
    bool has_audio () const { return caps.inp_audio; }

    // return whether it reads videos. an unloaded file is assumed to: a build without video support fails when it reads one
    bool has_video() const;

    operator server_projector_ref();

    // HTTP thread: return a reference for a new request, empty if the projector is not loaded or about to be unloaded
    // should_stop: returns true if the client has disconnected
    server_projector_ref ref(std::function<bool()> should_stop);

    // main loop: return a reference for a request that was accepted, empty if the projector is not loaded
    server_projector_ref get();

    // main loop: the same, but check() on the reference does not load the projector
    server_projector_ref get_loaded();

    // return the response to GET /mmproj
    json to_json() const;

    // add the state to /health or /props. add nothing if the projector is always loaded, as in upstream's server
    void add_state(json & res) const;

    // add the state to /props, and report no modalities while the projector is not available
    void update_props(json & props) const;

    // main loop: load the projector. throw server_refusal if that fails, nothing has changed then
    json load();

    // main loop: free the projector. return null if it has users, or if no closing exists any more
    json unload();

    // return the functions for POST /mmproj
    server_component component(const std::function<bool()> & should_stop);

    // load_model(): set the function that receives the bytes before a load and after an unload. it may throw server_refusal
    void set_on_bytes(std::function<void(size_t)> func);

    // set the function that frees memory for a request with media. it returns false if there is nothing to free
    void set_make_room(std::function<bool()> func);

    // load_model() of a server that wakes: there is no room for the projector. return false if it must be loaded, or is not
    bool stay_unloaded();

    // return true if requests load it (--mmproj-lazy-auto)
    bool is_auto() const { return lazy.is_auto(); }

    bool is_loaded() const;

    // return true if a request has loaded it, also while it is about to be unloaded
    bool is_loaded_on_demand() const;

    // return true if a request has loaded it and it has no users now
    bool is_spare() const;

    // main loop: free a spare projector because its memory is needed. return false if it is not spare
    bool free_spare();

    // main loop, each tick: free a projector that was loaded on demand and was not used for its time
    void unload_unused();

private:
    enum state_t {
        STATE_UNLOADED,
        STATE_LOADING,
        STATE_LOADED,
        STATE_UNLOADING, // waits for its users
    };

    static constexpr const char * names[] = { "unloaded", "loading", "loaded", "unloading" };

    // address space for ggml_backend_sched_new() with the 8192 nodes of clip. little of it is used
    static constexpr size_t N_BYTES_SCHED = 192*1024*1024;

    // A period in which no new request gets the projector, so that the number of users only falls. At its end, the projector
    // is available as before, unless it was freed
    class closing {
    public:
        explicit closing(server_projector & projector);
        ~closing();

        closing(const closing &) = delete;
        closing & operator=(const closing &) = delete;

        // start the period. call it again if the projector may have been loaded since
        void begin();

        // wait until there are no users. throw server_refusal at the deadline. return false if should_stop()
        bool wait(server_deadline deadline, const std::function<bool()> & should_stop);

    private:
        server_projector & projector;
        bool is_open = false;
    };

    state_t get_state() const;

    void set(state_t state_new, std::shared_ptr<mtmd_context> ctx_new);

    // the server wakes, and a managed projector cannot be loaded again
    void set_missing();

    // return true if the server can run without the projector
    bool is_optional() const;

    void check_exists() const;

    // throw server_refusal if the file is not the one of the start
    void check_header() const;

    // throw server_refusal if there is no memory for it. mtmd aborts then
    void check_memory() const;

    size_t n_bytes_planned() const;

    // call with the mutex held
    const char * get_name() const;

    // unload if there are no users and func() returns true. func is called with the mutex held
    bool unload_if(const std::function<bool()> & func);

    // return the error for a request while the projector is not available. call with the mutex held
    server_refusal why_not() const;

    // return a reference whose check() throws why_not(). call with the mutex held
    server_projector_ref make_refusal() const;

    // return a counted use. call with the mutex held
    std::shared_ptr<mtmd_context> use();

    // the same for a request with media. text is tokenized with the projector as well, but does not need it
    // call with the mutex held
    std::shared_ptr<mtmd_context> use_media();

    // main loop: load the projector for a request. throw server_refusal
    std::shared_ptr<mtmd_context> load_for_request();

    // HTTP thread: the main loop loads the projector. throw server_refusal, also after a minute or if should_stop()
    std::shared_ptr<mtmd_context> load_on_demand(const std::function<bool()> & should_stop);

    // read the file of the start. return false if it is not complete. call with the mutex held
    bool init_file(const std::string & path_new);

    std::shared_ptr<mtmd_context> open() const;

    server_queue    & queue_tasks;
    server_response & queue_results;

    mutable std::mutex      mutex;
    std::condition_variable cv_users;
    int                     n_users = 0;

    state_t     state      = STATE_UNLOADED;
    server_lazy lazy       = {};
    bool        is_managed = false; // it is lazy, or a client has loaded or unloaded it

    std::shared_ptr<mtmd_context> ctx; // null while the server sleeps

    // set at the start
    bool        exists = false;
    std::string path;
    std::string header;
    mtmd_caps   caps = {};

    std::vector<ggml_backend_dev_t> devices; // devices with their own memory

    const llama_model * model = nullptr;

    std::function<void(size_t)> on_bytes  = [](size_t) {};
    std::function<bool()>       make_room = []() { return false; };

    mtmd_context_params params = {};
    mtmd_memory_usage   usage  = {};
};

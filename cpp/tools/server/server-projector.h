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

// The multimodal projector (mmproj) of the server, which can be loaded and freed while the server runs: GET and POST /mmproj.
//
// Each user of the projector holds a server_projector_ref, which is counted under a lock. The users are HTTP threads while they
// tokenize, and slots until the last media of their prompt are in the cache. A slot that waits for cells does not hold a
// projector that was loaded on demand (server-pool.h).
//
// Only the main loop loads and frees the projector, and it frees the projector only if there are no users. Without a projector,
// the server tokenizes text to the same tokens as a server that never had one.
//
// With --mmproj-lazy-auto, a request with media loads the projector: its HTTP thread waits for the main loop. If the projector is
// freed while a task waits for a slot, the main loop loads it again when the task is launched.
//
// The server reads the supported kinds of media from the file at its start. The caches contain results of this projector. So a
// load is refused if the header of the file has changed since the start. A load needs no other comparison of the files.
//
// Rejected: a reference for each task that waits for a slot. Clients that queue for hours would keep the projector loaded. A task
// that finds no projector is refused with the reason.
class server_projector {
public:
    server_projector(server_queue & queue_tasks, server_response & queue_results);

    // return true if the server has a projector, whether it is loaded or not
    explicit operator bool() const { return exists; }

    // load the projector, unless it is lazy. return false if that fails. load_model() calls this, also when the server wakes up
    // usage_new: result of mtmd_get_memory_usage()
    bool init(
            const std::string & path_new, const llama_model * model_new, const mtmd_context_params & params_new,
            const mtmd_memory_usage & usage_new, const server_lazy & lazy_new);

    // free the projector before the models are freed. init() loads it again, unless it is loaded on demand
    void sleep();

    bool has_vision() const { return caps.inp_vision; }
    bool has_audio () const { return caps.inp_audio; }

    // return true if the projector supports videos. If it is not loaded, the result is true: a build without video support fails
    // when it reads a video
    bool has_video() const;

    operator server_projector_ref();

    // return a reference for a new request. The reference is empty if the projector is not loaded, or is about to be unloaded
    // should_stop: returns true if the client has disconnected
    // Call this on an HTTP thread.
    server_projector_ref ref(std::function<bool()> should_stop);

    // return a reference for a request that was accepted. It is empty if the projector is not loaded. Call this on the main loop
    server_projector_ref get();

    // do the same as get(), but check() on the reference does not load the projector
    server_projector_ref get_loaded();

    // return the response to GET /mmproj
    json to_json() const;

    // add the state of the projector to /health or /props. If it is always loaded, add nothing, as in upstream's server
    void add_state(json & res) const;

    // add the state to /props. While the projector is not available, report that no media are supported
    void update_props(json & props) const;

    // load the projector. throw server_refusal if that fails. Nothing has changed then. Call this on the main loop
    json load();

    // free the projector. Call this on the main loop
    // return null if the projector has users, or if the state is no longer STATE_UNLOADING: the period that the caller began
    // with closing::begin() can end before the main loop calls unload().
    json unload();

    // return the functions for POST /mmproj
    server_component component(const std::function<bool()> & should_stop);

    // set the function that receives the bytes of the projector before a load, and 0 after an unload
    // `func` may throw server_refusal. server_budget calls set_on_bytes() while load_model() runs.
    void set_on_bytes(std::function<void(size_t)> func);

    // set the function that frees memory so that a request with media can load the projector. `func` returns false if it has
    // freed nothing
    void set_make_room(std::function<bool()> func);

    // unload the projector, because the server has woken up and there is no room for it. load_model() runs at that time
    // return false if the projector is not loaded, or if it is always loaded, because then the server needs it
    bool stay_unloaded();

    // return true if requests load the projector (--mmproj-lazy-auto)
    bool is_auto() const { return lazy.is_auto(); }

    bool is_loaded() const;

    // return true if a request has loaded the projector. The result stays true while the projector is about to be unloaded
    bool is_loaded_on_demand() const;

    // return true if a request has loaded the projector, and it has no users now
    bool is_spare() const;

    // free the projector because its memory is needed, if is_spare(). return false otherwise. Call this on the main loop
    bool free_spare();

    // free a projector that was loaded on demand, if no request has used it for the seconds of --mmproj-lazy-auto
    // The main loop calls unload_unused() at each tick.
    void unload_unused();

private:
    enum state_t {
        STATE_UNLOADED,
        STATE_LOADING,
        STATE_LOADED,
        STATE_UNLOADING, // about to be unloaded, waits until there are no users
    };

    static constexpr const char * names[] = { "unloaded", "loading", "loaded", "unloading" };

    // bytes of address space that ggml_backend_sched_new() allocates for the 8192 nodes of clip. Only a small part is used
    static constexpr size_t N_BYTES_SCHED = 192*1024*1024;

    // A period in which no new request gets a reference to the projector, so that the number of users only falls. After the
    // period, the projector is available as before, unless it was freed.
    class closing {
    public:
        explicit closing(server_projector & projector);
        ~closing();

        closing(const closing &) = delete;
        closing & operator=(const closing &) = delete;

        // start the period. Call this again if the projector may have been loaded since the last call
        void begin();

        // wait until there are no users. throw server_refusal at the deadline. return false if should_stop() returns true
        bool wait(server_deadline deadline, const std::function<bool()> & should_stop);

    private:
        server_projector & projector;
        bool is_open = false;
    };

    state_t get_state() const;

    void set(state_t state_new, std::shared_ptr<mtmd_context> ctx_new);

    // set the state to STATE_UNLOADED, because the projector cannot be loaded again when the server wakes up
    // Call this only if is_optional().
    void set_missing();

    // return true if the server can run without the projector
    bool is_optional() const;

    void check_exists() const;

    // throw server_refusal if the header of the file has changed since the start
    void check_header() const;

    // throw server_refusal if there is not enough memory to load the projector, because mtmd would abort then
    void check_memory() const;

    size_t n_bytes_planned() const;

    // return the name of the state. Call this with the mutex held
    const char * get_name() const;

    // unload the projector if it has no users and func() returns true. func is called with the mutex held
    bool unload_if(const std::function<bool()> & func);

    // return the error for a request that needs the projector while it is not available. Call this with the mutex held
    server_refusal why_not() const;

    // return an empty reference, whose check() throws the error of why_not(). Call this with the mutex held
    server_projector_ref make_refusal() const;

    // return the projector as a pointer that is counted until it is destroyed. Call this with the mutex held
    std::shared_ptr<mtmd_context> use();

    // do the same as use(), and start the idle time of the projector again (server_lazy::used()). Call this with the mutex held
    // Only requests with media call this. Text is also tokenized with the projector, but does not need it.
    std::shared_ptr<mtmd_context> use_media();

    // load the projector for a request. throw server_refusal if that fails. Call this on the main loop
    std::shared_ptr<mtmd_context> load_for_request();

    // let the main loop load the projector, and wait for it. throw server_refusal if that fails, after a minute, or if
    // should_stop() returns true
    // Call this on an HTTP thread.
    std::shared_ptr<mtmd_context> load_on_demand(const std::function<bool()> & should_stop);

    // read the file for the first time. return false if it is not complete. Call this with the mutex held
    bool init_file(const std::string & path_new);

    std::shared_ptr<mtmd_context> open() const;

    server_queue    & queue_tasks;
    server_response & queue_results;

    mutable std::mutex      mutex;
    std::condition_variable cv_users;
    int                     n_users = 0;

    state_t     state      = STATE_UNLOADED;
    server_lazy lazy       = {};
    bool        is_managed = false; // the projector is lazy, or a client has loaded or unloaded it

    std::shared_ptr<mtmd_context> ctx; // null while the server sleeps

    // set when the server starts
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

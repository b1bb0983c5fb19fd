#pragma once

// The multimodal projector (mmproj) of a server, loaded and freed while it runs: GET and POST /mmproj.
//
// Who uses it has a server_projector_ref, handed out under a lock and counted: an HTTP thread while it tokenizes, a slot until the
// last media of its prompt are in the cache; of one that comes on demand, only while the slot has a place (server-pool.h). It is
// freed when no one has one; loaded and freed by the main loop, like all that computes. Text goes on: without a projector it is
// tokenized as by a server that has none, to the same tokens.
//
// On demand (--mmproj-lazy-auto) a request with media that finds none has it loaded: an HTTP thread waits for the main loop, the
// main loop itself loads it when it launches a task that has waited for so long that it is gone again.
//
// What is in the caches was computed with it, and the server knows it from its file at the start (kinds of media, size of an
// image). So a file with another header than at the start is refused, and nothing else has to be asked again.
//
// Rejected: a reference for each task that waits for a slot. Clients that queue for hours would keep it; a task that finds no
// projector is refused by name.

#include "server-bytes.h"
#include "server-main-loop.h"
#include "server-common.h"
#include "server-projector-ref.h"
#include "server-component.h"
#include "server-refusal.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

class server_projector {
public:
    // is there one, loaded or not?
    explicit operator bool() const { return exists; }

    // load_model(), also when the server wakes: returns false if it cannot be loaded
    // usage: what mtmd_get_memory_usage() says of it
    bool init(
            const std::string & path_new, const llama_model * model_new, const mtmd_context_params & params_new,
            const mtmd_memory_usage & usage_new, const server_lazy & lazy_new, server_queue & queue_tasks_new, server_response & queue_results_new) {
        const bool is_first = !exists;
        const bool load_now = is_first ? !lazy_new.is_lazy() : get_state() != STATE_UNLOADED;

        std::shared_ptr<mtmd_context> ctx_new;
        if (load_now) {
            const bool can_do_without = comes_and_goes();
            try {
                if (can_do_without) {
                    check_header();
                    check_memory();
                }
                ctx_new.reset(mtmd_init_from_file(path_new.c_str(), model_new, params_new), mtmd_free);
            } catch (const std::exception & e) {
                SRV_ERR("%s\n", e.what());
            }
            if (!ctx_new && !can_do_without) {
                return false;
            }
            if (!ctx_new) {
                set_missing();
            }
        }

        std::lock_guard<std::mutex> lock(mutex);

        ctx   = std::move(ctx_new);
        model = model_new;
        if (is_first || ctx) { // of the file that is there
            usage  = usage_new;
            params = params_new;
        }

        queue_tasks   = &queue_tasks_new;
        queue_results = &queue_results_new;
        if (is_first) {
            lazy     = lazy_new;
            is_shown = lazy.is_lazy();
        }

        params.progress_callback           = nullptr; // it is of the start
        params.progress_callback_user_data = nullptr;

        return !is_first || init_file(path_new) || load_now;
    }

    // the models are about to be freed. what was loaded is loaded again by init(), or on demand
    void sleep() {
        std::shared_ptr<mtmd_context> ctx_old;
        {
            std::lock_guard<std::mutex> lock(mutex);

            std::swap(ctx, ctx_old);
            if (lazy.is_auto()) {
                state = STATE_UNLOADED;
            }
        }
    }

    bool has_vision() const { return caps.inp_vision; }
    bool has_audio () const { return caps.inp_audio; }

    // a file that is not loaded cannot be asked, a build without video fails when it reads one
    bool has_video() const { return ctx ? mtmd_helper_support_video(ctx.get()) : caps.inp_vision; }

    operator server_projector_ref() { return ref([]() { return false; }); }

    // for new requests: empty if it is not there, or not for long. should_stop: nobody waits for it any more
    server_projector_ref ref(std::function<bool()> should_stop) {
        std::lock_guard<std::mutex> lock(mutex);

        if (lazy.is_auto() && state != STATE_LOADED) {
            return server_projector_ref(nullptr, [this, should_stop = std::move(should_stop)]() { return demand(should_stop); });
        }

        if (!exists || (ctx && state == STATE_LOADED)) {
            return server_projector_ref(exists ? use() : nullptr, nullptr);
        }

        return make_refusal();
    }

    // main loop, for a request that was accepted: empty if it is not there
    server_projector_ref get() {
        std::lock_guard<std::mutex> lock(mutex);

        if (lazy.is_auto() && !ctx) {
            return server_projector_ref(nullptr, [this]() { return load_to_use(); });
        }

        return ctx ? server_projector_ref(use_media(), nullptr) : make_refusal();
    }

    json to_json() const {
        check_exists();

        std::lock_guard<std::mutex> lock(mutex);

        json res = {
            { "state",         get_name() },
            { "n_users",       n_users },
            { "planned_bytes", n_bytes_planned() }, // weights and compute buffers, as --fit counts them
        };
        if (lazy.is_auto()) {
            res["auto_seconds"] = lazy.get_n_seconds();
        }

        return res;
    }

    // for /health and /props. nothing on a server that has it all the time, as upstream's
    void add_state(json & res) const {
        std::lock_guard<std::mutex> lock(mutex);

        if (is_shown) {
            res["mmproj"] = get_name();
        }
    }

    void check_exists() const {
        if (!exists) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, "This server has no multimodal projector. Start it with `--mmproj`");
        }
    }

    // what clients read to know what they may send
    void update_props(json & props) const {
        add_state(props);

        if (exists && !lazy.is_auto() && get_state() != STATE_LOADED) {
            for (const char * kind : { "vision", "video", "audio" }) {
                props["modalities"][kind] = false;
            }
        }
    }

    // main loop. throws server_refusal: then all is as before
    json load() {
        check_exists();
        {
            std::lock_guard<std::mutex> lock(mutex);

            if (state == STATE_LOADED) {
                return server_component_done(names[state], "taken", {}, {});
            }
            if (state != STATE_UNLOADED) {
                throw why_not();
            }
            state    = STATE_LOADING;
            is_shown = true;
        }

        const auto before = server_bytes::measure(devices);

        try {
            check_header();
            on_bytes(n_bytes_planned());
            check_memory();

            std::shared_ptr<mtmd_context> ctx_new;
            queue_tasks->yield_to_queue([&]() { // for the metrics
                ctx_new = open();
            });
            set(STATE_LOADED, std::move(ctx_new));
        } catch (...) {
            set(STATE_UNLOADED, nullptr);
            on_bytes(0);
            throw;
        }

        return server_component_done(names[STATE_LOADED], "taken", server_bytes::measure(devices), before);
    }

    // A time in which no new request gets it, so that its users become fewer. At its end it is there as before, unless it was
    // freed
    class closing {
    public:
        explicit closing(server_projector & mctx) : mctx(mctx) {
            mctx.check_exists();
        }

        // again where it was loaded meanwhile
        void begin() {
            std::lock_guard<std::mutex> lock(mctx.mutex);

            if (is_open && mctx.state == STATE_UNLOADING) {
                return;
            }
            if (mctx.state == STATE_LOADING || mctx.state == STATE_UNLOADING) {
                throw mctx.why_not();
            }
            if (mctx.state == STATE_LOADED) {
                mctx.state    = STATE_UNLOADING;
                mctx.is_shown = true;
                is_open       = true;
            }
        }

        ~closing() {
            std::lock_guard<std::mutex> lock(mctx.mutex);

            if (is_open && mctx.state == STATE_UNLOADING) {
                mctx.state = STATE_LOADED;
            }
        }

        closing(const closing &) = delete;
        closing & operator=(const closing &) = delete;

        // until nobody uses it. throws server_refusal when that takes too long, returns false if should_stop()
        bool wait(server_deadline deadline, const std::function<bool()> & should_stop) {
            std::unique_lock<std::mutex> lock(mctx.mutex);

            while (mctx.n_users > 0) {
                if (should_stop()) {
                    return false;
                }
                const auto now = std::chrono::steady_clock::now();
                if (now >= deadline) {
                    throw server_refusal(ERROR_TYPE_UNAVAILABLE,
                            string_format("the multimodal projector is still in use (%d), it stays loaded", mctx.n_users), 1);
                }
                mctx.cv_users.wait_until(lock, std::min(deadline, now + std::chrono::milliseconds(100)));
            }

            return true;
        }

    private:
        server_projector & mctx;
        bool is_open = false;
    };

    // main loop. returns null if there are users, or nobody has a closing any more
    json unload() {
        const auto before = server_bytes::measure(devices);

        std::shared_ptr<mtmd_context> ctx_old;
        {
            std::lock_guard<std::mutex> lock(mutex);

            if (state == STATE_UNLOADED) {
                return server_component_done(names[state], "freed", {}, {});
            }
            if (state != STATE_UNLOADING || n_users > 0) {
                return nullptr;
            }
            std::swap(ctx, ctx_old);
            state = STATE_UNLOADED;
        }
        ctx_old.reset();
        on_bytes(0);

        return server_component_done(names[STATE_UNLOADED], "freed", before, server_bytes::measure(devices));
    }

    // load_model(). what it takes from now on is told before it is loaded, and after it is freed. may throw server_refusal
    void set_on_bytes(std::function<void(size_t)> func) {
        on_bytes = std::move(func);
        try {
            on_bytes(ctx ? n_bytes_planned() : 0);
        } catch (const server_refusal & e) {
            SRV_ERR("%s\n", e.what());
            if (!let_go()) {
                throw;
            }
        }
    }

    // load_model(). the server wakes, and there is no room for it any more. returns false if it has to be there, or is not
    bool let_go() {
        if (!comes_and_goes() || !is_loaded()) {
            return false;
        }
        set_missing();
        on_bytes(0);

        return true;
    }

    // load_model(). frees something that a request with media is worth more than, returns false if there is nothing
    void set_make_room(std::function<bool()> func) {
        make_room = std::move(func);
    }

    // main loop: as get(), without loading it: empty then
    server_projector_ref get_loaded() {
        std::lock_guard<std::mutex> lock(mutex);

        return ctx ? server_projector_ref(use_media(), nullptr) : server_projector_ref();
    }

    // does it come and go with those who need it?
    bool is_auto() const {
        return lazy.is_auto();
    }

    bool is_loaded() const {
        std::lock_guard<std::mutex> lock(mutex);

        return ctx != nullptr;
    }

    // is there one that came on demand? also one that is about to go
    bool is_on_demand() const {
        std::lock_guard<std::mutex> lock(mutex);

        return lazy.is_auto() && ctx;
    }

    // and that nobody uses now?
    bool is_spare() const {
        std::lock_guard<std::mutex> lock(mutex);

        return lazy.is_auto() && state == STATE_LOADED && n_users == 0;
    }

    // main loop. the memory is needed for something else: it goes, and comes again. returns false without a spare one
    bool give_way() {
        const bool res = unload_if([this]() { return lazy.is_auto(); });
        if (res) {
            SRV_INF("%s", "the memory of the multimodal projector is needed, unloaded\n");
        }

        return res;
    }

    // main loop, now and then: one that was loaded on demand goes when nobody needs it any more
    void unload_unused() {
        if (unload_if([this]() { return lazy.is_unused(); })) {
            SRV_INF("the multimodal projector was not used for %d s, unloaded\n", lazy.get_n_seconds());
        }
    }

private:
    enum state_t {
        STATE_UNLOADED,
        STATE_LOADING,
        STATE_LOADED,
        STATE_UNLOADING, // once its users are done
    };

    static constexpr const char * names[] = { "unloaded", "loading", "loaded", "unloading" };

    static constexpr size_t N_BYTES_SCHED = 192*1024*1024; // of addresses, hardly touched: ggml_backend_sched_new() for the 8192 nodes of clip

    state_t get_state() const {
        std::lock_guard<std::mutex> lock(mutex);

        return state;
    }

    void set(state_t state_new, std::shared_ptr<mtmd_context> ctx_new) {
        std::lock_guard<std::mutex> lock(mutex);

        state = state_new;
        ctx   = std::move(ctx_new);
        lazy.used();
    }

    // one that comes and goes is not there again when the server wakes
    void set_missing() {
        SRV_WRN("%s", "the multimodal projector stays unloaded\n");
        set(STATE_UNLOADED, nullptr);
    }

    bool comes_and_goes() const {
        std::lock_guard<std::mutex> lock(mutex);

        return is_shown;
    }

    // throws server_refusal
    void check_header() const {
        if (server_gguf(path).header != header) {
            server_refuse_file(path, "not the one that the server was started with");
        }
    }

    // throws server_refusal. mtmd aborts when it gets none
    void check_memory() const {
        server_check_memory("multimodal projector", usage.backend_mem_usage, N_BYTES_SCHED);
    }

    size_t n_bytes_planned() const {
        size_t res = 0;
        for (const auto & item : usage.backend_mem_usage) {
            res += item.second;
        }

        return res;
    }

    // mutex held
    const char * get_name() const {
        return state == STATE_LOADED && !ctx ? "sleeping" : names[state];
    }

    // func: mutex held. returns false without one, or while somebody uses it
    bool unload_if(const std::function<bool()> & func) {
        {
            std::lock_guard<std::mutex> lock(mutex);

            if (state != STATE_LOADED || n_users > 0 || !func()) {
                return false;
            }
            state = STATE_UNLOADING;
        }

        unload();

        return true;
    }

    // mutex held. there is one, and it cannot be had at the moment
    server_refusal why_not() const {
        switch (state) {
            case STATE_UNLOADED:
                return server_refusal(ERROR_TYPE_INVALID_REQUEST,
                        "the multimodal projector is unloaded: POST /mmproj {\"action\": \"load\"}, or send the messages without media");
            case STATE_LOADING:
                return server_refusal(ERROR_TYPE_UNAVAILABLE, "the multimodal projector is being loaded, try again", 1);
            case STATE_UNLOADING:
                return server_refusal(ERROR_TYPE_UNAVAILABLE, "the multimodal projector is being unloaded, try again", 1);
            default:
                return server_refusal(ERROR_TYPE_UNAVAILABLE, "the server sleeps, try again", 1);
        }
    }

    // mutex held
    server_projector_ref make_refusal() const {
        return server_projector_ref(nullptr, [why = why_not()]() -> std::shared_ptr<mtmd_context> { throw why; });
    }

    // mutex held
    std::shared_ptr<mtmd_context> use() {
        n_users++;

        return { ctx.get(), [this, owner = ctx](mtmd_context *) mutable {
            owner.reset(); // whoever waits for the last user frees it

            std::lock_guard<std::mutex> lock(mutex);

            n_users--;
            cv_users.notify_all();
        } };
    }

    // mutex held. the same for who has media: a text is tokenized with it as well, and has no need of it
    std::shared_ptr<mtmd_context> use_media() {
        lazy.used();

        return { ctx.get(), [this, owner = use()](mtmd_context *) mutable {
            {
                std::lock_guard<std::mutex> lock(mutex);

                lazy.used();
            }
            owner.reset();
        } };
    }

    // main loop. throws server_refusal
    std::shared_ptr<mtmd_context> load_to_use() {
        try {
            load();
        } catch (const server_refusal & e) {
            if (e.type != ERROR_TYPE_OUT_OF_MEMORY || !make_room()) {
                throw;
            }
            load();
        }

        std::lock_guard<std::mutex> lock(mutex);

        return use_media();
    }

    // HTTP thread. throws server_refusal, also if it takes too long, or should_stop()
    std::shared_ptr<mtmd_context> demand(const std::function<bool()> & should_stop) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        const auto is_late  = [&]() { return should_stop() || std::chrono::steady_clock::now() >= deadline; };

        auto res = std::make_shared<std::shared_ptr<mtmd_context>>();

        while (true) {
            try {
                const json done = server_main_loop_call(*queue_tasks, *queue_results, is_late, [this, res]() {
                    *res = load_to_use();
                    return json(true);
                });
                if (done.is_null()) {
                    throw server_refusal(ERROR_TYPE_UNAVAILABLE, "the multimodal projector is still being loaded, try again", 1);
                }

                return std::move(*res);
            } catch (const server_refusal & e) {
                if (e.type != ERROR_TYPE_UNAVAILABLE || is_late()) {
                    throw;
                }
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(100)); // it is being unloaded
        }
    }

    // mutex held. returns false without a whole file
    bool init_file(const std::string & path_new) {
        exists = true;
        path   = path_new;
        state  = ctx ? STATE_LOADED : STATE_UNLOADED;
        caps   = ctx ? mtmd_caps { mtmd_support_vision(ctx.get()), mtmd_support_audio(ctx.get()) } : mtmd_get_cap_from_file(path.c_str());

        for (const auto & item : usage.backend_mem_usage) {
            if (ggml_backend_dev_type(item.first) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                devices.push_back(item.first);
            }
        }

        try {
            header = server_gguf(path).header;
        } catch (const std::exception & e) {
            SRV_ERR("%s\n", e.what());
            return false;
        }

        return true;
    }

    std::shared_ptr<mtmd_context> open() const {
        // nobody else logs there: there are no users
        std::string error;
        mtmd_helper_log_set([](ggml_log_level level, const char * text, void * user_data) {
            auto & error = *static_cast<std::string *>(user_data);
            if (level == GGML_LOG_LEVEL_ERROR && error.empty()) {
                error = string_strip(text);
            }
            common_log_default_callback(level, text, nullptr);
        }, &error);

        std::shared_ptr<mtmd_context> res(mtmd_init_from_file(path.c_str(), model, params), mtmd_free);

        mtmd_helper_log_set(common_log_default_callback, nullptr);

        if (!res) {
            server_refuse_file(path, error);
        }

        return res;
    }

    mutable std::mutex      mutex;
    std::condition_variable cv_users;
    int                     n_users = 0;

    state_t     state    = STATE_UNLOADED;
    server_lazy lazy     = {};
    bool        is_shown = false; // it comes and goes

    std::shared_ptr<mtmd_context> ctx; // null while the server sleeps

    // as of the start
    bool        exists = false;
    std::string path;
    std::string header;
    mtmd_caps   caps = {};

    std::vector<ggml_backend_dev_t> devices; // those with memory of their own

    const llama_model * model = nullptr;

    std::function<void(size_t)> on_bytes  = [](size_t) {};
    std::function<bool()>       make_room = []() { return false; };

    server_queue    * queue_tasks   = nullptr;
    server_response * queue_results = nullptr;

    mtmd_context_params params = {};
    mtmd_memory_usage   usage  = {};
};

// HTTP thread
inline server_component server_projector_component(
        server_projector & mctx, server_queue & queue_tasks, server_response & queue_results, const std::function<bool()> & should_stop) {
    const auto call = [&](std::function<json()> func) {
        return server_main_loop_call(queue_tasks, queue_results, should_stop, std::move(func));
    };

    return {
        "mmproj",
        [&mctx]() { return mctx.is_loaded(); },
        [&mctx]() { return mctx.load(); },
        [&mctx]() { return mctx.unload(); },
        call,
        [&mctx, &should_stop, call](const std::function<json()> & func, server_deadline deadline) {
            server_projector::closing closing(mctx);

            json res;
            while (res.is_null() && !should_stop()) {
                closing.begin();
                if (!closing.wait(deadline, should_stop)) {
                    break;
                }
                res = call(func);
            }
            return res;
        },
    };
}

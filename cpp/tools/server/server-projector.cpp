#include "server-projector.h"

#include "server-bytes.h"
#include "server-gguf.h"
#include "server-main-loop.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

server_projector::server_projector(server_queue & queue_tasks, server_response & queue_results)
    : queue_tasks(queue_tasks), queue_results(queue_results) {}

bool server_projector::init(
        const std::string & path_new, const llama_model * model_new, const mtmd_context_params & params_new,
        const mtmd_memory_usage & usage_new, const server_lazy & lazy_new) {
    const bool is_first = !exists;
    const bool load_now = is_first ? !lazy_new.is_lazy() : get_state() != STATE_UNLOADED;

    std::shared_ptr<mtmd_context> ctx_new;
    if (load_now) {
        const bool may_fail = is_optional();
        try {
            if (may_fail) {
                check_header();
                check_memory();
            }
            ctx_new.reset(mtmd_init_from_file(path_new.c_str(), model_new, params_new), mtmd_free);
        } catch (const std::exception & e) {
            SRV_ERR("%s\n", e.what());
        }
        if (!ctx_new && !may_fail) {
            return false;
        }
        if (!ctx_new) {
            set_missing();
        }
    }

    std::lock_guard<std::mutex> lock(mutex);

    ctx   = std::move(ctx_new);
    model = model_new;
    // if the projector was not loaded again, keep the values of the file that was read before
    if (is_first || ctx) {
        usage  = usage_new;
        params = params_new;
    }

    if (is_first) {
        lazy     = lazy_new;
        is_managed = lazy.is_lazy();
    }

    params.progress_callback           = nullptr; // progress is reported only at the start of the server
    params.progress_callback_user_data = nullptr;

    return !is_first || init_file(path_new) || load_now;
}

void server_projector::sleep() {
    std::shared_ptr<mtmd_context> ctx_old;
    {
        std::lock_guard<std::mutex> lock(mutex);

        std::swap(ctx, ctx_old);
        if (lazy.is_auto()) {
            state = STATE_UNLOADED;
        }
    }
}

bool server_projector::has_video() const {
    return ctx ? mtmd_helper_support_video(ctx.get()) : caps.inp_vision;
}

server_projector::operator server_projector_ref() {
    return ref([]() { return false; });
}

server_projector_ref server_projector::ref(std::function<bool()> should_stop) {
    std::lock_guard<std::mutex> lock(mutex);

    if (lazy.is_auto() && state != STATE_LOADED) {
        return server_projector_ref(nullptr, [this, should_stop = std::move(should_stop)]() { return load_on_demand(should_stop); });
    }

    if (!exists || (ctx && state == STATE_LOADED)) {
        return server_projector_ref(exists ? use() : nullptr, nullptr);
    }

    return make_refusal();
}

server_projector_ref server_projector::get() {
    std::lock_guard<std::mutex> lock(mutex);

    if (lazy.is_auto() && !ctx) {
        return server_projector_ref(nullptr, [this]() { return load_for_request(); });
    }

    return ctx ? server_projector_ref(use_media(), nullptr) : make_refusal();
}

server_projector_ref server_projector::get_loaded() {
    std::lock_guard<std::mutex> lock(mutex);

    return ctx ? server_projector_ref(use_media(), nullptr) : server_projector_ref();
}

json server_projector::to_json() const {
    check_exists();

    std::lock_guard<std::mutex> lock(mutex);

    json res = {
        { "state",         get_name() },
        { "n_users",       n_users },
        { "planned_bytes", n_bytes_planned() }, // weights and compute buffers, computed as --fit does
    };
    if (lazy.is_auto()) {
        res["auto_seconds"] = lazy.get_n_seconds();
    }

    return res;
}

void server_projector::add_state(json & res) const {
    std::lock_guard<std::mutex> lock(mutex);

    if (is_managed) {
        res["mmproj"] = get_name();
    }
}

void server_projector::check_exists() const {
    if (!exists) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, "This server has no multimodal projector. Start it with `--mmproj`");
    }
}

void server_projector::update_props(json & props) const {
    add_state(props);

    if (exists && !lazy.is_auto() && get_state() != STATE_LOADED) {
        for (const char * kind : { "vision", "video", "audio" }) {
            props["modalities"][kind] = false;
        }
    }
}

json server_projector::load() {
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
        is_managed = true;
    }

    const auto before = server_bytes::measure(devices);

    try {
        check_header();
        on_bytes(n_bytes_planned());
        check_memory();

        std::shared_ptr<mtmd_context> ctx_new;
        queue_tasks.yield_to_queue([&]() { // the queue can answer the metrics task meanwhile
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

server_projector::closing::closing(server_projector & projector) : projector(projector) {
    projector.check_exists();
}

server_projector::closing::~closing() {
    std::lock_guard<std::mutex> lock(projector.mutex);

    if (is_open && projector.state == STATE_UNLOADING) {
        projector.state = STATE_LOADED;
    }
}

void server_projector::closing::begin() {
    std::lock_guard<std::mutex> lock(projector.mutex);

    if (is_open && projector.state == STATE_UNLOADING) {
        return;
    }
    if (projector.state == STATE_LOADING || projector.state == STATE_UNLOADING) {
        throw projector.why_not();
    }
    if (projector.state == STATE_LOADED) {
        projector.state    = STATE_UNLOADING;
        projector.is_managed = true;
        is_open       = true;
    }
}

bool server_projector::closing::wait(server_deadline deadline, const std::function<bool()> & should_stop) {
    std::unique_lock<std::mutex> lock(projector.mutex);

    while (projector.n_users > 0) {
        if (should_stop()) {
            return false;
        }
        const auto now = std::chrono::steady_clock::now();
        if (now >= deadline) {
            throw server_refusal(ERROR_TYPE_UNAVAILABLE,
                    string_format("the multimodal projector is still in use (%d), it stays loaded", projector.n_users), 1);
        }
        projector.cv_users.wait_until(lock, std::min(deadline, now + std::chrono::milliseconds(100)));
    }

    return true;
}

json server_projector::unload() {
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

server_component server_projector::component(const std::function<bool()> & should_stop) {
    const auto call = [this, &should_stop](std::function<json()> func) {
        return server_main_loop_call(queue_tasks, queue_results, should_stop, std::move(func));
    };

    return {
        "mmproj",
        [this]() { return is_loaded(); },
        [this]() { return load(); },
        [this]() { return unload(); },
        call,
        [this, &should_stop, call](const std::function<json()> & func, server_deadline deadline) {
            closing closing(*this);

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

void server_projector::set_on_bytes(std::function<void(size_t)> func) {
    on_bytes = std::move(func);
    try {
        on_bytes(ctx ? n_bytes_planned() : 0);
    } catch (const server_refusal & e) {
        SRV_ERR("%s\n", e.what());
        if (!stay_unloaded()) {
            throw;
        }
    }
}

bool server_projector::stay_unloaded() {
    if (!is_optional() || !is_loaded()) {
        return false;
    }
    set_missing();
    on_bytes(0);

    return true;
}

void server_projector::set_make_room(std::function<bool()> func) {
    make_room = std::move(func);
}

bool server_projector::is_loaded() const {
    std::lock_guard<std::mutex> lock(mutex);

    return ctx != nullptr;
}

bool server_projector::is_loaded_on_demand() const {
    std::lock_guard<std::mutex> lock(mutex);

    return lazy.is_auto() && ctx;
}

bool server_projector::is_spare() const {
    std::lock_guard<std::mutex> lock(mutex);

    return lazy.is_auto() && state == STATE_LOADED && n_users == 0;
}

bool server_projector::free_spare() {
    const bool res = unload_if([this]() { return lazy.is_auto(); });
    if (res) {
        SRV_INF("%s", "the memory of the multimodal projector is needed, unloaded\n");
    }

    return res;
}

void server_projector::unload_unused() {
    if (unload_if([this]() { return lazy.is_unused(); })) {
        SRV_INF("the multimodal projector was not used for %d s, unloaded\n", lazy.get_n_seconds());
    }
}

server_projector::state_t server_projector::get_state() const {
    std::lock_guard<std::mutex> lock(mutex);

    return state;
}

void server_projector::set(state_t state_new, std::shared_ptr<mtmd_context> ctx_new) {
    std::lock_guard<std::mutex> lock(mutex);

    state = state_new;
    ctx   = std::move(ctx_new);
    lazy.used();
}

void server_projector::set_missing() {
    SRV_WRN("%s", "the multimodal projector stays unloaded\n");
    set(STATE_UNLOADED, nullptr);
}

bool server_projector::is_optional() const {
    std::lock_guard<std::mutex> lock(mutex);

    return is_managed;
}

void server_projector::check_header() const {
    if (server_gguf(path).header != header) {
        server_refuse_file(path, "not the one that the server was started with");
    }
}

void server_projector::check_memory() const {
    server_check_memory("multimodal projector", usage.backend_mem_usage, N_BYTES_SCHED);
}

size_t server_projector::n_bytes_planned() const {
    size_t res = 0;
    for (const auto & item : usage.backend_mem_usage) {
        res += item.second;
    }

    return res;
}

const char * server_projector::get_name() const {
    return state == STATE_LOADED && !ctx ? "sleeping" : names[state];
}

bool server_projector::unload_if(const std::function<bool()> & func) {
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

server_refusal server_projector::why_not() const {
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

server_projector_ref server_projector::make_refusal() const {
    return server_projector_ref(nullptr, [why = why_not()]() -> std::shared_ptr<mtmd_context> { throw why; });
}

std::shared_ptr<mtmd_context> server_projector::use() {
    n_users++;

    return { ctx.get(), [this, owner = ctx](mtmd_context *) mutable {
        owner.reset(); // must be first: when n_users is 0, the main loop may free the projector

        std::lock_guard<std::mutex> lock(mutex);

        n_users--;
        cv_users.notify_all();
    } };
}

std::shared_ptr<mtmd_context> server_projector::use_media() {
    lazy.used();

    return { ctx.get(), [this, owner = use()](mtmd_context *) mutable {
        {
            std::lock_guard<std::mutex> lock(mutex);

            lazy.used();
        }
        owner.reset();
    } };
}

std::shared_ptr<mtmd_context> server_projector::load_for_request() {
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

std::shared_ptr<mtmd_context> server_projector::load_on_demand(const std::function<bool()> & should_stop) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto is_late  = [&]() { return should_stop() || std::chrono::steady_clock::now() >= deadline; };

    auto res = std::make_shared<std::shared_ptr<mtmd_context>>();

    while (true) {
        try {
            const json done = server_main_loop_call(queue_tasks, queue_results, is_late, [this, res]() {
                *res = load_for_request();
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
        std::this_thread::sleep_for(std::chrono::milliseconds(100)); // try again after the current unload
    }
}

bool server_projector::init_file(const std::string & path_new) {
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

std::shared_ptr<mtmd_context> server_projector::open() const {
    // set a log function that keeps the first error. No other thread logs with it, because the projector has no users
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

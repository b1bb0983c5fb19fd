#include "server-draft.h"

#include "server-bytes.h"
#include "server-gguf.h"
#include "server-main-loop.h"
#include "server-refusal.h"

#include "../../src/llama-ext.h" // for llama_set_embeddings_nextn (staging API)

#include <algorithm>
#include <exception>
#include <fstream>
#include <utility>

static constexpr const char * NO_DRAFT = "This server has no draft. Start it with `--model-draft`, or a model that has MTP layers with `--spec-type draft-mtp`";

// return true if both files can be read. An empty path counts as readable
static bool can_read(const std::string & a, const std::string & b) {
    return (a.empty() || std::ifstream(a)) && (b.empty() || std::ifstream(b));
}

// return true if the task can use a draft: it generates text, and its prompt has no media
static bool can_use(const server_task & task) {
    return task.need_sampling() && task.params.n_predict != 0 && !task.tokens.has_media();
}

// remove the states of the draft from the checkpoints of a prompt, and the mark that the draft lacks tokens of the prompt
static void forget(server_prompt & prompt) {
    prompt.n_draft_retry = -1;
    for (auto & ckpt : prompt.checkpoints) {
        ckpt.clear_dft();
    }
}

server_draft::server_draft(
        common_params & params, const server_contexts & ctxs, server_slots & slots, server_conversations & conversations,
        server_memory_stats & stats, server_queue & queue_tasks, server_response & queue_results)
    : params(params), ctxs(ctxs), slots(slots), conversations(conversations), stats(stats), queue_tasks(queue_tasks), queue_results(queue_results) {}

json server_draft::to_json() const {
    if (state == STATE_NONE) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, NO_DRAFT);
    }

    json res = {{ "state", get_name() }};
    if (lazy.is_auto()) {
        res["auto_seconds"] = lazy.get_n_seconds();
    }

    return res;
}

void server_draft::add_state(json & res) const {
    if (is_managed) {
        res["speculative"] = get_name();
    }
}

server_component server_draft::component(const std::function<bool()> & should_stop) {
    const auto call = [this, &should_stop](std::function<json()> func) {
        return server_main_loop_call(queue_tasks, queue_results, should_stop, std::move(func));
    };

    return {
        "speculative",
        [this]() { return state == STATE_LOADED; },
        [this]() { return load(); },
        [this]() { return unload(); },
        call,
        [call](std::function<json()> func, server_deadline) { return call(std::move(func)); },
    };
}

bool server_draft::init() {
    if (!params.speculative.has_dft() && !has_type(COMMON_SPECULATIVE_TYPE_DRAFT_MTP)) {
        return false;
    }

    if (state == STATE_NONE) {
        kind = find_kind();
        lazy = { params.draft_lazy, params.draft_lazy_auto };
        if (lazy.is_lazy() && kind == KIND_OTHER) {
            SRV_WRN("%s\n", "--draft-lazy and --draft-lazy-auto are for draft-simple and draft-mtp, they will be disabled");
            lazy = {};
        }
        state      = lazy.is_lazy() ? STATE_UNLOADED : STATE_LOADED;
        is_managed = lazy.is_lazy();
    }
    is_asleep = false;

    return state == STATE_LOADED;
}

bool server_draft::continue_without() {
    if (!is_optional()) {
        return false;
    }

    SRV_WRN("%s", "the draft stays unloaded\n");
    state = STATE_UNLOADED;
    ctxs.spec_init.reset();
    set(nullptr, nullptr);

    return true;
}

void server_draft::set_unsupported() {
    if (state == STATE_LOADED) {
        state = STATE_NONE;
    }
}

void server_draft::sleep() {
    is_asleep = true;
    if (state == STATE_LOADED && lazy.is_auto()) {
        state = STATE_UNLOADED;
    }
    params.speculative.draft.ctx_tgt = nullptr;
    params.speculative.draft.ctx_dft = nullptr;
}

void server_draft::load_for(const server_task & task) {
    if (state != STATE_UNLOADED || !lazy.may_load() || !can_use(task)) {
        return;
    }
    is_for_request = true;
    try {
        load();
    } catch (const std::exception & e) {
        SRV_WRN("no drafts for now: %s\n", e.what());
        lazy.defer();
    }
    is_for_request = false;
}

bool server_draft::is_loaded_on_demand() const {
    return state == STATE_LOADED && lazy.is_auto();
}

bool server_draft::free_on_demand() {
    if (!is_loaded_on_demand()) {
        return false;
    }

    SRV_INF("%s", "the memory of the draft is needed, unloaded\n");

    unload();
    lazy.defer();

    return true;
}

void server_draft::set_on_bytes(std::function<void(size_t)> func) {
    on_bytes = std::move(func);
    try {
        on_bytes(ctxs.model_dft ? n_bytes_file() : 0);
    } catch (const std::exception & e) {
        SRV_ERR("%s\n", e.what());
        if (!stay_unloaded()) {
            throw;
        }
    }
}

void server_draft::set_fits(std::function<bool(bool may_take_others)> func) {
    fits = std::move(func);
}

bool server_draft::stay_unloaded() {
    if (!ctxs.ctx_dft || !is_optional()) {
        return false;
    }

    SRV_WRN("%s", "the draft stays unloaded\n");
    close();

    return true;
}

void server_draft::unload_unused() {
    if (!is_loaded_on_demand()) {
        return;
    }

    if (std::any_of(slots.begin(), slots.end(), [](const server_slot_view & slot) { return slot.is_processing() && can_use(*slot.task); })) {
        lazy.used();
    }
    if (lazy.is_unused()) {
        unload();
        SRV_INF("the draft was not used for %d s, unloaded\n", lazy.get_n_seconds());
    }
}

common_speculative * server_draft::make_speculative() {
    auto spec_params = params.speculative;

    // The files of lookup caches are read again, and upstream ends the process if a file is missing. That is acceptable only at
    // the start of the server.
    const bool is_gone = std::exchange(has_read_files, true) && !can_read(spec_params.ngram_cache.lookup_cache_static, spec_params.ngram_cache.lookup_cache_dynamic);
    if (is_gone && has_type(COMMON_SPECULATIVE_TYPE_NGRAM_CACHE)) {
        SRV_WRN("%s\n", "a lookup cache cannot be read any more, no drafts from it");
    }

    spec_params.types.erase(std::remove_if(spec_params.types.begin(), spec_params.types.end(), [&](common_speculative_type type) {
        const bool is_model = type == COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE || type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;

        return (state == STATE_UNLOADED && is_model) || (is_gone && type == COMMON_SPECULATIVE_TYPE_NGRAM_CACHE);
    }), spec_params.types.end());

    return common_speculative_init(spec_params, params.n_parallel);
}

void server_draft::save_checkpoint(int id_slot, common_prompt_checkpoint & ckpt) {
    const auto & slot = slots[id_slot];

    if (kind != KIND_SIMPLE || slot.prompt.n_draft_retry == -1) {
        ckpt.update_dft(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    }
}

void server_draft::checkpoint_restored(int id_slot, const common_prompt_checkpoint & ckpt) {
    auto & slot = slots[id_slot];

    if (slot.ctx_dft && kind != KIND_OTHER && ckpt.data_dft.empty()) {
        llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
        slot.prompt.n_draft_retry = 0;
    }
}

bool server_draft::has_type(common_speculative_type type) const {
    const auto & types = params.speculative.types;

    return std::find(types.begin(), types.end(), type) != types.end();
}

server_draft::kind_t server_draft::find_kind() const {
    const bool is_simple = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
    const bool is_mtp    = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
    const bool is_other  = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) ||
                           has_type(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
                           has_type(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);

    if (is_simple == is_mtp || is_other || params.speculative.has_synth()) {
        return KIND_OTHER;
    }

    return is_simple ? KIND_SIMPLE : KIND_MTP;
}

bool server_draft::is_optional() const {
    return is_managed && kind != KIND_OTHER;
}

const char * server_draft::get_name() const {
    return is_asleep && state == STATE_LOADED ? "sleeping" : names[state];
}

void server_draft::check() const {
    if (state == STATE_NONE) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, NO_DRAFT);
    }
    if (kind == KIND_OTHER) {
        throw server_refusal(ERROR_TYPE_NOT_SUPPORTED,
                "A draft of this kind cannot be loaded and unloaded: it keeps states of the target. Only draft-simple and draft-mtp can");
    }
}

json server_draft::load() {
    check();

    if (state == STATE_LOADED) {
        return server_component_done(names[state], "taken", {}, {});
    }

    is_managed = true;

    const auto before = server_bytes::measure(devices());

    open();
    state = STATE_LOADED;
    try {
        ctxs.spec.reset(make_speculative());
    } catch (const std::exception & e) {
        close();
        server_refuse_file(path(), e.what());
    }
    // common_context_can_seq_rm() tests the context by clearing its cells. If the draft shares the cells of the target, this
    // would clear the target's cells.
    const bool is_shared = llama_get_ctx_other(ctxs.ctx_dft) != nullptr;

    ctxs.ctx_dft_seq_rm_type = is_shared ? COMMON_CONTEXT_SEQ_RM_TYPE_PART : common_context_can_seq_rm(ctxs.ctx_dft);
    attach();
    lazy.used();

    return server_component_done(names[state], "taken", server_bytes::measure(devices()), before);
}

json server_draft::unload() {
    check();

    if (state == STATE_UNLOADED) {
        return server_component_done(names[state], "freed", {}, {});
    }

    is_managed = true;

    const auto before = server_bytes::measure(devices());

    conversations.drop_drafts();
    close();

    return server_component_done(names[state], "freed", before, server_bytes::measure(devices()));
}

void server_draft::open() {
    const size_t n_bytes = n_bytes_file();

    on_bytes(n_bytes);

    auto params_dft = common_base_params_to_speculative(params);
    params_dft.load_progress_callback           = nullptr; // progress is reported only at the start of the server
    params_dft.load_progress_callback_user_data = nullptr;

    auto & res = ctxs.spec_init;
    try {
        queue_tasks.yield_to_queue([&]() { // the queue can answer the metrics task meanwhile
            res = common_speculative_init_from_params(params_dft, ctxs.model_tgt, ctxs.ctx_tgt);
        });
    } catch (...) {
        res.reset();
        on_bytes(0);
        throw;
    }

    if (!res->context()) {
        const bool has_model = !has_file() || res->model();
        res.reset();
        on_bytes(0);
        if (!has_model) {
            server_check_memory("draft model", {{ devices().empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : devices()[0], n_bytes }});
            server_refuse_file(path(), "not a model that this server knows, see its log");
        }
        throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, "not enough memory for the context of the draft model");
    }

    if (!fits(may_take_others())) {
        res.reset();
        on_bytes(0);
        throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, "the budget has no room for the cells that the draft model begins with");
    }

    set(res->model(), res->context());
}

bool server_draft::has_file() const {
    return params.speculative.has_dft();
}

size_t server_draft::n_bytes_file() const {
    return has_file() ? server_gguf_n_bytes(path()) : 0;
}

const std::string & server_draft::path() const {
    return params.speculative.draft.mparams.path;
}

void server_draft::close() {
    stats.reset_draft();

    state = STATE_UNLOADED;
    ctxs.spec.reset();
    set(nullptr, nullptr);
    attach();
    ctxs.spec_init.reset();
    if (kind == KIND_MTP) {
        llama_set_embeddings_nextn(ctxs.ctx_tgt, false, false);
    }
    on_bytes(0);

    ctxs.spec.reset(make_speculative()); // may throw
    attach();
}

void server_draft::set(llama_model * model, llama_context * ctx) {
    ctxs.model_dft = model;
    ctxs.ctx_dft   = ctx;

    params.speculative.draft.ctx_tgt = ctxs.ctx_tgt;
    params.speculative.draft.ctx_dft = ctx;
}

void server_draft::attach() {
    for (auto & slot : slots) {
        slot.ctx_dft = ctxs.ctx_dft;
        slot.spec    = ctxs.spec.get();
        slot.mem.init(ctxs.ctx_tgt, ctxs.ctx_dft);

        // drop all draft tokens. If the slot was about to decode accepted draft tokens again, it samples these tokens again
        slot.spec_draft.clear();
        slot.spec_draft_q.clear();
        slot.spec_ckpt.clear();
        slot.spec_is_replay = false;

        forget(slot.prompt);
        if (slot.ctx_dft && slot.prompt.n_tokens() > 0) {
            slot.prompt.n_draft_retry = 0;
        }

        if (slot.spec && slot.state == SLOT_STATE_GENERATING) {
            common_speculative_begin(slot.spec, slot.id, slot.prompt.tokens.get_text_tokens());
        }
    }

    stats.update(ctxs.ctx_tgt, ctxs.ctx_dft);
}

std::vector<ggml_backend_dev_t> server_draft::devices() const {
    const auto params_dft = common_base_params_to_speculative(params);

    std::vector<ggml_backend_dev_t> res;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        auto * dev = ggml_backend_dev_get(i);

        const bool is_used = params_dft.devices.empty() || std::find(params_dft.devices.begin(), params_dft.devices.end(), dev) != params_dft.devices.end();
        if (is_used && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
            res.push_back(dev);
        }
    }

    return res;
}

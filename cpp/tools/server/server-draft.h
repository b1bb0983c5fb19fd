#pragma once

// The draft of a server, loaded and freed while it runs: GET and POST /speculative.
//
// A part of server_context_impl (impl_t), included there once the slots are defined. No request waits for a draft: without one,
// each goes on a token at a time. What the caches hold of a draft goes with it; a slot whose prompt the next one has not seen
// lets it catch up (server_oom::draft_catch_up()).
//
// For models that draft from tokens alone (draft-simple), and for MTP layers (draft-mtp): these are part of the target's file as
// a rule, then what goes is their context. They read states of the target, which are gone by then: one that comes into a
// conversation starts with its next tokens. The other kinds keep more such states.
//
// On demand (--draft-lazy-auto) a request that can use a draft has it loaded when it is launched, and goes on without if that fails.

#include "server-bytes.h"
#include "server-main-loop.h"
#include "server-component.h"

#include "../../src/llama-ext.h" // staging API: llama_set_embeddings_nextn

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

template <typename impl_t>
class server_draft {
public:
    json draft_to_json() const {
        if (state == STATE_NONE) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, no_draft);
        }

        json res = {{ "state", get_name() }};
        if (lazy.is_auto()) {
            res["auto_seconds"] = lazy.get_n_seconds();
        }

        return res;
    }

    // for /health and /props. nothing on a server that has it all the time, as upstream's
    void draft_add_state(json & res) const {
        if (is_shown) {
            res["speculative"] = get_name();
        }
    }

    // HTTP thread
    server_component draft_part(const std::function<bool()> & should_stop) {
        const auto call = [this, &should_stop](std::function<json()> func) {
            return server_main_loop_call(self().queue_tasks, self().queue_results, should_stop, std::move(func));
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

protected:
    // load_model(): is there a draft to load now?
    bool draft_init() {
        const auto & params = self().params_base;

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
            state    = lazy.is_lazy() ? STATE_UNLOADED : STATE_LOADED;
            is_shown = lazy.is_lazy();
        }
        is_asleep = false;

        return state == STATE_LOADED;
    }

    // load_model(). it could not be loaded: returns false if it has to be there. one that comes and goes stays unloaded when the
    // server wakes
    bool draft_can_do_without() {
        if (!comes_and_goes()) {
            return false;
        }

        SRV_WRN("%s", "the draft stays unloaded\n");
        state = STATE_UNLOADED;
        self().spec_init.reset();
        set(nullptr, nullptr);

        return true;
    }

    // load_model(). there is none after all: what it is for does not run here
    void draft_refuse() {
        if (state == STATE_LOADED) {
            state = STATE_NONE;
        }
    }

    // the models are about to be freed
    void draft_sleep() {
        is_asleep = true;
        if (state == STATE_LOADED && lazy.is_auto()) {
            state = STATE_UNLOADED;
        }
        self().params_base.speculative.draft.ctx_tgt = nullptr;
        self().params_base.speculative.draft.ctx_dft = nullptr;
    }

    // a request is about to be launched
    void draft_want(const server_task & task) {
        if (state != STATE_UNLOADED || !lazy.may_load() || !can_use(task)) {
            return;
        }
        is_wanted_only = true;
        try {
            load();
        } catch (const std::exception & e) {
            SRV_WRN("no drafts for now: %s\n", e.what());
            lazy.defer();
        }
        is_wanted_only = false;
    }

    // is there one that came on demand?
    bool draft_is_on_demand() const {
        return state == STATE_LOADED && lazy.is_auto();
    }

    // main loop. the memory is needed for something else: one that came on demand goes, for a while. returns false without one
    // note: nothing in a batch may be drafted then (server_oom::drop_drafts())
    bool draft_make_room() {
        if (!draft_is_on_demand()) {
            return false;
        }

        SRV_INF("%s", "the memory of the draft is needed, unloaded\n");

        unload();
        lazy.defer();

        return true;
    }

    // may it be loaded at the cost of others? not if nobody has asked for it by name
    bool draft_may_take_others() const {
        return !is_wanted_only;
    }

    // load_model(). what its weights take from now on is told before they are loaded, and after they are freed. may throw
    // server_refusal
    void draft_set_on_bytes(std::function<void(size_t)> func) {
        on_bytes = std::move(func);
        try {
            on_bytes(self().model_dft ? n_bytes_file() : 0);
        } catch (const std::exception & e) {
            SRV_ERR("%s\n", e.what());
            if (!draft_let_go()) {
                throw;
            }
        }
    }

    // load_model(). the server wakes, and there is no room for it any more. returns false if it has to be there, or is not
    bool draft_let_go() {
        if (!self().ctx_dft || !comes_and_goes()) {
            return false;
        }

        SRV_WRN("%s", "the draft stays unloaded\n");
        close();

        return true;
    }

    // main loop, now and then: one that was loaded on demand goes when nobody needs it any more
    void draft_unload_unused() {
        if (!draft_is_on_demand()) {
            return;
        }

        const auto & slots = self().slots;
        if (std::any_of(slots.begin(), slots.end(), [](const server_slot & slot) { return slot.is_processing() && can_use(*slot.task); })) {
            lazy.used();
        }
        if (lazy.is_unused()) {
            unload();
            SRV_INF("the draft was not used for %d s, unloaded\n", lazy.get_n_seconds());
        }
    }

    // what is left to draft with
    common_speculative * draft_new() {
        auto params = self().params_base.speculative;

        // a lookup cache is read anew, and upstream ends the process if it has gone. at the start that is its answer
        const bool is_gone = std::exchange(has_read_files, true) && !can_read(params.ngram_cache.lookup_cache_static, params.ngram_cache.lookup_cache_dynamic);
        if (is_gone && has_type(COMMON_SPECULATIVE_TYPE_NGRAM_CACHE)) {
            SRV_WRN("%s\n", "a lookup cache cannot be read any more, no drafts from it");
        }

        params.types.erase(std::remove_if(params.types.begin(), params.types.end(), [&](common_speculative_type type) {
            const bool is_model = type == COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE || type == COMMON_SPECULATIVE_TYPE_DRAFT_MTP;

            return (state == STATE_UNLOADED && is_model) || (is_gone && type == COMMON_SPECULATIVE_TYPE_NGRAM_CACHE);
        }), params.types.end());

        return common_speculative_init(params, self().params_base.n_parallel);
    }

    // a checkpoint was made: without what a draft that lacks tokens knows
    void draft_saved(const server_slot & slot, common_prompt_checkpoint & ckpt) {
        if (kind != KIND_SIMPLE || slot.prompt.n_draft_retry == -1) {
            ckpt.update_dft(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        }
    }

    // a checkpoint was restored: one of such a time, or of one without a draft, has nothing for it
    void draft_restored(server_slot & slot, const common_prompt_checkpoint & ckpt) {
        if (slot.ctx_dft && kind != KIND_OTHER && ckpt.data_dft.empty()) {
            llama_memory_seq_rm(llama_get_memory(slot.ctx_dft), slot.id, -1, -1);
            slot.prompt.n_draft_retry = 0;
        }
    }

private:
    enum state_t {
        STATE_NONE, // the server was started without
        STATE_UNLOADED,
        STATE_LOADED,
    };

    static constexpr const char * names[] = { "none", "unloaded", "loaded" };

    static constexpr const char * no_draft = "This server has no draft. Start it with `--model-draft`, or a model that has MTP layers with `--spec-type draft-mtp`";

    enum kind_t {
        KIND_OTHER,
        KIND_SIMPLE,
        KIND_MTP,
    };

    // both, where there are such files
    static bool can_read(const std::string & a, const std::string & b) {
        return (a.empty() || std::ifstream(a)) && (b.empty() || std::ifstream(b));
    }

    bool has_type(common_speculative_type type) const {
        const auto & types = self().params_base.speculative.types;

        return std::find(types.begin(), types.end(), type) != types.end();
    }

    kind_t find_kind() const {
        const bool is_simple = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE);
        const bool is_mtp    = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_MTP);
        const bool is_other  = has_type(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) ||
                               has_type(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) ||
                               has_type(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK);

        if (is_simple == is_mtp || is_other || self().params_base.speculative.has_synth()) {
            return KIND_OTHER;
        }

        return is_simple ? KIND_SIMPLE : KIND_MTP;
    }

    bool comes_and_goes() const {
        return is_shown && kind != KIND_OTHER;
    }

    // does it generate text, and may that be drafted? not after an image
    static bool can_use(const server_task & task) {
        return task.need_sampling() && task.params.n_predict != 0 && !task.tokens.has_media();
    }

    const char * get_name() const {
        return is_asleep && state == STATE_LOADED ? "sleeping" : names[state];
    }

    // main loop, all of the following

    void check() const {
        if (state == STATE_NONE) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, no_draft);
        }
        if (kind == KIND_OTHER) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED,
                    "A draft of this kind cannot be loaded and unloaded: it keeps states of the target. Only draft-simple and draft-mtp can");
        }
    }

    json load() {
        check();

        if (state == STATE_LOADED) {
            return server_component_done(names[state], "taken", {}, {});
        }

        is_shown = true;

        const auto before = server_bytes::measure(devices());

        open();
        state = STATE_LOADED;
        try {
            self().spec.reset(draft_new());
        } catch (const std::exception & e) {
            close();
            server_refuse_file(path(), e.what());
        }
        // to try it clears the cells, which may be those of the target
        const bool is_shared = llama_get_ctx_other(self().ctx_dft) != nullptr;

        self().ctx_dft_seq_rm_type = is_shared ? COMMON_CONTEXT_SEQ_RM_TYPE_PART : common_context_can_seq_rm(self().ctx_dft);
        attach();
        lazy.used();

        return server_component_done(names[state], "taken", server_bytes::measure(devices()), before);
    }

    json unload() {
        check();

        if (state == STATE_UNLOADED) {
            return server_component_done(names[state], "freed", {}, {});
        }

        is_shown = true;

        const auto before = server_bytes::measure(devices());

        if (self().prompt_cache) {
            for (auto & entry : self().prompt_cache->states) {
                entry.data.drft = {};
                forget(entry.prompt);
            }
        }
        close();

        return server_component_done(names[state], "freed", before, server_bytes::measure(devices()));
    }

    // the model and its context. throws server_refusal, and has none then
    void open() {
        const size_t n_bytes = n_bytes_file();

        on_bytes(n_bytes);

        auto params = common_base_params_to_speculative(self().params_base);
        params.load_progress_callback           = nullptr; // it is of the start
        params.load_progress_callback_user_data = nullptr;

        auto & init = self().spec_init;
        try {
            self().queue_tasks.yield_to_queue([&]() { // for the metrics
                init = common_speculative_init_from_params(params, self().model_tgt, self().ctx_tgt);
            });
        } catch (...) {
            init.reset();
            on_bytes(0);
            throw;
        }

        if (!init->context()) {
            const bool has_model = !has_file() || init->model();
            init.reset();
            on_bytes(0);
            if (!has_model) {
                server_check_memory("draft model", {{ devices().empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : devices()[0], n_bytes }});
                server_refuse_file(path(), "not a model that this server knows, see its log");
            }
            throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, "not enough memory for the context of the draft model");
        }

        if (!self().budget.keep(draft_may_take_others(), draft_may_take_others())) {
            init.reset();
            on_bytes(0);
            throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, "the budget has no room for the cells that the draft model begins with");
        }

        set(init->model(), init->context());
    }

    bool has_file() const {
        return self().params_base.speculative.has_dft();
    }

    // throws server_refusal
    size_t n_bytes_file() const {
        return has_file() ? server_gguf_n_bytes(path()) : 0;
    }

    void close() {
        self().memory.reset_draft();

        state = STATE_UNLOADED;
        self().spec.reset();
        set(nullptr, nullptr);
        attach();
        self().spec_init.reset();
        if (kind == KIND_MTP) {
            llama_set_embeddings_nextn(self().ctx_tgt, false, false);
        }
        on_bytes(0);

        self().spec.reset(draft_new()); // may throw
        attach();
    }

    void set(llama_model * model, llama_context * ctx) {
        self().model_dft = model;
        self().ctx_dft   = ctx;

        self().params_base.speculative.draft.ctx_tgt = self().ctx_tgt;
        self().params_base.speculative.draft.ctx_dft = ctx;
    }

    void attach() {
        for (auto & slot : self().slots) {
            slot.ctx_dft = self().ctx_dft;
            slot.spec    = self().spec.get();
            slot.mem.init(self().ctx_tgt, self().ctx_dft);

            // what it was about to decode a second time: it samples that again
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

        self().memory.update(self().ctx_tgt, self().ctx_dft);
    }

    static void forget(server_prompt & prompt) {
        prompt.n_draft_retry = -1;
        for (auto & ckpt : prompt.checkpoints) {
            ckpt.clear_dft();
        }
    }

    const std::string & path() const {
        return self().params_base.speculative.draft.mparams.path;
    }

    // those with memory of their own that the draft is put on
    std::vector<ggml_backend_dev_t> devices() const {
        const auto params = common_base_params_to_speculative(self().params_base);

        std::vector<ggml_backend_dev_t> res;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            auto * dev = ggml_backend_dev_get(i);

            const bool is_used = params.devices.empty() || std::find(params.devices.begin(), params.devices.end(), dev) != params.devices.end();
            if (is_used && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_GPU) {
                res.push_back(dev);
            }
        }

        return res;
    }

    std::atomic<state_t> state     { STATE_NONE };
    std::atomic<bool>    is_asleep { false };
    std::atomic<bool>    is_shown  { false }; // it comes and goes

    std::function<void(size_t)> on_bytes = [](size_t) {};

    kind_t      kind = KIND_OTHER;
    server_lazy lazy = {};
    bool        is_wanted_only = false; // by a request that can do without
    bool        has_read_files = false; // lookup caches

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }
};

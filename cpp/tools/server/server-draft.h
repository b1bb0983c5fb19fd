#pragma once

// The draft model of a server, loaded and freed while it runs: GET and POST /speculative.
//
// A part of server_context_impl (impl_t), included there once the slots are defined. No request waits for a draft: without one,
// each goes on a token at a time. What the caches hold of a draft goes with it; a slot whose prompt the next one has not seen
// lets it catch up (server_short::draft_catch_up()).
//
// For models that draft from tokens alone (draft-simple). The other kinds read states of the target that are gone by then, or
// are a part of its file.

#include "server-bytes.h"
#include "server-call.h"
#include "server-part.h"

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

template <typename impl_t>
class server_draft {
public:
    json draft_to_json() const {
        if (state == STATE_NONE) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, no_draft);
        }
        return {{ "state", names[state] }};
    }

    // HTTP thread
    server_part draft_part(const std::function<bool()> & should_stop) {
        return {
            "speculative",
            [this]() { return state == STATE_LOADED; },
            [this, &should_stop]() {
                return server_call(self().queue_tasks, self().queue_results, should_stop, [this]() { return load(); });
            },
            [this, &should_stop](server_deadline deadline) {
                return unload_until(deadline, should_stop);
            },
        };
    }

protected:
    // load_model(): is there a draft to load now?
    bool draft_init(bool has_draft) {
        if (!has_draft) {
            return false;
        }

        auto & params = self().params_base;
        if (state == STATE_NONE) {
            can_unload = is_simple(params.speculative);
            if (params.draft_lazy && !can_unload) {
                SRV_WRN("%s\n", "--draft-lazy is for a model that drafts from tokens alone (draft-simple), it will be disabled");
            }
            state = params.draft_lazy && can_unload ? STATE_UNLOADED : STATE_LOADED;
        }

        return state == STATE_LOADED;
    }

    // what is left to draft with
    common_speculative * draft_new() {
        auto & params = self().params_base.speculative;

        if (state != STATE_UNLOADED) {
            return common_speculative_init(params, self().params_base.n_parallel);
        }

        auto rest = params;
        rest.types.erase(std::remove(rest.types.begin(), rest.types.end(), COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE), rest.types.end());

        return common_speculative_init(rest, self().params_base.n_parallel);
    }

    // a checkpoint was made: without what a draft that lacks tokens knows
    void draft_saved(const server_slot & slot, common_prompt_checkpoint & ckpt) {
        if (!can_unload || slot.prompt.n_draft_retry == -1) {
            ckpt.update_dft(slot.ctx_dft, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        }
    }

    // a checkpoint was restored: one of such a time, or of one without a draft, has nothing for it
    void draft_restored(server_slot & slot, const common_prompt_checkpoint & ckpt) {
        if (slot.ctx_dft && can_unload && ckpt.data_dft.empty()) {
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

    static constexpr const char * no_draft = "This server has no draft model. Start it with `--model-draft`";

    static bool is_simple(const common_params_speculative & params) {
        const auto is = [&](common_speculative_type type) {
            return std::find(params.types.begin(), params.types.end(), type) != params.types.end();
        };

        return is(COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE) && !is(COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3) &&
            !is(COMMON_SPECULATIVE_TYPE_DRAFT_MTP) && !is(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH) &&
            !is(COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK) && !params.has_synth();
    }

    // main loop, all of the following but unload_until()

    void check() const {
        if (state == STATE_NONE) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED, no_draft);
        }
        if (!can_unload) {
            throw server_refusal(ERROR_TYPE_NOT_SUPPORTED,
                    "A draft of this kind cannot be loaded and unloaded: it reads states of the target. Only draft-simple can");
        }
    }

    json load() {
        check();

        if (state == STATE_LOADED) {
            return server_part_done(names[state], "taken", {}, {});
        }

        const auto before = server_bytes::measure(devices());

        open();
        state = STATE_LOADED;
        try {
            self().spec.reset(draft_new());
        } catch (const std::exception & e) {
            close();
            server_refuse_file(path(), e.what());
        }
        self().ctx_dft_seq_rm_type = common_context_can_seq_rm(self().ctx_dft);
        attach();

        return server_part_done(names[state], "taken", server_bytes::measure(devices()), before);
    }

    // returns null if a slot is about to decode what it has drafted
    json unload() {
        check();

        if (state == STATE_UNLOADED) {
            return server_part_done(names[state], "freed", {}, {});
        }
        for (const auto & slot : self().slots) {
            if (!slot.spec_draft.empty()) {
                return nullptr;
            }
        }

        const auto before = server_bytes::measure(devices());

        close();
        if (self().prompt_cache) {
            for (auto & entry : self().prompt_cache->states) {
                entry.data.drft = {};
                forget(entry.prompt);
            }
        }

        return server_part_done(names[state], "freed", before, server_bytes::measure(devices()));
    }

    json unload_until(server_deadline deadline, const std::function<bool()> & should_stop) {
        while (true) {
            const json res = server_call(self().queue_tasks, self().queue_results, should_stop, [this]() { return unload(); });
            if (!res.is_null() || should_stop()) {
                return res;
            }
            if (std::chrono::steady_clock::now() >= deadline) {
                throw server_refusal(ERROR_TYPE_UNAVAILABLE, "the draft model is still in use, it stays loaded", 1);
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1)); // a batch
        }
    }

    // the model and its context. throws server_refusal, and has none then
    void open() {
        const server_gguf file(path());

        auto params = common_base_params_to_speculative(self().params_base);
        params.load_progress_callback           = nullptr; // it is of the start
        params.load_progress_callback_user_data = nullptr;

        auto & init = self().spec_init;
        self().queue_tasks.yield_to_queue([&]() { // for the metrics
            init = common_speculative_init_from_params(params, self().model_tgt, self().ctx_tgt);
        });

        if (!init->context()) {
            const bool has_model = init->model() != nullptr;
            init.reset();
            if (!has_model) {
                server_check_memory("draft model", {{ devices().empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : devices()[0], file.n_bytes_data }});
                server_refuse_file(path(), "not a model that this server knows, see its log");
            }
            throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, "not enough memory for the context of the draft model");
        }

        set(init->model(), init->context());
    }

    void close() {
        self().memory.reset_draft();

        state = STATE_UNLOADED;
        self().spec.reset();
        set(nullptr, nullptr);
        self().spec.reset(draft_new());
        attach();
        self().spec_init.reset();

        self().memory.update(self().ctx_tgt, self().ctx_dft); // what it has given back
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

            slot.spec_ckpt.clear();
            slot.spec_draft_q.clear();

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

    std::atomic<state_t> state { STATE_NONE };

    bool can_unload = false;

    impl_t & self() {
        return static_cast<impl_t &>(*this);
    }

    const impl_t & self() const {
        return static_cast<const impl_t &>(*this);
    }
};

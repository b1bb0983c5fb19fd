#pragma once

#include "server-common.h"
#include "server-conversations.h"
#include "server-memory-slots.h"

#include "llama-kv.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <iosfwd>
#include <mutex>
#include <string>
#include <vector>

// Numbers about the memory of all contexts, for /metrics, /props and /slots.
//
// Any thread may read the numbers, even while a batch is computed or the server sleeps. A reader gets the numbers of the last
// update. For contexts that do not exist, the numbers are 0.
//
// The share of each slot needs a scan of every cell, which takes time. So the shares are usually updated only when all slots are
// idle. For two minutes after a reader has asked for them, they are also updated between two batches, for at most a twentieth of
// the time.
class server_memory_stats {
public:
    // include the numbers in responses. Without this call, the responses equal upstream's
    void show();

    // set the budget that all contexts share, and the types to which it may change the cells. budget may be null
    void set_budget(std::shared_ptr<llama_memory_budget> budget, const std::vector<ggml_type> & types);

    // set the function with which update() reads the numbers of stored conversations. These numbers stay while the server sleeps
    void set_conversations(std::function<server_conversations::usage()> usage);

    // read the numbers. Call this while the contexts do not compute
    // ctx_dft:    context of the draft, or null
    // with_slots: true: also read the share of each slot. false: read the shares only if a client has asked for them recently,
    //             because reading them scans every cell
    void update(const llama_context * ctx_tgt, const llama_context * ctx_dft, bool with_slots = false);

    // set the bytes of all contexts to 0, and keep the counters. Call this before the contexts are freed
    void reset();

    // set the bytes of the draft's context to 0, and keep its counters
    void reset_draft();

    // return the lines for /metrics
    std::string to_metrics() const;

    // add the objects "kv_cache", "kv_budget" and "conversations" to /props
    void update_props(json & props) const;

    // add to /slots: the share of each slot in cells and stored conversations, and the types of the target's cells
    void update_slots(json & slots) const;

private:
    struct context {
        const char * name;
        bool         present = false;

        llama_memory_usage now  = {};
        llama_memory_usage past = {}; // counters of earlier contexts

        server_memory_slots slots = {};

        ggml_type type_k = GGML_TYPE_COUNT; // GGML_TYPE_COUNT means: the context has no KV cells
        ggml_type type_v = GGML_TYPE_COUNT;

        void update(const llama_context * ctx);
        void add_types(json & res) const;
        void reset();
    };

    template <typename T>
    struct item {
        std::string  name;
        const char * type;
        const char * help;
        json      (* value)(const T & of); // the type json keeps every digit of bytes and cells
    };

    // print the lines of an item that precede its values (HELP and TYPE), and return its full name
    template <typename T>
    static std::string add_header(std::ostringstream & out, const char * prefix, const item<T> & item);

    static const std::vector<item<llama_memory_budget_usage>> & budget_items();
    static const std::vector<item<context>>                   & context_items();
    static const std::vector<item<server_conversations::usage>> & conversation_items();

    std::vector<const context *> contexts() const;

    static constexpr int64_t T_WATCH_US = 120*1000*1000; // two minutes, because metrics are usually collected once a minute

    mutable std::mutex mutex;

    mutable int64_t t_asked_us = -T_WATCH_US; // time at which a reader last asked for the numbers

    int64_t t_slots_us      = 0; // time of the last scan
    int64_t t_slots_took_us = 0; // duration of the last scan

    bool is_shown = false;

    std::shared_ptr<llama_memory_budget> budget;
    json                                 budget_types;
    llama_memory_budget_usage            budget_now = {};

    std::function<server_conversations::usage()> conversations;
    server_conversations::usage                  conversations_now = {};

    context target = { "target" };
    context draft  = { "draft"  };
};

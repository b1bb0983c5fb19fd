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

// The memory of all contexts in numbers, for /metrics, /props and /slots.
//
// Any thread may ask for the numbers, also while a batch is computed or the server sleeps. It then gets the numbers of the
// last update, and zeros for contexts that do not exist.
//
// The share of each slot needs a scan of every cell. Without questions it is updated only when all slots are idle. In the
// two minutes after a question it is also updated between two batches, for at most a twentieth of the time.
class server_memory_stats {
public:
    // show the numbers. without this call, the responses equal upstream's
    void show();

    // set the budget that all contexts share, may be null, and the types of its ladder
    void set_budget(std::shared_ptr<llama_memory_budget> budget, const std::vector<ggml_type> & types);

    // read the numbers of stored conversations with usage() in update(). they stay while the server sleeps
    void set_conversations(std::function<server_conversations::usage()> usage);

    // read the numbers. call while the contexts do not compute. ctx_dft: context of the draft, may be null
    // with_slots: always read the share of each slot, too
    void update(const llama_context * ctx_tgt, const llama_context * ctx_dft, bool with_slots = false);

    // call before the contexts are freed. their bytes become 0, their counters stay
    void reset();

    // the same for the draft's context only
    void reset_draft();

    // return the lines for /metrics
    std::string to_metrics() const;

    // add "kv_cache", "kv_budget" and "conversations" to /props
    void update_props(json & props) const;

    // add the share of each slot in cells and stored conversations, and the target's types, to /slots
    void update_slots(json & slots) const;

private:
    struct context {
        const char * name;
        bool         present = false;

        llama_memory_usage now  = {};
        llama_memory_usage past = {}; // counters of earlier contexts

        server_memory_slots slots = {};

        ggml_type type_k = GGML_TYPE_COUNT; // COUNT: no KV cells
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
        json      (* value)(const T & of); // json keeps every digit of bytes and cells
    };

    // print the header lines of an item, return its full name
    template <typename T>
    static std::string add_header(std::ostringstream & out, const char * prefix, const item<T> & item);

    static const std::vector<item<llama_memory_budget_usage>> & budget_items();
    static const std::vector<item<context>>                   & context_items();
    static const std::vector<item<server_conversations::usage>> & conversation_items();

    std::vector<const context *> contexts() const;

    static constexpr int64_t T_WATCH_US = 120*1000*1000; // metrics are usually collected once a minute

    mutable std::mutex mutex;

    mutable int64_t t_asked_us = -T_WATCH_US; // time of the last question

    int64_t t_slots_us      = 0; // time of the last scan
    int64_t t_slots_took_us = 0; // its duration

    bool is_shown = false;

    std::shared_ptr<llama_memory_budget> budget;
    json                                 budget_types;
    llama_memory_budget_usage            budget_now = {};

    std::function<server_conversations::usage()> conversations;
    server_conversations::usage                  conversations_now = {};

    context target = { "target" };
    context draft  = { "draft"  };
};

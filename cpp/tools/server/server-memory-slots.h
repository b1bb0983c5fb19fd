#pragma once

#include "server-common.h"

#include "llama-kv.h"

#include <string>
#include <vector>

// The share of each slot in the memory of a context. The numbers are from llama_memory_seq_usage().
class server_memory_slots {
public:
    // one number of a slot, for /metrics and JSON
    struct item {
        std::string  name;
        const char * help;
        size_t    (* value)(const llama_seq_usage & usage);
    };

    static const std::vector<item> & items();

    // read the numbers of all slots from the context. Call this while the context does not compute
    // ctx: null means: the server has no slots now
    void update(const llama_context * ctx);

    // return the number of slots
    size_t size() const { return usage.size(); }

    size_t value(const item & item, size_t id) const;

    // return the numbers of one slot. They are 0 if the slot is unknown
    json to_json(size_t id) const;

    // return the numbers of all slots
    json to_json() const;

private:
    std::vector<llama_seq_usage> usage; // by slot
};

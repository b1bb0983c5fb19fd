#pragma once

#include "llama-kv.h"

// While an object of this class exists, a batch that lacks memory fails, although the budget could make room by changing the
// cells to smaller types.
class server_budget_hold {
public:
    // budget: the budget of the server, or null
    // hold:   false means: the object has no effect, and the cells may change to smaller types
    server_budget_hold(llama_memory_budget * budget, bool hold) : budget(hold ? budget : nullptr) { set(true); }
    ~server_budget_hold() { set(false); }

    server_budget_hold(const server_budget_hold &) = delete;
    server_budget_hold & operator=(const server_budget_hold &) = delete;

private:
    void set(bool hold) {
        if (budget) {
            llama_memory_budget_hold(budget, hold);
        }
    }

    llama_memory_budget * budget;
};

#pragma once

#include "llama-kv.h"

// While an object of this class lives, a batch fails instead of changing the cells to smaller types.
class server_budget_hold {
public:
    // budget: may be null. hold: false if the cells may change
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

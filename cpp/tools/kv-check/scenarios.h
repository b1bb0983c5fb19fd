#pragma once

#include "reference.h"
#include "session.h"

#include <initializer_list>
#include <string>
#include <vector>

struct kv_check_scenario {
    const char * name;

    // runs on one side and throws check_failed or check_skipped
    void (*run)(side & s);

    // the check whose static run is the reference of this check's dynamic run: saving and restoring is one computation
    // for a static cache, and three for a dynamic one
    const char * reference;

    bool is_default = true; // runs without being named
};

// add scenarios at the start of the program. their file may be missing, because it belongs to another layer
struct kv_check_registration {
    explicit kv_check_registration(std::initializer_list<kv_check_scenario> scenarios);
};

const std::vector<kv_check_scenario> & kv_check_scenarios();

// return the scenario, or nullptr if the name is unknown
const kv_check_scenario * kv_check_find_scenario(const std::string & name);

// return true for the checks that "retype" includes: they change the types of the cells
bool kv_check_is_retype(const std::string & name);

// return true if the check runs by default: false for a check that needs as long as all others together
bool kv_check_is_default(const std::string & name);

// create the context of the command line
session_params kv_check_base(const side & s);

// return its saved state, split into parts
state_parts kv_check_state_of(const side & s, const session_params & sp, session & c);

// in separate files
void kv_check_draft    (side & s);
void kv_check_no_memory(side & s);
void kv_check_pages    (side & s);
void kv_check_rows     (side & s);
void kv_check_train    (side & s);
void kv_check_usage    (side & s);

// return the cells per stream that the long checks fill
uint32_t kv_check_n_fill(const kv_check_params & params);

// return the cells per stream of the contexts of the long checks
uint32_t kv_check_n_cells(const kv_check_params & params);

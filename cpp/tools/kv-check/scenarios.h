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

    // the check whose static run this one's dynamic run is compared with: saving and restoring is one
    // computation for a static cache, and three for a dynamic one
    const char * reference;

    bool is_default = true; // runs without being named
};

// adds scenarios when the program starts. the file that has them can be missing: it is of another layer
struct kv_check_registration {
    explicit kv_check_registration(std::initializer_list<kv_check_scenario> scenarios);
};

const std::vector<kv_check_scenario> & kv_check_scenarios();

// nullptr if there is none of that name
const kv_check_scenario * kv_check_find_scenario(const std::string & name);

// whether it is one of those that "retype" stands for: it changes the types of the cells
bool kv_check_is_retype(const std::string & name);

// whether it runs without being named: not what takes as long as all others together
bool kv_check_is_default(const std::string & name);

// the context that the command line asks for
session_params kv_check_base(const side & s);

// its saved state, taken apart
state_parts kv_check_state_of(const side & s, const session_params & sp, session & c);

// in files of their own
void kv_check_draft    (side & s);
void kv_check_no_memory(side & s);
void kv_check_pages    (side & s);
void kv_check_rows     (side & s);
void kv_check_train    (side & s);
void kv_check_usage    (side & s);

// cells per stream that the long checks fill
uint32_t kv_check_n_fill(const kv_check_params & params);

// cells per stream of the contexts that the long checks create
uint32_t kv_check_n_cells(const kv_check_params & params);

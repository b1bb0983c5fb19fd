#pragma once

#include "reference.h"
#include "session.h"

#include <initializer_list>
#include <string>
#include <vector>

struct kv_check_scenario {
    const char * name;

    // run the check with the static or the dynamic cache. throws check_failed or check_skipped
    void (*run)(side & s);

    // name of the check whose static run is compared with the dynamic run of this check. It is usually this check itself
    // The exception: state-self, state-into-dynamic and state-into-static share the static run of state-self. In a static run,
    // these three checks do the same, because they save and restore only states of static caches.
    const char * reference;

    bool is_default = true; // the check runs even if the command line does not name it
};

// adds the scenarios of one source file when the program starts
// Each file registers its own scenarios. A list of all scenarios could not be linked in a tree with only some of the patches,
// because this tree lacks some source files.
struct kv_check_registration {
    explicit kv_check_registration(std::initializer_list<kv_check_scenario> scenarios);
};

const std::vector<kv_check_scenario> & kv_check_scenarios();

// return the scenario with this name. The result is nullptr if the name is unknown
const kv_check_scenario * kv_check_find_scenario(const std::string & name);

// return true if the check belongs to the group "retype", whose checks change the types of the cells
bool kv_check_is_retype(const std::string & name);

// return true if the check runs by default, without being named on the command line
// The other checks take as long as all default checks together, or need a special device.
bool kv_check_is_default(const std::string & name);

// return the parameters of the context that the command line describes
session_params kv_check_base(const side & s);

// return the saved state of a context, split into parts
state_parts kv_check_state_of(const side & s, const session_params & sp, session & c);

// checks that have source files of their own
void kv_check_draft    (side & s);
void kv_check_no_memory(side & s);
void kv_check_pages    (side & s);
void kv_check_rows     (side & s);
void kv_check_train    (side & s);
void kv_check_usage    (side & s);

// return the number of cells that a check fills in each stream, if the check fills as many cells as possible
uint32_t kv_check_n_fill(const kv_check_params & params);

// return the maximum number of cells in each stream of a context with the parameters of kv_check_base()
uint32_t kv_check_n_cells(const kv_check_params & params);

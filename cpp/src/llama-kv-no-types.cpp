// In place of the layer "types", where a tree does not have it: the cells keep their types, and there is no budget. compiled by
// llama-kv.cmake if llama-kv-types.cpp is missing

#include "llama-kv-dynamic.h"

void llama_kv_dynamic::find_rotation() {
}

bool llama_kv_dynamic::set_budget(llama_memory_budget *) {
    return false;
}

bool llama_kv_dynamic::fits(bool) const {
    return true;
}

bool llama_kv_dynamic::is_within(size_t) const {
    return true;
}

size_t llama_kv_dynamic::n_bytes_caches() const {
    return 0; // only a budget asks
}

size_t llama_kv_dynamic::n_bytes_compute() const {
    return 0;
}

void llama_kv_dynamic::begin_account() {
}

void llama_kv_dynamic::account() {
}

void llama_kv_dynamic::fit_compute() {
    is_shifted = false;
}

bool llama_kv_dynamic::step_down(bool) {
    return false;
}

void llama_kv_dynamic::step_up() {
}

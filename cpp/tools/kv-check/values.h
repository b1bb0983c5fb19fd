#pragma once

#include "llama.h"

#include <cstdint>
#include <string>

struct cell_types {
    ggml_type k = GGML_TYPE_F16;
    ggml_type v = GGML_TYPE_F16;

    bool operator==(const cell_types & other) const { return k == other.k && v == other.v; }
};

// return the types as "q8_0", or "q8_0/f16" if K and V differ
std::string to_string(const cell_types & types);

// parse values of command line options, for kv-check and kv-bench. return false if the text is invalid

bool parse_u32       (const char * str, uint32_t & res); // at most INT32_MAX
bool parse_on_off    (const std::string & str, bool & res);
bool parse_type      (const std::string & str, ggml_type & res);
bool parse_flash_attn(const std::string & str, llama_flash_attn_type & res);

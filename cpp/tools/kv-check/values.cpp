#include "values.h"

#include <cstdlib>

bool parse_u32(const char * str, uint32_t & res) {
    char * end = nullptr;
    const long long val = strtoll(str, &end, 10);
    if (end == str || *end != '\0' || val < 0 || val > 0x7fffffff) {
        return false;
    }
    res = (uint32_t) val;
    return true;
}

bool parse_on_off(const std::string & str, bool & res) {
    if (str == "on" || str == "1" || str == "true") {
        res = true;
        return true;
    }
    if (str == "off" || str == "0" || str == "false") {
        res = false;
        return true;
    }
    return false;
}

bool parse_type(const std::string & str, ggml_type & res) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * name = ggml_type_name((ggml_type) i);
        if (name != nullptr && str == name) {
            res = (ggml_type) i;
            return true;
        }
    }
    return false;
}

bool parse_flash_attn(const std::string & str, llama_flash_attn_type & res) {
    bool on;
    if (str == "auto") {
        res = LLAMA_FLASH_ATTN_TYPE_AUTO;
        return true;
    }
    if (!parse_on_off(str, on)) {
        return false;
    }
    res = on ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return true;
}

std::string to_string(const cell_types & types) {
    const std::string k = ggml_type_name(types.k);
    return types.k == types.v ? k : k + "/" + ggml_type_name(types.v);
}

// Replacement for the layer `device` in a tree that does not have it: no device has pages. llama-kv.cmake compiles this file if
// llama-kv-pages-device.cpp is missing

#include "llama-kv-pages.h"

size_t llama_kv_pages_size_device(ggml_backend_buffer_type_t) {
    return 0;
}

llama_kv_paged_buffer llama_kv_pages_reserve_device(ggml_backend_buffer_type_t, size_t) {
    return {};
}

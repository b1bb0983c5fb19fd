#pragma once

// What a part of the server takes, measured, and whether its file and the memory for it are there: asked before it is loaded,
// as what loads it says no more than that it failed, and at times aborts.

#include "server-common.h"
#include "server-refusal.h"

#include "../kv-check/resident.h"

#include "ggml-cpp.h"
#include "gguf.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

// bytes that this process and its devices have taken
struct server_bytes {
    int64_t resident = 0;
    int64_t device   = 0;

    // devices: those with memory of their own
    static server_bytes measure(const std::vector<ggml_backend_dev_t> & devices) {
        server_bytes res;

#if defined(__GLIBC__)
        malloc_trim(0); // what was freed is not taken
#endif
        res.resident = std::max<int64_t>(0, resident_bytes());

        for (auto * dev : devices) {
            size_t n_free  = 0;
            size_t n_total = 0;
            ggml_backend_dev_memory(dev, &n_free, &n_total);
            res.device += n_total - n_free;
        }

        return res;
    }
};

[[noreturn]] inline void server_refuse_file(const std::string & path, const std::string & why) {
    throw server_refusal(ERROR_TYPE_SERVER, "failed to load '" + path + "': " + why);
}

// a GGUF file without its data
struct server_gguf {
    std::string header;
    size_t      n_bytes_data = 0;
    int         n_split      = 1; // files of the model

    // throws server_refusal, also if the file ends before the data of its last tensor
    explicit server_gguf(const std::string & path) {
        const auto fs_path = std::filesystem::u8path(path);

        std::error_code ec;
        const uint64_t n_bytes = std::filesystem::file_size(fs_path, ec);
        if (ec) {
            server_refuse_file(path, ec.message());
        }

        gguf_context_ptr gguf(gguf_init_from_file(path.c_str(), { /* no_alloc */ true, /* ctx */ nullptr }));
        if (!gguf) {
            server_refuse_file(path, "not a GGUF file, or truncated");
        }

        const uint64_t n_header = gguf_get_data_offset(gguf.get());

        uint64_t n_needed = n_header;
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf.get()); ++i) {
            n_needed = std::max<uint64_t>(n_needed, n_header + gguf_get_tensor_offset(gguf.get(), i) + gguf_get_tensor_size(gguf.get(), i));
        }
        if (n_needed > n_bytes) {
            server_refuse_file(path, string_format("truncated, %" PRIu64 " of %" PRIu64 " bytes", n_bytes, n_needed));
        }
        n_bytes_data = n_needed - n_header;

        const int64_t i_split = gguf_find_key(gguf.get(), "split.count");
        if (i_split >= 0 && gguf_get_kv_type(gguf.get(), i_split) == GGUF_TYPE_UINT16) {
            n_split = std::max<int>(1, gguf_get_val_u16(gguf.get(), i_split));
        }

        header.resize(n_header);
        std::ifstream file(fs_path, std::ios::binary);
        if (!file.read(&header[0], header.size())) {
            server_refuse_file(path, "cannot be read");
        }
    }
};

// bytes of the tensors of a model, in all of its files. throws server_refusal if one is missing or truncated
inline size_t server_gguf_n_bytes(const std::string & path) {
    const server_gguf first(path);

    std::vector<char> prefix(path.size() + 1);
    if (first.n_split > 1 && llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), 0, first.n_split) <= 0) {
        server_refuse_file(path, "not the first file of its model");
    }

    size_t res = first.n_bytes_data;
    for (int i = 1; i < first.n_split; ++i) {
        std::vector<char> other(path.size() + 32);
        llama_split_path(other.data(), other.size(), prefix.data(), i, first.n_split);

        res += server_gguf(other.data()).n_bytes_data;
    }

    return res;
}

// throws server_refusal if a device does not have as much
// n_bytes_host: address space that is needed besides
inline void server_check_memory(const char * what, const std::map<ggml_backend_dev_t, size_t> & n_bytes, size_t n_bytes_host = 0) {
    const std::unique_ptr<void, decltype(&std::free)> host(std::malloc(n_bytes_host), std::free);
    if (!host && n_bytes_host > 0) {
        throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY, string_format("not enough memory for the %s: %zu bytes of addresses", what, n_bytes_host));
    }

    std::vector<ggml_backend_buffer_ptr> bufs;

    for (const auto & [dev, n_bytes_dev] : n_bytes) {
        auto * buft = ggml_backend_dev_buffer_type(dev);

        const size_t n_max = ggml_backend_buft_get_max_size(buft);
        for (size_t n_left = n_bytes_dev; n_left > 0;) {
            const size_t n = std::min(n_left, n_max);

            bufs.emplace_back(ggml_backend_buft_alloc_buffer(buft, n));
            if (!bufs.back()) {
                throw server_refusal(ERROR_TYPE_OUT_OF_MEMORY,
                        string_format("not enough memory for the %s: %zu bytes on %s", what, n_bytes_dev, ggml_backend_dev_name(dev)));
            }
            n_left -= n;
        }
    }
}

#include "server-gguf.h"

#include "server-refusal.h"

#include "gguf.h"
#include "ggml-cpp.h"
#include "llama.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <vector>

void server_refuse_file(const std::string & path, const std::string & why) {
    throw server_refusal(ERROR_TYPE_SERVER, "failed to load '" + path + "': " + why);
}

server_gguf::server_gguf(const std::string & path) {
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

size_t server_gguf_n_bytes(const std::string & path) {
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

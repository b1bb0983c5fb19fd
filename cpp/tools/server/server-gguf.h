#pragma once

#include <cstddef>
#include <string>

// Checks of GGUF files before they are loaded. They give a reason for a failure. The functions of llama.cpp that load a file
// report no reason, and sometimes abort.

// the header of a GGUF file, without its data
struct server_gguf {
    std::string header;
    size_t      n_bytes_data = 0; // bytes of all tensors in the file
    int         n_split      = 1; // number of files that the model consists of

    // read the header of a file. throw server_refusal if the file is not complete
    explicit server_gguf(const std::string & path);
};

// return the bytes of the tensors of a model in all of its files. throw server_refusal if a file is missing or truncated
size_t server_gguf_n_bytes(const std::string & path);

// throw a server_refusal that names the file and the reason
[[noreturn]] void server_refuse_file(const std::string & path, const std::string & why);

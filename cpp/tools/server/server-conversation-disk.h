#pragma once

#include "server-contexts.h"
#include "server-conversation.h"
#include "server-conversation-files.h"

#include "common.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

// The conversations on disk (--cache-disk): those that RAM drops, and all of them when the server ends.
//
// The key of a file depends on the model, and on the parameters that change its cells or their layout. The head of a file contains
// the tokens, the adapters (LoRA), the types of the cells, and hashes of the draft's model and the projector. The state contains
// the rotation of its cells.
//
// Cells of other types and rotations are converted when they are restored. A state of smaller types is used only if --kv-auto-quant
// lists these types: computing the prompt again is more exact.
class server_conversation_disk : public server_conversation_store {
public:
    server_conversation_disk(const common_params & params, const server_contexts & ctxs) : params(params), ctxs(ctxs) {}

    // load_model(): open the directory. a server that wakes continues with it
    // return false without --cache-disk
    bool init();

    void put(const server_conversation & conversation) override;

    found find(const server_conversation_query & query) override;

    std::unique_ptr<server_conversation> read(const found & found) override;

    void forget(const found & found) override;

    // note: the numbers include files of other models and servers
    size_t n_bytes_limit() const override { return params.cache_disk_limit_mib > 0 ? params.cache_disk_limit_mib*1024ull*1024ull : 0; }
    size_t n_bytes()       const override { return files ? files->n_bytes() : 0; }
    size_t n_entries()     const override { return files ? files->n_files() : 0; }

private:
    // the head of a file
    struct entry {
        server_conversation conversation; // without the data of the state and the checkpoints

        ggml_type type_k = GGML_TYPE_COUNT;
        ggml_type type_v = GGML_TYPE_COUNT;

        uint64_t hash_dft = 0; // of the draft, 0 without its state
    };

    // return the hash of the model, and of the parameters that change its cells or their layout
    uint64_t key() const;

    // return the hash of the file of an adapter
    uint64_t hash_of_lora(const std::string & path);

    std::vector<uint8_t> head_of(const server_conversation & conversation);

    // return null if the conversation is of no use here: other adapters, or images of another projector
    // throw if the head is invalid
    std::unique_ptr<entry> parse(const std::vector<uint8_t> & head);

    // read the heads of new files, drop the entries whose files are gone, and note the types of the cells
    void update();

    // return true if the cells have the types of now, larger ones, or those of --kv-auto-quant
    bool is_exact(const entry & entry) const;

    const common_params   & params;
    const server_contexts & ctxs;

    std::unique_ptr<server_conversation_files> files; // null without --cache-disk

    std::map<std::string, std::unique_ptr<entry>> entries; // by the id of the file, null: of no use here

    std::map<std::string, uint64_t> hashes_lora; // by path

    uint64_t hash_dft    = 0;
    uint64_t hash_mmproj = 0;

    // types of the cells, also while the server sleeps
    ggml_type type_k = GGML_TYPE_COUNT;
    ggml_type type_v = GGML_TYPE_COUNT;

    bool has_warned = false; // about a conversation that cannot be saved
};

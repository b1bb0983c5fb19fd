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

// The conversations on disk (--cache-disk). server_conversations hands over each conversation that it drops from RAM, and all
// conversations when the server ends.
//
// The key of a file is a hash of the model, and of the parameters that change the values or the layout of the cells.
// The head of a file contains the tokens, the LoRA adapters, the types of the cells, and hashes of the draft model and the
// projector.
// The state in a file says which rotation (Hadamard transform) was applied to its cells.
//
// If the cells of the server now have other types or another rotation, a restore converts the cells of the state.
// A state with smaller types than the cells has lost precision, and computing the prompt again is more exact.
// So a state with smaller types is used only if --kv-auto-quant lists these types.
class server_conversation_disk : public server_conversation_store {
public:
    server_conversation_disk(const common_params & params, const server_contexts & ctxs) : params(params), ctxs(ctxs) {}

    // open the directory. load_model() calls this function. A server that wakes up keeps the directory that it has opened before
    // return false if conversations are not stored on disk
    bool init();

    void put(const server_conversation & conversation) override;

    found find(const server_conversation_query & query) override;

    std::unique_ptr<server_conversation> read(const found & found) override;

    void forget(const found & found) override;

    // n_bytes() and n_entries() include the files of other models and other servers.
    size_t n_bytes_limit() const override { return params.cache_disk_limit_mib > 0 ? params.cache_disk_limit_mib*1024ull*1024ull : 0; }
    size_t n_bytes()       const override { return files ? files->n_bytes() : 0; }
    size_t n_entries()     const override { return files ? files->n_files() : 0; }

private:
    // the head of a file, after parse()
    struct entry {
        server_conversation conversation; // without the data of the state and of the checkpoints

        ggml_type type_k = GGML_TYPE_COUNT;
        ggml_type type_v = GGML_TYPE_COUNT;

        uint64_t hash_dft = 0; // hash of the draft model. 0 means: the file has no state of a draft
    };

    // return the hash of the model, and of the parameters that change the values or the layout of the cells
    uint64_t key() const;

    // return the hash of the file of a LoRA adapter
    uint64_t hash_of_lora(const std::string & path);

    std::vector<uint8_t> head_of(const server_conversation & conversation);

    // read the head of a file
    // The result is null if this server cannot use the conversation: the server lacks one of its adapters, or the images in it
    // belong to another projector.
    // Throws if the head is invalid.
    std::unique_ptr<entry> parse(const std::vector<uint8_t> & head);

    // read the heads of new files, and drop the entries whose files are gone
    // Also store the current types of the cells in type_k and type_v.
    void update();

    // return true if the saved K and V are precise enough to be used
    // This is so if K and V each have the current type of the cells, a larger type, or a type in the list of --kv-auto-quant.
    bool is_exact(const entry & entry) const;

    const common_params   & params;
    const server_contexts & ctxs;

    std::unique_ptr<server_conversation_files> files; // null if conversations are not stored on disk

    std::map<std::string, std::unique_ptr<entry>> entries; // by the id of the file. null means: this server cannot use the conversation

    std::map<std::string, uint64_t> hashes_lora; // by path

    uint64_t hash_dft    = 0;
    uint64_t hash_mmproj = 0;

    // current types of the cells. While the server sleeps, these are the types that the cells had before it fell asleep
    ggml_type type_k = GGML_TYPE_COUNT;
    ggml_type type_v = GGML_TYPE_COUNT;

    bool has_warned = false; // a warning about a conversation that cannot be saved was printed
};

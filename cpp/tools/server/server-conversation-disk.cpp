#include "server-conversation-disk.h"

#include "llama-kv.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <stdexcept>
#include <utility>

namespace fs = std::filesystem;

// version of the format of the head and of the states. key() includes the version, so a server ignores files of other versions
static constexpr uint32_t VERSION = 1;

// minimum number of tokens of a conversation that is saved
static constexpr int32_t N_TOKENS_LEAST = 16;

static uint64_t hash_add(uint64_t hash, const void * data, size_t size) {
    return server_conversation_hash(data, size, hash);
}

static uint64_t hash_add(uint64_t hash, const std::string & text) {
    return hash_add(hash, text.data(), text.size());
}

template <typename T>
static uint64_t hash_add(uint64_t hash, T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>, "no padding");
    return hash_add(hash, &value, sizeof(value));
}

// return a hash of a file, computed from its size, its modification time, its first MiB and 512 samples of 4 KiB
// The hash is 0 if the file does not exist.
static uint64_t hash_of_file(const std::string & path) {
    static constexpr size_t N_START   = 1 << 20;
    static constexpr size_t N_SAMPLE  = 4096;
    static constexpr size_t N_SAMPLES = 512;

    std::error_code ec;
    const auto n_bytes = fs::file_size(path, ec);
    if (path.empty() || ec) {
        return 0;
    }

    uint64_t res = hash_add(0, (uint64_t) n_bytes);
    res = hash_add(res, (int64_t) fs::last_write_time(path, ec).time_since_epoch().count());

    std::ifstream in(path, std::ios::binary);
    std::vector<char> data(N_START);

    const auto add = [&](uint64_t pos, size_t n) {
        in.clear();
        in.seekg(pos);
        in.read(data.data(), n);
        res = hash_add(res, data.data(), in.gcount());
    };

    add(0, N_START);
    for (size_t i = 0; i < N_SAMPLES; ++i) {
        add(n_bytes/N_SAMPLES*i, N_SAMPLE);
    }

    return res;
}

// return the hash of a model. A model can consist of several files (NAME-00001-of-00003.gguf)
static uint64_t hash_of_model(const std::string & path) {
    static const std::regex split("(.*)-(\\d{5})-of-(\\d{5})\\.gguf");

    std::smatch match;
    if (!std::regex_match(path, match, split)) {
        return hash_of_file(path);
    }

    uint64_t res = 0;
    for (int i = 1; i <= std::stoi(match[3]); ++i) {
        char name[32];
        snprintf(name, sizeof(name), "-%05d-of-%05d.gguf", i, std::stoi(match[3]));
        res = hash_add(res, hash_of_file(match[1].str() + name));
    }
    return res;
}

// return true if the context is longer than the context that the model was originally trained for
// Some models have two sets of RoPE factors. With such a long context, they use the long set, as in
// llama_model::get_rope_factors().
static bool has_long_rope(const server_contexts & ctxs) {
    const auto value = [&](const std::string & key) {
        char res[128];
        return llama_model_meta_val_str(ctxs.model_tgt, key.c_str(), res, sizeof(res)) > 0 ? std::string(res) : "";
    };

    const auto n_ctx_orig = value(value("general.architecture") + ".rope.scaling.original_context_length");

    return llama_n_ctx_seq(ctxs.ctx_tgt) > (n_ctx_orig.empty() ? llama_model_n_ctx_train(ctxs.model_tgt) : std::stoul(n_ctx_orig));
}

// return the hash of everything that determines the state of the draft: its model files, the kinds of speculative decoding, and
// the types of its cells
static uint64_t hash_of_draft(const common_params & params) {
    const auto & draft = params.speculative.draft;

    uint64_t res = hash_of_model(draft.mparams.path);
    for (const auto type : params.speculative.types) {
        res = hash_add(res, type);
    }
    res = hash_add(res, draft.cache_type_k);
    res = hash_add(res, draft.cache_type_v);

    return res;
}

uint64_t server_conversation_disk::key() const {
    uint64_t res = hash_add(0, VERSION);

    res = hash_add(res, hash_of_model(params.model.path));

    // parameters that change the layout of the state
    res = hash_add(res, params.flash_attn_type);
    res = hash_add(res, params.swa_full);
    res = hash_add(res, llama_model_n_swa(ctxs.model_tgt));
    res = hash_add(res, params.kv_unified ? 1 : llama_n_seq_max(ctxs.ctx_tgt)); // number of streams

    // parameters that change the values of the cells
    for (const float value : { params.rope_freq_base, params.rope_freq_scale, params.yarn_ext_factor, params.yarn_attn_factor,
            params.yarn_beta_fast, params.yarn_beta_slow }) {
        res = hash_add(res, value);
    }
    res = hash_add(res, params.yarn_orig_ctx);
    res = hash_add(res, params.rope_scaling_type);
    res = hash_add(res, params.attention_type);
    res = hash_add(res, has_long_rope(ctxs));

    for (const auto & cur : params.control_vectors) {
        res = hash_add(res, hash_of_file(cur.fname));
        res = hash_add(res, cur.strength);
    }
    res = hash_add(res, params.control_vector_layer_start);
    res = hash_add(res, params.control_vector_layer_end);

    for (const auto & cur : params.kv_overrides) {
        res = hash_add(res, cur.tag);
        res = hash_add(res, std::string(cur.key));
        switch (cur.tag) {
            case LLAMA_KV_OVERRIDE_TYPE_INT:   res = hash_add(res, cur.val_i64);              break;
            case LLAMA_KV_OVERRIDE_TYPE_FLOAT: res = hash_add(res, cur.val_f64);              break;
            case LLAMA_KV_OVERRIDE_TYPE_BOOL:  res = hash_add(res, cur.val_bool);             break;
            case LLAMA_KV_OVERRIDE_TYPE_STR:   res = hash_add(res, std::string(cur.val_str)); break;
        }
    }

    return res;
}

bool server_conversation_disk::init() {
    if (params.cache_disk.empty() || files) {
        return files != nullptr;
    }
    if (params.cache_ram_mib == 0) {
        SRV_WRN("%s", "--cache-disk is ignored, because --cache-ram 0 disables the prompt cache\n");
        return false;
    }

    hash_dft    = hash_of_draft(params);
    hash_mmproj = hash_of_file(params.mmproj.path);

    files = std::make_unique<server_conversation_files>(params.cache_disk, key(), n_bytes_limit(), [](const std::string & text) {
        SRV_WRN("%s\n", text.c_str());
    });
    update();

    SRV_INF("conversations on disk: %zu of this model, %zu in all, %.3f MiB\n", entries.size(), n_entries(), n_bytes() / (1024.0 * 1024.0));

    return true;
}

uint64_t server_conversation_disk::hash_of_lora(const std::string & path) {
    const auto it = hashes_lora.find(path);

    return it != hashes_lora.end() ? it->second : hashes_lora[path] = hash_of_file(path);
}

//
// the head of a file
//

// The numbers of the head have the byte order of the machine, as in the files of saved slots (--slot-save-path).
class head_writer {
public:
    template <typename T>
    void add(T value) {
        add(&value, sizeof(value));
    }

    void add(const void * value, size_t size) {
        data.insert(data.end(), (const uint8_t *) value, (const uint8_t *) value + size);
    }

    std::vector<uint8_t> data;
};

class head_reader {
public:
    explicit head_reader(const std::vector<uint8_t> & data) : data(data) {}

    template <typename T>
    T get() {
        T res;
        get(&res, sizeof(res));
        return res;
    }

    void get(void * value, size_t size) {
        if (size > n_left()) {
            throw std::runtime_error("the head is too short");
        }
        if (size > 0) {
            memcpy(value, data.data() + pos, size);
        }
        pos += size;
    }

    // read how many items follow, and check that the rest of the head is long enough for them
    // size_item: minimum number of bytes of each item
    uint32_t count(size_t size_item) {
        const auto res = get<uint32_t>();
        if (res > n_left()/size_item) {
            throw std::runtime_error("the head is too short");
        }
        return res;
    }

    size_t n_left() const { return data.size() - pos; }

private:
    const std::vector<uint8_t> & data;

    size_t pos = 0;
};

std::vector<uint8_t> server_conversation_disk::head_of(const server_conversation & conversation) {
    const auto & prompt = conversation.prompt;
    const auto   packed = prompt.tokens.serialize();

    head_writer res;
    res.add((int32_t)  type_k);
    res.add((int32_t)  type_v);
    res.add((uint64_t) (conversation.data.drft.empty() ? 0 : hash_dft));
    res.add((uint64_t) (prompt.tokens.has_media() ? hash_mmproj : 0));
    res.add((int32_t)  conversation.pos_min);
    res.add((int32_t)  prompt.n_draft_retry);
    res.add((int32_t)  prompt.provenance.n_exact);
    res.add((int32_t)  prompt.provenance.n_last_user);

    res.add((uint32_t) prompt.provenance.lora.size());
    for (const auto & lora : prompt.provenance.lora) {
        res.add((uint64_t) hash_of_lora(lora.path));
        res.add((float)    lora.scale);
    }
    res.add((uint32_t) prompt.checkpoints.size());
    for (const auto & ckpt : prompt.checkpoints) {
        res.add((int64_t) ckpt.n_tokens);
        res.add((int32_t) ckpt.pos_min);
        res.add((int32_t) ckpt.pos_max);
    }
    res.add((uint32_t) (packed.size()/sizeof(llama_token)));
    res.add(packed.data(), packed.size());

    return std::move(res.data);
}

std::unique_ptr<server_conversation_disk::entry> server_conversation_disk::parse(const std::vector<uint8_t> & head) {
    head_reader in(head);

    auto res = std::make_unique<entry>();

    auto & prompt = res->conversation.prompt;

    res->type_k   = (ggml_type) in.get<int32_t>();
    res->type_v   = (ggml_type) in.get<int32_t>();
    res->hash_dft = in.get<uint64_t>();

    // the tokens of images can be used only with the projector that they were computed with
    const auto hash_media = in.get<uint64_t>();
    if (hash_media != 0 && hash_media != hash_mmproj) {
        return nullptr;
    }

    res->conversation.pos_min = in.get<int32_t>();

    prompt.n_draft_retry          = in.get<int32_t>();
    prompt.provenance.n_exact     = in.get<int32_t>();
    prompt.provenance.n_last_user = in.get<int32_t>();

    bool has_lora = true;

    for (uint32_t n = in.count(12); n > 0; --n) {
        const auto hash  = in.get<uint64_t>();
        const auto scale = in.get<float>();

        const auto it = std::find_if(params.lora_adapters.begin(), params.lora_adapters.end(), [&](const auto & cur) {
            return hash_of_lora(cur.path) == hash;
        });
        if (it == params.lora_adapters.end()) {
            has_lora = false;
            continue;
        }
        prompt.provenance.lora.push_back(*it);
        prompt.provenance.lora.back().scale = scale;
    }
    for (uint32_t n = in.count(16); n > 0; --n) {
        prompt.checkpoints.emplace_back();
        auto & ckpt = prompt.checkpoints.back();
        ckpt.n_tokens = in.get<int64_t>();
        ckpt.pos_min  = in.get<int32_t>();
        ckpt.pos_max  = in.get<int32_t>();
    }

    llama_tokens packed(in.count(sizeof(llama_token)));
    in.get(packed.data(), packed.size()*sizeof(llama_token));

    prompt.tokens = server_tokens::deserialize(packed, !params.mmproj.path.empty());

    const bool has_types = res->type_k >= 0 && res->type_k <= GGML_TYPE_COUNT && res->type_v >= 0 && res->type_v <= GGML_TYPE_COUNT;

    if (in.n_left() > 0 || !has_types || !prompt.tokens.validate(ctxs.ctx_tgt)) {
        throw std::runtime_error("the head is invalid");
    }

    return has_lora && (hash_media != 0 || !prompt.tokens.has_media()) ? std::move(res) : nullptr;
}

void server_conversation_disk::update() {
    if (!ctxs.ctx_tgt) {
        return; // the server sleeps
    }
    llama_get_memory_type(ctxs.ctx_tgt, &type_k, &type_v);

    const auto & list = files->list();

    for (auto it = entries.begin(); it != entries.end(); ) {
        it = list.count(it->first) ? std::next(it) : entries.erase(it);
    }
    for (const auto & [id, file] : list) {
        if (entries.count(id)) {
            continue;
        }
        auto & entry = entries[id];
        try {
            entry = parse(file.head);
            if (entry && file.sizes.size() != 2 + 3*entry->conversation.prompt.checkpoints.size()) {
                throw std::runtime_error("the number of parts is wrong");
            }
        } catch (const std::exception & err) {
            entry = nullptr;
            SRV_WRN("ignoring the conversation %s: %s\n", id.c_str(), err.what());
        }
    }
}

//
// the store
//

bool server_conversation_disk::is_exact(const entry & entry) const {
    const auto n_bits = [](ggml_type type) {
        return type < GGML_TYPE_COUNT ? 8.0*ggml_type_size(type)/ggml_blck_size(type) : 0.0;
    };
    const auto is_exact = [&](ggml_type type, ggml_type type_now) {
        return n_bits(type) >= n_bits(type_now) ||
            std::find(params.kv_auto_quant.begin(), params.kv_auto_quant.end(), type) != params.kv_auto_quant.end();
    };

    return is_exact(entry.type_k, type_k) && is_exact(entry.type_v, type_v);
}

void server_conversation_disk::put(const server_conversation & conversation) try {
    if (conversation.prompt.n_tokens() < N_TOKENS_LEAST) {
        return;
    }

    const int64_t t_start = ggml_time_us();

    const int64_t age_us  = std::max<int64_t>(0, t_start - conversation.t_last_used);

    update();

    std::vector<std::string> superfluous;

    for (const auto & [id, entry] : entries) {
        if (!entry || entry->type_k != type_k || entry->type_v != type_v) {
            continue;
        }
        const auto & other = entry->conversation;
        if (server_has_all(ctxs, other.prompt, other.pos_min, conversation.prompt)) {
            files->touch(id, age_us);
            return;
        }
        if (server_has_all(ctxs, conversation.prompt, conversation.pos_min, other.prompt)) {
            superfluous.push_back(id);
        }
    }

    const auto head = head_of(conversation);

    std::vector<server_conversation_files::bytes> parts;
    const auto add = [&](const std::vector<uint8_t> & data) { parts.push_back({ data.data(), data.size() }); };

    add(conversation.data.main);
    add(conversation.data.drft);
    for (const auto & ckpt : conversation.prompt.checkpoints) {
        add(ckpt.data_tgt);
        add(ckpt.data_dft);
        add(ckpt.data_spec);
    }

    if (files->write({ head.data(), head.size() }, parts, age_us).empty()) {
        return;
    }
    for (const auto & id : superfluous) {
        files->remove(id);
    }

    SRV_INF("saved a conversation of %d tokens to disk, %.3f MiB in %.2f ms\n",
            conversation.prompt.n_tokens(), conversation.size() / (1024.0 * 1024.0), (ggml_time_us() - t_start) / 1000.0);
} catch (const std::exception & err) {
    if (!std::exchange(has_warned, true)) {
        SRV_WRN("a conversation was not saved to disk: %s\n", err.what());
    }
}

server_conversation_store::found server_conversation_disk::find(const server_conversation_query & query) {
    found res;

    update();

    for (const auto & [id, entry] : entries) {
        if (!entry || !is_exact(*entry)) {
            continue;
        }
        const int32_t n_usable = query.n_usable(entry->conversation);
        const int32_t n_tokens = entry->conversation.prompt.n_tokens();
        if (n_usable > res.n_usable || (n_usable > 0 && n_usable == res.n_usable && n_tokens < res.n_tokens)) {
            res.n_usable = n_usable;
            res.n_tokens = n_tokens;
            res.id       = id;
        }
    }

    return res;
}

std::unique_ptr<server_conversation> server_conversation_disk::read(const found & found) try {
    const auto it = entries.find(found.id);
    if (it == entries.end() || !it->second) {
        return nullptr;
    }
    const auto & entry = it->second;

    auto data = files->read(found.id);

    if (data.size() != 2 + 3*entry->conversation.prompt.checkpoints.size()) {
        entries.erase(it); // the file is damaged, or was removed
        return nullptr;
    }

    auto res = std::make_unique<server_conversation>();
    res->pos_min   = entry->conversation.pos_min;
    res->prompt    = entry->conversation.prompt.clone();
    res->data.main = std::move(data[0]);

    const bool has_dft = ctxs.ctx_dft && entry->hash_dft == hash_dft;
    if (has_dft) {
        res->data.drft = std::move(data[1]);
    }

    size_t i = 2;
    for (auto & ckpt : res->prompt.checkpoints) {
        ckpt.data_tgt  = std::move(data[i++]);
        ckpt.data_dft  = std::move(data[i++]);
        ckpt.data_spec = std::move(data[i++]);
        if (!has_dft) {
            ckpt.data_dft  = {};
            ckpt.data_spec = {};
        }
    }

    SRV_INF("read a conversation of %d tokens from disk, %.3f MiB\n", res->prompt.n_tokens(), res->size() / (1024.0 * 1024.0));

    return res;
} catch (const std::exception & err) { // the memory for the conversation cannot be allocated
    SRV_WRN("a conversation was not read from disk: %s\n", err.what());
    entries[found.id] = nullptr; // otherwise, the caller's next search finds the same conversation again
    return nullptr;
}

void server_conversation_disk::forget(const found & found) {
    SRV_WRN("ignoring the conversation %s: its state cannot be restored\n", found.id.c_str());
    entries[found.id] = nullptr;
}

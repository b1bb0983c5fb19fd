#include "reference.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>

size_t state_part::data() const {
    switch (kind) {
        case rows:    return at + sizeof(int32_t) + sizeof(uint64_t);
        case columns: return at + sizeof(int32_t) + 2*sizeof(uint32_t);
        case matrix:  return at + sizeof(int32_t) + 3*sizeof(uint64_t);
        default:      return at;
    }
}

//
// structure
//

// indices of the caches of DSV4. Caches 0 and 1 have cells. Caches 2 and 3 contain the compressed keys of the two kinds of
// compressed attention (CSA, HCA), and cache 4 contains the compressed keys of the indexer
static constexpr uint32_t dsv4_compressed = 2;
static constexpr uint32_t dsv4_indexer    = 4;

// return the block size of the rotation (Hadamard transform) of a cache, from the first header of the cache in the state
static uint32_t rotation(const state_parts & state, uint32_t cache, state_part::part_kind kind) {
    for (const auto & part : state.parts) {
        if (part.kind == kind && part.cache == cache) {
            return part.n_rot;
        }
    }
    return 0;
}

// return the block size of the rotation of DSV4's compressed keys. They have the same heads as the other keys, and no header of
// their own
static uint32_t dsv4_rotation(const state_parts & state) {
    return std::max(rotation(state, 0, state_part::rot_k), rotation(state, 1, state_part::rot_k));
}

namespace {

struct parse_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

bool is_cell_type(int32_t type) {
    switch (type) {
        case GGML_TYPE_F32:  case GGML_TYPE_F16:  case GGML_TYPE_BF16: case GGML_TYPE_Q8_0: case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1: case GGML_TYPE_Q5_0: case GGML_TYPE_Q5_1: case GGML_TYPE_IQ4_NL:
            return true;
        default:
            return false;
    }
}

// splits a saved state into parts
// A state does not record whether a cache has V, nor which bytes of a cell follow its position. So the parser tries each
// combination of the two. It checks types, sizes and sequences, and that the last part ends exactly at the end of the state.
// These checks are so strict that only one combination fits.
class parser {
  public:
    parser(const state_shape & shape, state_parts & out) : shape(shape), out(out) {}

    void run() {
        uint32_t n_name = 0;
        get(n_name);
        skip(n_name);
        if (shape.arch == "deepseek4") {
            skip(3*sizeof(uint32_t)); // magic, version, mode
        }
        flush();
        // bytes of a cell after its position: none, a two-dimensional position, or a two-dimensional position and a token
        for (const size_t n : { 0, 8, 12 }) {
            n_ext = n;
            if (attempt([&] { caches(0); })) {
                return;
            }
        }
        throw std::runtime_error("the saved state cannot be read: " + last_error);
    }

  private:
    template <typename T> void get(T & val) {
        if (sizeof(T) > out.data.size() - at) {
            throw parse_error("it ends within a number");
        }
        memcpy(&val, out.data.data() + at, sizeof(T));
        at += sizeof(T);
    }

    void skip(size_t n) {
        if (n > out.data.size() - at) {
            throw parse_error("it ends too early");
        }
        at += n;
    }

    void require(bool ok, const char * what) const {
        if (!ok) {
            throw parse_error(std::string(what) + " at byte " + std::to_string(at));
        }
    }

    // add a part that consists of the bytes since the last part
    void add(state_part part) {
        part.at   = done;
        part.size = at - done;
        done      = at;
        if (part.size > 0) {
            out.parts.push_back(part);
        }
    }

    void flush() {
        add(state_part());
    }

    template <typename F> bool attempt(F && f) {
        const size_t at_old   = at;
        const size_t done_old = done;
        const size_t n_parts  = out.parts.size();
        try {
            f();
            return true;
        } catch (const parse_error & err) {
            if (at > furthest) {
                furthest   = at;
                last_error = err.what();
            }
            at   = at_old;
            done = done_old;
            out.parts.resize(n_parts);
            return false;
        }
    }

    // read the caches from this index on, and the data after them
    void caches(uint32_t index) {
        if (index > 0 && attempt([&] { require(at == out.data.size(), "more than its caches"); })) {
            return;
        }
        for (const bool has_v : { true, false }) {
            if (attempt([&] { cache(index, has_v); caches(index + 1); })) {
                return;
            }
        }
        require(index > 0, "no KV cache");
        if (shape.arch == "deepseek4") {
            require(index == dsv4_compressed, "not two caches with positions");
            compressed();
            return;
        }
        require(shape.hybrid, "neither a cache nor the end");
        recurrent();
        out.windowed_hybrid = index > 1;
    }

    void cache(uint32_t index, bool has_v) {
        const size_t start = at;
        uint32_t n_stream = 0;
        get(n_stream);
        require(n_stream == 1 || n_stream == shape.seqs, "not a number of streams");
        for (uint32_t s = 0; s < n_stream; ++s) {
            uint32_t n_cells = 0;
            get(n_cells);
            require(n_cells <= shape.cells, "more cells than there are");
            if (n_cells == 0) {
                continue;
            }
            for (uint32_t i = 0; i < n_cells; ++i) {
                cell();
            }
            if (index == 0 && first.empty()) {
                first.assign(out.data.begin() + (ptrdiff_t) start, out.data.begin() + (ptrdiff_t) at);
            }
            tensors(index, s, n_cells, has_v);
        }
        flush();
    }

    void cell() {
        int32_t  pos   = 0;
        uint32_t n_seq = 0;
        get(pos);
        get(n_seq);
        require(pos >= 0 && n_seq > 0 && n_seq <= shape.seqs, "not a cell");
        skip(n_ext);
        for (uint32_t i = 0; i < n_seq; ++i) {
            uint32_t seq = 0;
            get(seq);
            require(seq < shape.seqs, "no such sequence");
        }
    }

    void tensors(uint32_t index, uint32_t s, uint32_t n_cells, bool has_v) {
        uint32_t v_trans = 0;
        uint32_t n_layer = 0;
        get(v_trans);
        get(n_layer);
        require(v_trans <= 1 && n_layer <= 1024, "not the head of a cache");
        flush();

        uint32_t rot[2] = {};
        for (const bool v : { false, true }) {
            get(rot[v]);
            require(rot[v] % 64 == 0 && rot[v] <= 4096, "not a rotation");
            state_part part;
            part.kind   = v ? state_part::rot_v : state_part::rot_k;
            part.cache  = index;
            part.stream = s;
            part.n_rot  = rot[v];
            add(part);
        }

        for (const bool v : { false, true }) {
            for (uint32_t l = 0; l < n_layer && (!v || has_v); ++l) {
                state_part part;
                part.kind   = v && v_trans ? state_part::columns : state_part::rows;
                part.cache  = index;
                part.stream = s;
                part.layer  = l;
                part.is_v   = v;
                part.n_rows = n_cells;
                part.n_rot  = rot[v];
                tensor(part);
            }
        }
    }

    void tensor(state_part part) {
        int32_t  type   = 0;
        uint64_t n_row  = 0; // bytes of a row
        uint32_t n_embd = 0;
        uint32_t n_el   = 0;
        get(type);
        require(is_cell_type(type), "not a type of cells");
        part.type = (ggml_type) type;
        const size_t n_block = ggml_type_size(part.type);
        if (part.kind == state_part::columns) {
            get(n_el);
            get(n_embd);
            require(n_el == n_block && n_embd > 0 && n_embd <= 1 << 20, "not the head of transposed rows");
            n_row = (uint64_t) n_el*n_embd;
        } else {
            get(n_row);
            require(n_row > 0 && n_row <= 1 << 22 && n_row % n_block == 0, "not the size of a row");
        }
        part.n_embd = (int64_t) (n_row/n_block)*ggml_blck_size(part.type);
        skip((size_t) part.n_rows*n_row);
        add(part);
    }

    // read DSV4's compressed keys, which have no cells, and the uncompressed data that they are computed from
    void compressed() {
        for (uint32_t index = dsv4_compressed; index <= dsv4_indexer; ++index) {
            uint32_t version  = 0;
            uint32_t n_rows   = 0;
            uint32_t n_stream = 0;
            uint32_t n_layer  = 0;
            get(version);
            get(n_rows);
            get(n_stream);
            get(n_layer);
            require((n_stream == 1 || n_stream == shape.seqs) && n_layer <= 1024, "not the head of compressed keys");
            for (uint32_t l = 0; l < n_layer; ++l) {
                skip(sizeof(uint32_t));
                flush();
                compressed_keys(index, l, n_rows, n_stream);
            }
            flush();
        }
        at = out.data.size();
        flush();
    }

    void compressed_keys(uint32_t index, uint32_t l, uint32_t n_rows, uint32_t n_stream) {
        int32_t  type   = 0;
        uint64_t n_embd = 0;
        uint64_t rows   = 0;
        uint64_t n_row  = 0;
        get(type);
        get(n_embd);
        get(rows);
        get(n_row);
        require(is_cell_type(type) && rows == n_rows, "not the head of compressed rows");
        state_part part;
        part.kind   = state_part::matrix;
        part.cache  = index;
        part.layer  = l;
        part.type   = (ggml_type) type;
        part.n_embd = (int64_t) n_embd;
        part.n_rows = (int64_t) rows*n_stream;
        part.n_rot  = index < dsv4_indexer ? dsv4_rotation(out) : 0; // the rotation of the indexer's keys does not depend on the type
        part.n_streams = n_stream;
        require(n_row == ggml_row_size(part.type, part.n_embd), "not the size of a compressed row");
        skip((size_t) part.n_rows*n_row);
        add(part);
    }

    // read recurrent states, which have types of their own
    // The cache of an indexer may follow. It has the same cells as the first cache, so it begins with the same bytes. The
    // parser searches for these bytes.
    void recurrent() {
        const auto begin = out.data.begin();
        for (auto it = begin + (ptrdiff_t) at; !first.empty(); ++it) {
            it = std::search(it, out.data.end(), first.begin(), first.end());
            if (it == out.data.end()) {
                break;
            }
            for (const bool has_v : { true, false }) {
                const auto with_indexer = [&] {
                    at = (size_t) (it - begin);
                    flush();
                    cache(1, has_v);
                    require(at == out.data.size(), "more than the indexer's cache");
                };
                if (attempt(with_indexer)) {
                    return;
                }
            }
        }
        require(at < out.data.size(), "no recurrent state");
        at = out.data.size();
        flush();
    }

    const state_shape & shape;
    state_parts &       out;

    size_t at    = 0;
    size_t done  = 0; // end of the bytes that belong to a part
    size_t n_ext = 0; // bytes of a cell after its position

    std::vector<uint8_t> first; // the bytes of the first cache up to its first tensor

    size_t      furthest = 0;
    std::string last_error;
};

} // namespace

state_parts state_parse(const state_shape & shape, std::vector<uint8_t> data) {
    state_parts res;
    res.arch = shape.arch;
    res.data = std::move(data);
    parser(shape, res).run();
    return res;
}

//
// values
//

std::vector<float> values_of(ggml_type type, const uint8_t * data, int64_t n) {
    std::vector<float> res((size_t) n);
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), data, (size_t) n*sizeof(float));
    } else {
        const std::vector<uint8_t> aligned(data, data + ggml_row_size(type, n)); // aligned copy, because a state has no gaps between its parts
        ggml_get_type_traits(type)->to_float(aligned.data(), res.data(), n);
    }
    return res;
}

// Round as a batch on the CPU does, which uses the type's from_float (SET_ROWS). ggml_quantize_chunk() rounds some values
// differently. from_float cannot be called directly if backends are separate libraries. So compute a graph that copies one whole,
// contiguous tensor: such a copy always uses from_float.
std::vector<uint8_t> rows_of(ggml_type type, const std::vector<float> & values, int64_t n_row) {
    std::vector<uint8_t> res(ggml_row_size(type, n_row)*(values.size()/(size_t) n_row));
    if (values.empty()) {
        return res;
    }
    const auto check = [](bool ok) {
        if (!ok) {
            throw std::runtime_error("the reference cannot be computed");
        }
    };
    const std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)> cpu(
        ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr), ggml_backend_free);
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx(
        ggml_init({ 8*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }), ggml_free);
    check(cpu && ctx);

    ggml_tensor * src = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_row, (int64_t) values.size()/n_row);
    ggml_tensor * dst = ggml_new_tensor_2d(ctx.get(), type, n_row, src->ne[1]);
    ggml_cgraph * gf  = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, ggml_cpy(ctx.get(), src, dst));

    const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buf(
        ggml_backend_alloc_ctx_tensors(ctx.get(), cpu.get()), ggml_backend_buffer_free);
    check(buf != nullptr);
    ggml_backend_tensor_set(src, values.data(), 0, ggml_nbytes(src));
    check(ggml_backend_graph_compute(cpu.get(), gf) == GGML_STATUS_SUCCESS);
    ggml_backend_tensor_get(dst, res.data(), 0, res.size());
    return res;
}

void hadamard(std::vector<float> & values, uint32_t n) {
    const float scale = 1.0f/sqrtf((float) n);
    for (size_t start = 0; start + n <= values.size(); start += n) {
        float * x = values.data() + start;
        for (uint32_t i = 0; i < n; ++i) {
            x[i] *= scale;
        }
        for (uint32_t len = 1; len < n; len *= 2) {
            for (uint32_t i = 0; i < n; ++i) {
                if ((i & len) == 0) {
                    const float a = x[i];
                    const float b = x[i + len];
                    x[i]       = a + b;
                    x[i + len] = a - b;
                }
            }
        }
    }
}

//
// conversion
//

// return true if the model's graphs rotate K or V of a cache
// The header of a cache can contain the block size of a rotation although the graphs do not rotate. So use rules that depend on
// the architecture. The check retype-basis tests these rules, with a model's answers over converted cells.
static bool graphs_rotate(const state_parts & state, const state_part & part) {
    if (state.arch == "deepseek4") {
        return true;
    }
    // upstream does not rotate the cells of a model that has two caches and recurrent states
    if (state.windowed_hybrid) {
        return false;
    }
    // the second cache contains the keys of an indexer, which are not rotated
    if (part.cache == 1 && (state.arch == "minimax-m3" || state.arch == "qwen4exp")) {
        return false;
    }
    // A cache without V belongs to MLA, or to the indexer of a model with MLA. The rotation of such a cache is the same for
    // every type, so a change of types does not change its rotation.
    return std::any_of(state.parts.begin(), state.parts.end(), [&](const state_part & p) {
        return p.is_v && p.cache == part.cache;
    });
}

static uint32_t rotation_like(const state_parts & like, const state_part & part) {
    if (part.kind == state_part::matrix) {
        return part.cache < dsv4_indexer ? dsv4_rotation(like) : 0;
    }
    return rotation(like, part.cache, part.is_v || part.kind == state_part::rot_v ? state_part::rot_v : state_part::rot_k);
}

static std::vector<uint8_t> convert_data(const state_parts & from, const state_part & part, ggml_type type, uint32_t n_rot) {
    const uint8_t * begin = from.data.data() + part.data();
    const uint8_t * end   = from.data.data() + part.at + part.size;
    if (type == part.type && n_rot == part.n_rot) {
        return std::vector<uint8_t>(begin, end);
    }
    std::vector<float> values = values_of(part.type, begin, part.n_embd*part.n_rows);
    if (n_rot != part.n_rot) {
        for (const uint32_t n : { part.n_rot, n_rot }) { // undo the old rotation, and apply the new one
            if (n > 0) {
                hadamard(values, n);
            }
        }
    }
    return rows_of(type, values, part.kind == state_part::columns ? part.n_rows : part.n_embd);
}

namespace {

class state_builder {
  public:
    explicit state_builder(const state_parts & from) {
        res.arch            = from.arch;
        res.windowed_hybrid = from.windowed_hybrid;
    }

    template <typename T> void put(T val) {
        const auto * p = (const uint8_t *) &val;
        append(p, p + sizeof(val));
    }

    void append(const uint8_t * begin, const uint8_t * end) {
        res.data.insert(res.data.end(), begin, end);
    }

    // add a part that consists of the bytes since the last call
    void end(state_part part) {
        part.at   = done;
        part.size = res.data.size() - done;
        done      = res.data.size();
        res.parts.push_back(part);
    }

    void tensor(const state_part & part, const std::vector<uint8_t> & data) {
        put((int32_t) part.type);
        switch (part.kind) {
            case state_part::columns:
                put((uint32_t) ggml_type_size(part.type));
                put((uint32_t) part.n_embd);
                break;
            case state_part::matrix:
                put((uint64_t) part.n_embd);
                put((uint64_t) part.n_rows/part.n_streams);
                put((uint64_t) ggml_row_size(part.type, part.n_embd));
                break;
            default:
                put((uint64_t) ggml_row_size(part.type, part.n_embd));
                break;
        }
        append(data.data(), data.data() + data.size());
        end(part);
    }

    state_parts res;

  private:
    size_t done = 0;
};

} // namespace

state_parts state_convert(const state_parts & from, const state_parts & like, const cell_types & types, basis how) {
    state_builder to(from);
    for (const auto & part : from.parts) {
        const uint8_t * begin = from.data.data() + part.at;

        state_part next = part;
        switch (part.kind) {
            case state_part::bytes:
                to.append(begin, begin + part.size);
                to.end(next);
                break;
            case state_part::rot_k:
            case state_part::rot_v:
                next.n_rot = rotation_like(like, part);
                to.put(next.n_rot);
                to.end(next);
                break;
            default:
                {
                    const bool turns = how == basis::by_type || (how == basis::by_graph && graphs_rotate(from, part));
                    next.type  = part.is_v ? types.v : types.k;
                    next.n_rot = rotation_like(like, part);
                    to.tensor(next, convert_data(from, part, next.type, turns ? next.n_rot : part.n_rot));
                }
                break;
        }
    }
    return to.res;
}

bool state_turns(const state_parts & from, const state_parts & like) {
    return std::any_of(from.parts.begin(), from.parts.end(), [&](const state_part & part) {
        return part.kind != state_part::bytes && part.n_rot != rotation_like(like, part);
    });
}

//
// comparison
//

static std::string describe(const state_part & part) {
    const std::string where = "cache " + std::to_string(part.cache) + ", stream " + std::to_string(part.stream);
    switch (part.kind) {
        case state_part::bytes: return "what is no cell";
        case state_part::rot_k: return "the rotation of K in the head of " + where;
        case state_part::rot_v: return "the rotation of V in the head of " + where;
        default:                return std::string(part.is_v ? "V" : "K") + " (" + ggml_type_name(part.type) + ") of " + where +
                                    ", layer " + std::to_string(part.layer);
    }
}

// describe the rows of a tensor that differ
static std::string describe_rows(const state_part & part, const uint8_t * expected, const uint8_t * is) {
    const size_t n_data = part.size - (part.data() - part.at);
    const bool   by_col = part.kind == state_part::columns;
    const size_t n_rows = (size_t) (by_col ? part.n_embd : part.n_rows);
    const size_t n_row  = n_data/n_rows;

    size_t n_differ = 0;
    size_t first    = n_rows;
    for (size_t i = 0; i < n_rows; ++i) {
        if (memcmp(expected + i*n_row, is + i*n_row, n_row) != 0) {
            n_differ++;
            first = std::min(first, i);
        }
    }
    const int64_t n_val = by_col ? part.n_rows : part.n_embd;
    const auto a = values_of(part.type, expected + first*n_row, n_val);
    const auto b = values_of(part.type, is       + first*n_row, n_val);
    size_t at = 0;
    while (at + 1 < a.size() && memcmp(&a[at], &b[at], sizeof(float)) == 0) {
        at++;
    }
    return std::to_string(n_differ) + " of " + std::to_string(n_rows) + (by_col ? " columns" : " rows") + ", the first one is " +
        std::to_string(first) + ", where value " + std::to_string(at) + " is " + std::to_string(b[at]) + " instead of " + std::to_string(a[at]);
}

std::string state_difference(const state_parts & expected, const std::vector<uint8_t> & is) {
    for (const auto & part : expected.parts) {
        if (part.at + part.size > is.size()) {
            return "it ends within " + describe(part);
        }
        const uint8_t * a = expected.data.data() + part.at;
        const uint8_t * b = is.data() + part.at;
        if (memcmp(a, b, part.size) == 0) {
            continue;
        }
        const size_t n_head = part.data() - part.at;
        if (part.kind < state_part::rows || memcmp(a, b, n_head) != 0) {
            return describe(part) + (part.kind < state_part::rows ? "" : " has another head");
        }
        // DSV4 also saves rows that were never written. Their values are 0, which q4_0 represents in two ways, so compare the
        // values.
        if (part.kind == state_part::matrix && values_of(part.type, a + n_head, part.n_embd*part.n_rows) == values_of(part.type, b + n_head, part.n_embd*part.n_rows)) {
            continue;
        }
        return describe(part) + ": " + describe_rows(part, a + n_head, b + n_head);
    }
    return is.size() == expected.data.size() ? "" : "it goes on behind its end";
}

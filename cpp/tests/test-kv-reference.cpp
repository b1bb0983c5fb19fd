// Unit tests of reference.h, with which kv-check computes the expected result of a change of types

#include "../tools/kv-check/reference.h"

#include "test-kv.h"

#include "ggml-backend.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>

static bool throws(const std::function<void()> & f) {
    try {
        f();
        return false;
    } catch (const std::runtime_error &) {
        return true;
    }
}

static void test_hadamard() {
    std::vector<float> x(64, 0.0f);
    x[5] = 8.0f;
    hadamard(x, 64);

    bool signs = true;
    for (uint32_t i = 0; i < 64; ++i) {
        signs = signs && x[i] == (((i ^ (i >> 2)) & 1) != 0 ? -1.0f : 1.0f);
    }
    check(signs, "a column of the matrix has the signs of Walsh");

    hadamard(x, 64);
    check(x[5] == 8.0f && x[4] == 0.0f, "it is its own inverse");

    std::vector<float> two(128, 1.0f);
    hadamard(two, 64);
    check(two[0] == 8.0f && two[64] == 8.0f && two[1] == 0.0f, "each block is turned by itself");
}

static void test_values() {
    std::vector<float> x(32);
    for (int i = 0; i < 32; ++i) {
        x[i] = (float) (i - 16)*8.0f - 0.25f;
    }
    x[0] = -127.0f;

    const auto q8 = rows_of(GGML_TYPE_Q8_0, x, 32);
    check_eq("bytes of a block of q8_0", 34, q8.size());
    check_eq("scale 1, low byte",  0x00, q8[0]);
    check_eq("scale 1, high byte", 0x3c, q8[1]);
    check_eq("the smallest value", (uint8_t) -127, q8[2]);
    check_eq("a value that is rounded", (uint8_t) 8, q8[2 + 17]);
    check(values_of(GGML_TYPE_Q8_0, q8.data(), 32)[17] == 8.0f, "and back");

    const auto q4 = rows_of(GGML_TYPE_Q4_0, std::vector<float>(32, 0.0f), 32);
    check(q4[0] == 0 && q4[1] == 0x80 && q4[2] == 0x88, "q4_0 has a zero that is not made of zeros");

    const std::vector<float> ones(64, 1.0f);
    check(values_of(GGML_TYPE_BF16, rows_of(GGML_TYPE_BF16, ones, 64).data(), 64) == ones, "bf16 has 1");
    check(values_of(GGML_TYPE_F32,  rows_of(GGML_TYPE_F32,  x,    32).data(), 32) == x,    "f32 has all");

    auto packed = rows_of(GGML_TYPE_F16, ones, 64);
    packed.insert(packed.begin(), 0);
    check(values_of(GGML_TYPE_F16, packed.data() + 1, 64) == ones, "at an odd address");
}

// a state as llama_state_get_data() writes it, with one stream and one layer
struct made_state {
    std::vector<uint8_t> data;

    template <typename T> made_state & put(T val) {
        const auto * p = (const uint8_t *) &val;
        data.insert(data.end(), p, p + sizeof(val));
        return *this;
    }

    void tensor(ggml_type type, uint32_t n_embd, const std::vector<float> & values) {
        put((int32_t) type).put((uint64_t) ggml_row_size(type, n_embd));
        const auto rows = rows_of(type, values, n_embd);
        data.insert(data.end(), rows.begin(), rows.end());
    }

    made_state(ggml_type type, uint32_t n_rot, const std::vector<float> & k, const std::vector<float> & v) {
        put((uint32_t) 4).put('t').put('e').put('s').put('t');
        put((uint32_t) 1).put((uint32_t) 2); // streams, cells
        for (int32_t pos = 0; pos < 2; ++pos) {
            put(pos).put((uint32_t) 1).put((int32_t) 0);
        }
        put((uint32_t) 0).put((uint32_t) 1).put(n_rot).put(n_rot); // not transposed, one layer
        tensor(type, 64, k);
        if (!v.empty()) {
            tensor(type, 64, v);
        }
    }
};

static std::vector<float> numbers(float first) {
    std::vector<float> res(2*64);
    for (size_t i = 0; i < res.size(); ++i) {
        res[i] = sinf(first + (float) i);
    }
    return values_of(GGML_TYPE_F16, rows_of(GGML_TYPE_F16, res, 64).data(), 2*64);
}

static void test_states() {
    const state_shape shape = { "test", false, 1, 256 };

    const auto k = numbers(0.0f);
    const auto v = numbers(1.0f);

    const made_state f16(GGML_TYPE_F16, 0, k, v);
    const auto from = state_parse(shape, f16.data);
    check_eq("parts", 6, from.parts.size());

    auto k_turned = k;
    auto v_turned = v;
    hadamard(k_turned, 64);
    hadamard(v_turned, 64);
    const made_state q8(GGML_TYPE_Q8_0, 64, k_turned, v_turned);
    const auto like = state_parse(shape, q8.data);

    const cell_types types = { GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 };
    const auto to = state_convert(from, like, types);
    check(state_difference(to, q8.data).empty(), "f16 becomes q8_0 in the other basis");

    const auto kept = state_convert(from, like, types, basis::kept);
    check(!state_difference(kept, q8.data).empty(), "in its own basis it is another state");

    auto wrong = q8.data;
    wrong.back() ^= 1;
    check(state_difference(to, wrong).find("V (q8_0) of cache 0, stream 0, layer 0: 1 of 2 rows, the first one is 1, where value 63") == 0,
        "a difference is named: " + state_difference(to, wrong));
    wrong.pop_back();
    check(!state_difference(to, wrong).empty(), "a shorter state differs");
    wrong = q8.data;
    wrong.push_back(0);
    check(!state_difference(to, wrong).empty(), "a longer state differs");

    // A cache of MLA has no V. A change of types does not rotate its cells, even if the block size of the rotation in the
    // header changes (0 to 64).
    const made_state mla_f16(GGML_TYPE_F16,  0,  k, {});
    const made_state mla_q8 (GGML_TYPE_Q8_0, 64, k, {});
    const auto mla = state_convert(state_parse(shape, mla_f16.data), state_parse(shape, mla_q8.data), types);
    check(state_difference(mla, mla_q8.data).empty(), "without V nothing is turned");

    auto broken = f16.data;
    broken.push_back(0);
    check(throws([&] { state_parse(shape, broken); }), "more than a state is no state");
    broken.resize(broken.size() - 2);
    check(throws([&] { state_parse(shape, broken); }), "less neither");

    broken.resize(broken.size() + 9);
    state_shape hybrid = shape;
    hybrid.hybrid = true;
    check(!throws([&] { state_parse(hybrid, broken); }), "recurrent states follow the cells");
}

int main() {
    ggml_backend_load_all();

    test_hadamard();
    test_values();
    test_states();

    return report();
}

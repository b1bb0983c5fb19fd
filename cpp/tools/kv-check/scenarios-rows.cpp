// Checks of rows that no cell uses: rows that do not exist must not be written, and rows without a cell (DSV4) must be equal.

#include "resident.h"
#include "scenarios.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// check that nothing is written outside of the committed rows
// With growth in place, such a write does not crash, because the addresses are accessible. Only the kernel's count of resident
// pages reveals it.
void kv_check_pages(side & s) {
    const char * storage = getenv("LLAMA_KV_DYNAMIC_STORAGE");
    if (!s.params.device.empty() || (storage != nullptr && strcmp(storage, "copy") == 0)) {
        throw check_skipped("by copy, committed memory need not be resident");
    }
    if (resident_bytes_of_pages() < 0) {
        throw check_skipped("the resident memory is unknown on this system");
    }

    session_params sp = kv_check_base(s);
    sp.n_seqs = std::max(sp.n_seqs, 2u);

    const int64_t n_before = resident_bytes_of_pages();

    session c(s, sp, "pages");

    const auto n_taken = [&] { return (int64_t) llama_get_memory_usage(c.ctx).committed; };
    const auto n_there = [&] { return resident_bytes_of_pages() - n_before; };

    const int64_t n_other = n_taken() - n_there(); // recurrent states, and other memory of fixed size

    const auto expect = [&](const std::string & when) {
        const int64_t n_stray = n_there() - (n_taken() - n_other);
        if (s.dynamic && n_stray > 0) {
            throw check_failed(when + ", " + std::to_string(n_stray) + " resident bytes were not committed");
        }
    };

    c.generate(3); // one token at a time, so that no batch completes a row of DSV4
    expect("after the first tokens");
    c.fill(300);
    c.generate(3);
    expect("after a growth");

    const auto state = c.state_seq_get(0);
    c.rm(1, -1, -1);
    expect("after a removal");
    c.cp(0, 1);
    c.generate(2);
    expect("after a copy");
    c.clear(true);
    expect("empty");
    c.state_seq_set(1, state);
    c.generate(2);
    expect("after a restore");
}

// check rows without a cell, which belong to several positions each (DSV4)
// Each stream has as many rows as the longest stream. The additional rows of a shorter stream must be zero. Dummy writes use
// the last row of a stream. A row that was the last one before a growth must be zero, too.
void kv_check_rows(side & s) {
    if (s.arch != "deepseek4") {
        throw check_skipped("each row has a cell");
    }

    const uint32_t n_start = 512;            // rows at the start, by copy
    const uint32_t n_fill  = 4*n_start + 12; // a row belongs to four positions

    session_params sp = kv_check_base(s);
    sp.n_seqs  = std::max(sp.n_seqs, 2u);
    sp.unified = false;
    sp.n_cells = n_fill + 500;

    session c(s, sp, "rows");
    c.generate(3);
    c.fill_seq(0, n_fill); // in one batch

    const state_parts state = kv_check_state_of(s, sp, c);

    uint32_t n_blobs = 0;
    for (const auto & part : state.parts) {
        const size_t n_rows = part.n_rows/part.n_streams; // rows per stream in the state
        if (part.kind != state_part::matrix || n_rows < n_start) {
            continue;
        }
        const uint8_t * data = state.data.data() + part.data();
        const size_t    size = (part.at + part.size - part.data())/part.n_rows;
        for (uint32_t i = 0; i < part.n_streams; ++i) {
            const uint8_t * first = data + i*n_rows*size;
            s.out.blob("rows[" + std::to_string(n_blobs++) + "]", std::vector<uint8_t>(first, first + n_start*size));
        }
    }
    if (n_blobs == 0) {
        throw check_failed("the state has no such rows");
    }
}

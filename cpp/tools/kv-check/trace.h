#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

// The steps of one side, in order, in a file: the side may die during any write, and the parent reads the file
// afterwards.

enum trace_kind : uint32_t {
    TRACE_MODEL,   // label: key, text: value
    TRACE_BEGIN,   // label: name of the check
    TRACE_DECODE,  // a = return code, rows x cols floats
    TRACE_VALUE,   // a = the value
    TRACE_BLOB,    // a = number of bytes, text: a 64-bit hash for each block of trace_blob_block bytes
    TRACE_GROWTH,  // a, b = cells before and after; fewer after a shrink
    TRACE_START,   // a = cells at the start, text: kind of growth
    TRACE_KV_SIZE, // a = bytes of a KV buffer at creation
    TRACE_INJECTED, // an allocation failed on request
    TRACE_ERROR,   // text: the last logged error
    TRACE_NOTE,    // text: a log line of the dynamic cache
    TRACE_SKIP,    // text: why the check does not apply
    TRACE_FAIL,    // text: why the check could not continue
    TRACE_LOST,    // the side was ended from outside (a timeout, no memory, a full disk), which proves nothing about the model
    TRACE_MEASURE, // label: name, text: the measured value, which is not compared
    // a = 1: from here on the static side also runs code of this series, so its failures are not upstream's; 0:
    // upstream's only
    TRACE_OURS,
    TRACE_END,     // the check was completed, after a microseconds
};

constexpr size_t trace_blob_block = 4096;

struct trace_record {
    trace_kind  kind = TRACE_END;
    std::string label;
    std::string text;
    int64_t     a    = 0;
    int64_t     b    = 0;
    uint32_t    rows = 0;
    uint32_t    cols = 0;
    int64_t     data = 0; // offset of the floats in the file
};

// create an empty temporary file without a name; nullptr on failure
FILE * trace_open_temp();

// return a name for a temporary file of this process
std::string trace_temp_path(const std::string & what);

class trace_writer {
  public:
    // nullptr: record nothing
    explicit trace_writer(FILE * file) : file(file) {}

    void model (const std::string & key, const std::string & val);
    void begin (const std::string & check);
    void decode(const std::string & label, int32_t rc, uint32_t rows, uint32_t cols, const std::vector<float> & data);
    void value (const std::string & label, int64_t val);
    void blob  (const std::string & label, const std::vector<uint8_t> & data);
    void measure(const std::string & label, double val);
    void event (trace_kind kind, const std::string & text = "", int64_t a = 0, int64_t b = 0);

  private:
    void write(const trace_record & rec, const float * data);

    FILE * file;
};

struct trace_check {
    std::string name;
    std::vector<trace_record> steps; // decode, value and blob: the compared steps
    std::vector<std::pair<int64_t, int64_t>> growths;
    std::vector<std::pair<std::string, double>> measured;
    std::string skip;
    std::string fail;
    std::string last_error;
    int64_t time_us = 0;
    bool    ended   = false;
    bool    lost    = false;
    bool    ours    = false;
};

// all results of one side
struct trace {
    std::vector<std::pair<std::string, std::string>> model;
    std::vector<trace_check> checks;
    std::vector<std::string> notes;
    std::set<std::string> storages; // kinds of growth
    std::string load_error;
    int64_t cells_start  = 0;
    int64_t kv_bytes     = 0; // of the first context
    int64_t n_injected   = 0; // injected failures of allocations

    FILE * file = nullptr;

    const trace_check * find(const std::string & name) const;
          trace_check * find(const std::string & name);
    std::string model_val(const std::string & key) const;

    bool read_floats(const trace_record & rec, std::vector<float> & res) const;
};

// read from the start; a record that the writer's death truncated is skipped, and the next writer overwrites it
trace trace_read(FILE * file);

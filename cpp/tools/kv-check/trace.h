#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

// What one side did, in order, in a file: the side writes it and may die at any moment, the parent reads it afterwards.

enum trace_kind : uint32_t {
    TRACE_MODEL,   // label: key, text: value
    TRACE_BEGIN,   // label: name of the check
    TRACE_DECODE,  // a = return code, rows x cols floats
    TRACE_VALUE,   // a = the value
    TRACE_BLOB,    // a = number of bytes, text: a 64-bit hash for each block of trace_blob_block bytes
    TRACE_GROWTH,  // a, b = cells before and after, fewer where memory was given back
    TRACE_START,   // a = cells at the start, text: how the cache grows
    TRACE_KV_SIZE, // a = bytes of a KV buffer at creation
    TRACE_INJECTED, // an allocation was made to fail
    TRACE_ERROR,   // text: the last error that was logged
    TRACE_NOTE,    // text: a log line of the dynamic cache
    TRACE_SKIP,    // text: why the check does not apply
    TRACE_FAIL,    // text: why the check could not go on
    TRACE_LOST,    // the side was ended from outside (a timeout, no memory, a full disk): it says nothing about the model
    TRACE_MEASURE, // label: of what, text: what was measured, which is not compared
    TRACE_OURS,    // a = 1: from here on the static side runs code of this series as well, a failure there is no longer upstream's; 0: again it is
    TRACE_END,     // the check came to its end, after a microseconds
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

// a temporary file without a name, empty; nullptr if none can be made
FILE * trace_open_temp();

// a name for a temporary file of this process
std::string trace_temp_path(const std::string & what);

class trace_writer {
  public:
    // nullptr: nowhere
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
    std::vector<trace_record> steps; // decode, value and blob: what is compared
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

// all that one side left behind
struct trace {
    std::vector<std::pair<std::string, std::string>> model;
    std::vector<trace_check> checks;
    std::vector<std::string> notes;
    std::set<std::string> storages; // how the caches grow
    std::string load_error;
    int64_t cells_start  = 0;
    int64_t kv_bytes     = 0; // of the first context
    int64_t n_injected   = 0; // allocations that were made to fail

    FILE * file = nullptr;

    const trace_check * find(const std::string & name) const;
          trace_check * find(const std::string & name);
    std::string model_val(const std::string & key) const;

    bool read_floats(const trace_record & rec, std::vector<float> & res) const;
};

// reads from the start; a record that was cut off by the writer's death is left out, and the next writer goes over it
trace trace_read(FILE * file);

#pragma once

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <utility>
#include <vector>

// The trace of a run with the static or with the dynamic cache: a file with one record per step, in order
// The process that writes it may die at any time. The parent process reads the file after that.

enum trace_kind : uint32_t {
    TRACE_MODEL,   // label: key, text: value
    TRACE_BEGIN,   // label: name of the check
    TRACE_DECODE,  // a = return code of llama_decode(), and rows x cols floats
    TRACE_VALUE,   // a = the value
    TRACE_BLOB,    // a = number of bytes, text: a 64-bit hash of each block of trace_blob_block bytes
    TRACE_GROWTH,  // a, b = cells before and after. fewer cells after a shrink
    TRACE_START,   // a = cells at the start, text: kind of growth
    TRACE_KV_SIZE, // a = bytes of a KV buffer at creation
    TRACE_INJECTED, // an allocation failed on request
    TRACE_ERROR,   // text: the last logged error
    TRACE_NOTE,    // text: a log line of the dynamic cache
    TRACE_SKIP,    // text: reason why the check does not apply
    TRACE_FAIL,    // text: reason why the check could not continue
    TRACE_LOST,    // the process was ended from outside (timeout, no memory, full disk), which shows nothing about the model
    TRACE_MEASURE, // label: name, text: measured value, which is not compared
    // a = 1: from here on, a failure of the static run is a failure of the patches. The reason is that the static run also
    // executes code of the patches, for example a change of types
    // a = 0: a failure of the static run is a failure of upstream
    TRACE_OURS,
    TRACE_END,     // the check was completed. a = its duration in microseconds
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

// create an empty temporary file without a name. The result is nullptr on failure
FILE * trace_open_temp();

// return a name for a temporary file of this process
std::string trace_temp_path(const std::string & what);

class trace_writer {
  public:
    // file: nullptr means: record nothing
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
    std::vector<trace_record> steps; // steps that are compared: decode, value and blob
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

// all results of the run with the static or with the dynamic cache
struct trace {
    std::vector<std::pair<std::string, std::string>> model;
    std::vector<trace_check> checks;
    std::vector<std::string> notes;
    std::set<std::string> storages; // kinds of growth
    std::string load_error;
    int64_t cells_start  = 0;
    int64_t kv_bytes     = 0; // bytes of the KV cache of the first context
    int64_t n_injected   = 0; // number of allocations that failed on request

    FILE * file = nullptr;

    const trace_check * find(const std::string & name) const;
          trace_check * find(const std::string & name);
    std::string model_val(const std::string & key) const;

    bool read_floats(const trace_record & rec, std::vector<float> & res) const;
};

// read a trace from its start. If the process that wrote the trace died within a record, ignore this record. The next process
// overwrites the record
trace trace_read(FILE * file);

#include "trace.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#ifdef _WIN32
#include <process.h>
#define getpid _getpid
#else
#include <unistd.h>
#endif

#ifdef _WIN32
#define trace_fseek _fseeki64
#define trace_ftell _ftelli64
#else
#define trace_fseek fseeko
#define trace_ftell ftello
#endif

std::string trace_temp_path(const std::string & what) {
    static int n = 0;
    const auto dir = std::filesystem::temp_directory_path();
    return (dir / ("kv-check-" + std::to_string(getpid()) + "-" + std::to_string(n++) + "." + what)).string();
}

FILE * trace_open_temp() {
#ifdef _WIN32
    return tmpfile();
#else
    std::string path = (std::filesystem::temp_directory_path() / "kv-check-XXXXXX").string();
    const int fd = mkstemp(&path[0]);
    if (fd < 0) {
        return nullptr;
    }
    unlink(path.c_str());
    return fdopen(fd, "w+b");
#endif
}

// the part of a record that has a fixed size. The label, the text and the floats follow
struct trace_header {
    uint32_t kind;
    uint32_t n_label;
    uint32_t n_text;
    uint32_t rows;
    uint32_t cols;
    uint32_t unused;
    int64_t  a;
    int64_t  b;
};

void trace_writer::write(const trace_record & rec, const float * data) {
    if (file == nullptr) {
        return;
    }
    const trace_header head = {
        rec.kind, (uint32_t) rec.label.size(), (uint32_t) rec.text.size(), rec.rows, rec.cols, 0, rec.a, rec.b,
    };
    const size_t n_data = (size_t) rec.rows * rec.cols;
    bool ok = fwrite(&head, sizeof(head), 1, file) == 1;
    ok = ok && fwrite(rec.label.data(), 1, rec.label.size(), file) == rec.label.size();
    ok = ok && fwrite(rec.text.data(),  1, rec.text.size(),  file) == rec.text.size();
    ok = ok && (n_data == 0 || data == nullptr || fwrite(data, sizeof(float), n_data, file) == n_data);
    ok = fflush(file) == 0 && ok; // finished steps must be in the file even if the next call kills this process
    if (!ok) {
        fprintf(stderr, "kv-check: cannot write the trace: is the temporary directory full? (TMPDIR names another)\n");
        abort();
    }
}

void trace_writer::model(const std::string & key, const std::string & val) {
    trace_record rec;
    rec.kind  = TRACE_MODEL;
    rec.label = key;
    rec.text  = val;
    write(rec, nullptr);
}

void trace_writer::begin(const std::string & check) {
    trace_record rec;
    rec.kind  = TRACE_BEGIN;
    rec.label = check;
    write(rec, nullptr);
}

void trace_writer::decode(const std::string & label, int32_t rc, uint32_t rows, uint32_t cols, const std::vector<float> & data) {
    trace_record rec;
    rec.kind  = TRACE_DECODE;
    rec.label = label;
    rec.a     = rc;
    rec.rows  = rows;
    rec.cols  = cols;
    write(rec, data.data());
}

void trace_writer::value(const std::string & label, int64_t val) {
    trace_record rec;
    rec.kind  = TRACE_VALUE;
    rec.label = label;
    rec.a     = val;
    write(rec, nullptr);
}

void trace_writer::measure(const std::string & label, double val) {
    trace_record rec;
    rec.kind  = TRACE_MEASURE;
    rec.label = label;
    char text[64];
    snprintf(text, sizeof(text), "%.9g", val); // std::to_string() would print a divergence of 1e-9 as 0
    rec.text = text;
    write(rec, nullptr);
}

// return the FNV-1a hash over 8 bytes at a time, which is fast enough for states of several GiB
static uint64_t hash_block(const uint8_t * data, size_t size) {
    uint64_t res = 0xcbf29ce484222325ull;
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, data + i, 8);
        res = (res ^ word) * 0x100000001b3ull;
        res ^= res >> 29;
    }
    for (; i < size; ++i) {
        res = (res ^ data[i]) * 0x100000001b3ull;
    }
    return res;
}

void trace_writer::blob(const std::string & label, const std::vector<uint8_t> & data) {
    trace_record rec;
    rec.kind  = TRACE_BLOB;
    rec.label = label;
    rec.a     = (int64_t) data.size();
    for (size_t i = 0; i < data.size(); i += trace_blob_block) {
        const uint64_t h = hash_block(data.data() + i, data.size() - i < trace_blob_block ? data.size() - i : trace_blob_block);
        rec.text.append((const char *) &h, sizeof(h));
    }
    write(rec, nullptr);
}

void trace_writer::event(trace_kind kind, const std::string & text, int64_t a, int64_t b) {
    trace_record rec;
    rec.kind = kind;
    rec.text = text;
    rec.a    = a;
    rec.b    = b;
    write(rec, nullptr);
}

const trace_check * trace::find(const std::string & name) const {
    for (const auto & check : checks) {
        if (check.name == name) {
            return &check;
        }
    }
    return nullptr;
}

trace_check * trace::find(const std::string & name) {
    return const_cast<trace_check *>(static_cast<const trace *>(this)->find(name));
}

std::string trace::model_val(const std::string & key) const {
    for (const auto & kv : model) {
        if (kv.first == key) {
            return kv.second;
        }
    }
    return "";
}

bool trace::read_floats(const trace_record & rec, std::vector<float> & res) const {
    res.resize((size_t) rec.rows * rec.cols);
    if (res.empty()) {
        return true;
    }
    return trace_fseek(file, rec.data, SEEK_SET) == 0 && fread(res.data(), sizeof(float), res.size(), file) == res.size();
}

// add one record to its check
static void trace_add(trace & res, const trace_record & rec) {
    trace_check * cur = res.checks.empty() ? nullptr : &res.checks.back();
    switch (rec.kind) {
        case TRACE_MODEL:
            if (res.model_val(rec.label).empty()) {
                res.model.emplace_back(rec.label, rec.text);
            }
            break;
        case TRACE_BEGIN:
            res.checks.emplace_back();
            res.checks.back().name = rec.label;
            break;
        case TRACE_DECODE:
        case TRACE_VALUE:
        case TRACE_BLOB:
            if (cur) { cur->steps.push_back(rec); }
            break;
        case TRACE_GROWTH:  if (cur) { cur->growths.emplace_back(rec.a, rec.b); } break;
        case TRACE_START:
            if (res.cells_start == 0) { res.cells_start = rec.a; }
            res.storages.insert(rec.text);
            break;
        case TRACE_INJECTED: res.n_injected++; break;
        case TRACE_KV_SIZE: if (res.checks.size() <= 1) { res.kv_bytes += rec.a; } break;
        case TRACE_ERROR:   if (cur) { cur->last_error = rec.text; } else if (res.load_error.empty()) { res.load_error = rec.text; } break;
        case TRACE_NOTE:    res.notes.push_back(rec.text); break;
        case TRACE_SKIP:    if (cur) { cur->skip = rec.text; } break;
        case TRACE_FAIL:    if (cur) { cur->fail = rec.text; } else { res.load_error = rec.text; } break;
        case TRACE_LOST:    if (cur) { cur->lost = true; } break;
        case TRACE_MEASURE: if (cur) { cur->measured.emplace_back(rec.label, strtod(rec.text.c_str(), nullptr)); } break;
        case TRACE_OURS:    if (cur) { cur->ours = rec.a != 0; } break;
        case TRACE_END:     if (cur) { cur->ended = true; cur->time_us = rec.a; } break;
    }
}

trace trace_read(FILE * file) {
    trace res;
    res.file = file;

    trace_fseek(file, 0, SEEK_END);
    const int64_t size = trace_ftell(file);

    int64_t pos = 0;
    trace_header head;
    while (trace_fseek(file, pos, SEEK_SET) == 0 && fread(&head, sizeof(head), 1, file) == 1) {
        trace_record rec;
        rec.kind = (trace_kind) head.kind;
        rec.a    = head.a;
        rec.b    = head.b;
        rec.rows = head.rows;
        rec.cols = head.cols;
        rec.data = pos + (int64_t) sizeof(head) + head.n_label + head.n_text;

        const int64_t end = rec.data + (int64_t) head.rows*head.cols*(int64_t) sizeof(float);
        if (end > size) {
            break;
        }
        rec.label.resize(head.n_label);
        rec.text .resize(head.n_text);
        if (head.n_label > 0 && fread(&rec.label[0], 1, head.n_label, file) != head.n_label) {
            break;
        }
        if (head.n_text > 0 && fread(&rec.text[0], 1, head.n_text, file) != head.n_text) {
            break;
        }
        trace_add(res, rec);
        pos = end;
    }

    // the next writer appends after the last complete record
    trace_fseek(file, pos, SEEK_SET);

    return res;
}

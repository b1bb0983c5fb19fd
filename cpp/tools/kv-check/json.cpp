#include "json.h"

#include <cmath>
#include <cstdio>

// return true if a valid UTF-8 character begins at text[i]. n is set to its number of bytes
static bool utf8_at(const std::string & text, size_t i, size_t & n) {
    const unsigned char c = (unsigned char) text[i];
    n = c < 0x80 ? 1 : (c >= 0xc2 && c < 0xe0) ? 2 : (c >= 0xe0 && c < 0xf0) ? 3 : (c >= 0xf0 && c < 0xf5) ? 4 : 0;
    if (n == 0 || i + n > text.size()) {
        return false;
    }
    for (size_t k = 1; k < n; ++k) {
        if (((unsigned char) text[i + k] & 0xc0) != 0x80) {
            return false;
        }
    }
    return true;
}

static std::string quote(const std::string & text) {
    std::string res = "\"";
    for (size_t i = 0; i < text.size();) {
        const unsigned char c = (unsigned char) text[i];
        size_t n = 0;
        if (c == '"' || c == '\\') {
            res += '\\';
            res += (char) c;
            i += 1;
        } else if (c < 0x20) {
            char buf[8];
            snprintf(buf, sizeof(buf), "\\u%04x", c);
            res += buf;
            i += 1;
        } else if (utf8_at(text, i, n)) {
            res.append(text, i, n);
            i += n;
        } else {
            res += "\\ufffd"; // a path or a log line may contain any bytes
            i += 1;
        }
    }
    return res + "\"";
}

void json_line::name(const char * key) {
    if (!first) {
        out += ", ";
    }
    first = false;
    if (key != nullptr) {
        out += quote(key) + ": ";
    }
}

json_line & json_line::begin_object(const char * key) { name(key); out += "{"; first = true;  return *this; }
json_line & json_line::end_object()                   {            out += "}"; first = false; return *this; }
json_line & json_line::begin_array (const char * key) { name(key); out += "["; first = true;  return *this; }
json_line & json_line::end_array()                    {            out += "]"; first = false; return *this; }

json_line & json_line::str (const char * key, const std::string & val) { name(key); out += quote(val);           return *this; }
json_line & json_line::num (const char * key, int64_t val)             { name(key); out += std::to_string(val);  return *this; }
json_line & json_line::flag(const char * key, bool val)                { name(key); out += val ? "true" : "false"; return *this; }
json_line & json_line::null(const char * key)                          { name(key); out += "null";               return *this; }

json_line & json_line::real(const char * key, double val) {
    name(key);
    if (!std::isfinite(val)) {
        out += std::isnan(val) ? "\"nan\"" : val > 0 ? "\"inf\"" : "\"-inf\""; // JSON cannot represent these numbers
        return *this;
    }
    char buf[64];
    snprintf(buf, sizeof(buf), "%.9g", val);
    out += buf;
    return *this;
}

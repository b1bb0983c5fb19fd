#pragma once

#include <cstdint>
#include <string>

// writes one line of JSON, member by member. The caller ensures the order and the nesting
class json_line {
  public:
    json_line & begin_object(const char * key = nullptr);
    json_line & end_object();
    json_line & begin_array(const char * key = nullptr);
    json_line & end_array();

    json_line & str (const char * key, const std::string & val);
    json_line & num (const char * key, int64_t val);
    json_line & real(const char * key, double val);
    json_line & flag(const char * key, bool val);
    json_line & null(const char * key);

    const std::string & text() const { return out; }

  private:
    void name(const char * key);

    std::string out;
    bool first = true;
};

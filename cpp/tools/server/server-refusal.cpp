#include "server-refusal.h"

#include <memory>

server_refusal::server_refusal(error_type type, const std::string & message, int retry_after_s)
    : std::runtime_error(message), type(type), retry_after_s(retry_after_s) {}

server_http_res_ptr server_refusal::to_res() const {
    const json error = format_error_response(what(), type);

    auto res = std::make_unique<server_http_res>();

    res->status = json_value(error, "code", 500);
    res->data   = safe_json_to_str({{ "error", error }});
    if (retry_after_s > 0) {
        res->headers["Retry-After"] = std::to_string(retry_after_s);
    }

    return res;
}

#pragma once

// An error of a request with a status of its own, thrown by whoever finds it. ex_wrapper() answers with it.

#include "server-common.h"
#include "server-http.h"

#include <memory>
#include <stdexcept>
#include <string>

struct server_refusal : std::runtime_error {
    error_type type;
    int        retry_after_s; // the same request may succeed then, 0: not by waiting

    server_refusal(error_type type, const std::string & message, int retry_after_s = 0)
        : std::runtime_error(message), type(type), retry_after_s(retry_after_s) {}

    server_http_res_ptr to_res() const {
        const json error = format_error_response(what(), type);

        auto res = std::make_unique<server_http_res>();

        res->status = json_value(error, "code", 500);
        res->data   = safe_json_to_str({{ "error", error }});
        if (retry_after_s > 0) {
            res->headers["Retry-After"] = std::to_string(retry_after_s);
        }

        return res;
    }
};

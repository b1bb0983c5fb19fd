#pragma once

#include "server-common.h"
#include "server-http.h"

#include <stdexcept>
#include <string>

// an error of a request that has its own HTTP status. ex_wrapper() converts it to a response
struct server_refusal : std::runtime_error {
    error_type type;
    int        retry_after_s; // seconds after which the same request may succeed. 0 means: waiting does not help

    server_refusal(error_type type, const std::string & message, int retry_after_s = 0);

    // return the response, with a Retry-After header if waiting helps
    server_http_res_ptr to_res() const;
};

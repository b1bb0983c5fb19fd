#pragma once

#include "server-slot.h"
#include "server-task.h"

#include <cstdint>
#include <functional>
#include <string>

// Sends errors and final responses to clients. The members of server_parts call this class instead of the server context, whose
// type they do not know. The server context passes the functions that send.
class server_replies {
public:
    using send_error_t = std::function<void(int id_task, const std::string & error, error_type type, int32_t n_prompt_tokens, int32_t n_ctx)>;
    using send_final_t = std::function<void(int id_slot)>;

    server_replies(send_error_t send_error, send_final_t send_final);

    void error(const server_slot_view & slot, const std::string & message, error_type type) const;
    void error(const server_task & task, const std::string & message, error_type type) const;

    // send the text that was generated until now as the final response, because there are no cells for the next token
    void truncated(server_slot_view & slot) const;

private:
    send_error_t send_error;
    send_final_t send_final;
};

#include "server-replies.h"

#include <utility>

server_replies::server_replies(send_error_t send_error, send_final_t send_final)
    : send_error(std::move(send_error)), send_final(std::move(send_final)) {}

void server_replies::error(const server_slot_view & slot, const std::string & message, error_type type) const {
    send_error(slot.task->id, message, type, slot.task->n_tokens(), slot.n_ctx);
}

void server_replies::error(const server_task & task, const std::string & message, error_type type) const {
    send_error(task.id, message, type, 0, 0);
}

void server_replies::truncated(server_slot_view & slot) const {
    slot.truncated      = true;
    slot.stop           = STOP_TYPE_LIMIT;
    slot.has_next_token = false;

    slot.print_timings();
    send_final(slot.id);
}

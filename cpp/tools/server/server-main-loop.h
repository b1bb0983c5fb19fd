#pragma once

// A function that the main loop runs between two batches, for an HTTP thread that waits for what it returns or throws.
//
// It may run after that thread has gone, as its client has: it must not refer to anything of it.

#include "server-queue.h"
#include "server-task.h"

#include <exception>
#include <functional>
#include <memory>
#include <utility>

struct server_task_result_call : server_task_result {
    json               data;
    std::exception_ptr error;

    json to_json() override {
        if (error) {
            std::rethrow_exception(error);
        }
        return data;
    }
};

// main loop
inline server_task_result_ptr server_main_loop_run(const server_task & task) {
    auto res = std::make_unique<server_task_result_call>();

    res->id = task.id;
    try {
        res->data = task.call();
    } catch (...) {
        res->error = std::current_exception();
    }

    return res;
}

// HTTP thread. returns null if should_stop() is true before there is a result
inline json server_main_loop_call(
        server_queue & queue_tasks, server_response & queue_results, const std::function<bool()> & should_stop, std::function<json()> call) {
    server_response_reader rd(queue_tasks, queue_results, /* polling_interval_seconds */ 1);

    server_task task(SERVER_TASK_TYPE_CALL);
    task.id   = rd.get_new_id();
    task.call = std::move(call);
    rd.post_task(std::move(task), true);

    const auto result = rd.next(should_stop);

    return result ? result->to_json() : json(nullptr);
}

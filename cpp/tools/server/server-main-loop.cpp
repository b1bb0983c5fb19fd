#include "server-main-loop.h"

#include <exception>
#include <memory>
#include <utility>

namespace {

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

}

json server_main_loop_call(
        server_queue & queue_tasks, server_response & queue_results, const std::function<bool()> & should_stop, std::function<json()> call) {
    server_response_reader rd(queue_tasks, queue_results, /* polling_interval_seconds */ 1);

    server_task task(SERVER_TASK_TYPE_CALL);
    task.id   = rd.get_new_id();
    task.call = std::move(call);
    rd.post_task(std::move(task), true);

    const auto result = rd.next(should_stop);

    return result ? result->to_json() : json(nullptr);
}

server_task_result_ptr server_main_loop_run(const server_task & task) {
    auto res = std::make_unique<server_task_result_call>();

    res->id = task.id;
    try {
        res->data = task.call();
    } catch (...) {
        res->error = std::current_exception();
    }

    return res;
}

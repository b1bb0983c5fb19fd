#pragma once

#include "server-queue.h"
#include "server-task.h"

#include <functional>

// Run a function on the server's main loop, between two batches, and return its result to an HTTP thread.
//
// The function may run after the HTTP thread has ended because its client disconnected. So the function must not refer to
// data of the HTTP thread.

// post the function and wait for its result. rethrow its exception
// return null if should_stop() becomes true before there is a result
// call on an HTTP thread
json server_main_loop_call(
        server_queue & queue_tasks, server_response & queue_results, const std::function<bool()> & should_stop, std::function<json()> call);

// run the function of a SERVER_TASK_TYPE_CALL task. the result holds the function's return value or its exception
// call on the main loop
server_task_result_ptr server_main_loop_run(const server_task & task);

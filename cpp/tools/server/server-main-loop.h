#pragma once

#include "server-queue.h"
#include "server-task.h"

#include <functional>

// Functions that run code on the server's main loop, between two batches, and return its result to an HTTP thread.
//
// If a client disconnects, its HTTP thread ends, and the code may run after that. So the code must not refer to data of the HTTP
// thread.

// run `call` on the main loop, wait for its result and return it. An exception of `call` is thrown again here
// The result is null if should_stop() becomes true before there is a result.
// Call this on an HTTP thread.
json server_main_loop_call(
        server_queue & queue_tasks, server_response & queue_results, const std::function<bool()> & should_stop, std::function<json()> call);

// run the function of a task of type SERVER_TASK_TYPE_CALL. The result contains the return value or the exception of the function
// Call this on the main loop.
server_task_result_ptr server_main_loop_run(const server_task & task);

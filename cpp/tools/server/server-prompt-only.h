#pragma once

// Requests with n_predict 0: compute the prompt into the cache, and generate no token

#include "server-task.h"

#include <memory>

// return the first event of a stream, which clients of some formats wait for. Upstream sends it only with the first token
// The result is null if the format of the task has no such event.
inline std::unique_ptr<server_task_result_cmpl_partial> server_stream_start(const server_task & task, int32_t n_prompt_cached) {
    const auto & params = task.params;

    const bool has_start = params.res_type == TASK_RESPONSE_TYPE_OAI_CHAT ||
                           params.res_type == TASK_RESPONSE_TYPE_OAI_RESP ||
                           params.res_type == TASK_RESPONSE_TYPE_ANTHROPIC;
    if (!params.stream || !has_start) {
        return nullptr;
    }

    auto res = std::make_unique<server_task_result_cmpl_partial>();

    res->id                    = task.id;
    res->index                 = task.index;
    res->n_decoded             = 1; // marks the first event
    res->n_prompt_tokens       = task.n_tokens();
    res->n_prompt_tokens_cache = n_prompt_cached;
    res->res_type              = params.res_type;
    res->oaicompat_model       = params.oaicompat_model;
    res->oaicompat_cmpl_id     = params.oaicompat_cmpl_id;

    return res;
}

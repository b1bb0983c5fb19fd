#pragma once

// Log lines that kv-check and kvtool parse: kvtool/contract.py has the same lines, and tests/unit/test_contract.py compares them.
// They are formats for printf() and scanf()

#define LLAMA_KV_LOG_START_BEGIN  "dynamic KV cache: start = "
#define LLAMA_KV_LOG_RESIZE_BEGIN "resizing KV cache from "

#define LLAMA_KV_LOG_START  LLAMA_KV_LOG_START_BEGIN  "%u cells"
#define LLAMA_KV_LOG_RESIZE LLAMA_KV_LOG_RESIZE_BEGIN "%u to %u cells"

#pragma once

// Log lines that kv-check and kvtool parse. They are formats for printf() and scanf()
//
// kvtool/contract.py contains the same lines, and tests/unit/test_contract.py compares them.

#define LLAMA_KV_LOG_START_BEGIN  "dynamic KV cache: start = "
#define LLAMA_KV_LOG_RESIZE_BEGIN "resizing KV cache from "

#define LLAMA_KV_LOG_START  LLAMA_KV_LOG_START_BEGIN  "%u cells"
#define LLAMA_KV_LOG_RESIZE LLAMA_KV_LOG_RESIZE_BEGIN "%u to %u cells"

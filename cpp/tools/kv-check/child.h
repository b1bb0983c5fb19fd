#pragma once

#include "args.h"
#include "trace.h"

#include <string>
#include <vector>

// run the checks with the static or with the dynamic cache in child processes, and return the results
// If a child dies, its current check ends, and a new process runs the remaining checks. On Windows, all checks run in this
// process, and a crash ends it.
trace run_side(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks);

// return the model parameters for the device that the command line names. throws std::runtime_error if it does not exist
// devices: is filled, and must outlive the result
llama_model_params child_model_params(const kv_check_params & params, std::vector<ggml_backend_dev_t> & devices);

// read the weights instead of mapping the file. The option has different names in different versions of upstream
void child_set_no_mmap(llama_model_params & mparams);

// load the backends, and add the RPC servers and fake devices of the command line
void child_load_backends(const kv_check_params & params);

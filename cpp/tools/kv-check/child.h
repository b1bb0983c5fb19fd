#pragma once

#include "args.h"
#include "trace.h"

#include <string>
#include <vector>

// Run the checks of one side in child processes. If a child dies, its check ends, and a new process runs the rest. On
// Windows everything runs in this process, which a crash ends.
trace run_side(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks);

// return the model parameters for the named device; throws std::runtime_error if it is missing. devices must outlive
// the parameters
llama_model_params child_model_params(const kv_check_params & params, std::vector<ggml_backend_dev_t> & devices);

// read the weights instead of mapping the file, with this upstream's name of the option
void child_set_no_mmap(llama_model_params & mparams);

// load the backends, and add the RPC servers and fake devices of the command line
void child_load_backends(const kv_check_params & params);

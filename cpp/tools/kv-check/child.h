#pragma once

#include "args.h"
#include "trace.h"

#include <string>
#include <vector>

// Runs the checks of one side, each in a process that may die: a death ends that check, the rest goes on in a new process.
// On Windows everything runs in this process and a death is the end of it.
trace run_side(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks);

// the model parameters for the device that the command line names; throws std::runtime_error if there is none
// devices must outlive the parameters
llama_model_params child_model_params(const kv_check_params & params, std::vector<ggml_backend_dev_t> & devices);

// read the weights instead of mapping the file, under the name that this upstream has for it
void child_set_no_mmap(llama_model_params & mparams);

// loads the backends, and adds the RPC servers and the fake devices that the command line names
void child_load_backends(const kv_check_params & params);

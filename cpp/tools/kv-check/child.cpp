#include "child.h"

#include "../../src/llama-kv-log.h"
#include "scenarios.h"
#include "session.h"

#include "ggml-backend.h"

// Only a tree with the layer `device` (a group of patches in series.toml) has the fake device. CMake defines this macro. With
// __has_include() instead, ccache would reuse the object of a tree without the header in a tree that has it.
#ifdef KV_CHECK_FAKE_DEVICE
#    include "fake-device.h"
#else
static void fake_device_add(size_t, size_t, bool) {
    throw std::runtime_error("--fake-device: this build has no such device, it is of the layer \"device\"");
}
#endif

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

#ifndef _WIN32
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

//
// child process
//

struct log_state {
    const kv_check_params * params = nullptr;
    trace_writer *          out    = nullptr;
    side *                  s      = nullptr;

    std::string line; // the current line, because a line may arrive in pieces
    ggml_log_level level = GGML_LOG_LEVEL_INFO;
};

static log_state g_log;

static std::string trimmed(const std::string & text) {
    const char * space = " \t\r\n";
    const size_t a = text.find_first_not_of(space);
    return a == std::string::npos ? "" : text.substr(a, text.find_last_not_of(space) - a + 1);
}

static void log_line(ggml_log_level level, const std::string & line) {
    unsigned a = 0;
    unsigned b = 0;
    if (const char * str = strstr(line.c_str(), LLAMA_KV_LOG_RESIZE_BEGIN)) {
        if (sscanf(str, LLAMA_KV_LOG_RESIZE, &a, &b) == 2) {
            g_log.out->event(TRACE_GROWTH, "", a, b);
        }
    } else if (const char * str = strstr(line.c_str(), LLAMA_KV_LOG_START_BEGIN)) {
        if (sscanf(str, LLAMA_KV_LOG_START, &a) == 1) {
            const auto at = line.find("grows ");
            g_log.out->event(TRACE_START, at == std::string::npos ? "" : trimmed(line.substr(at + strlen("grows "))), a);
        }
    } else if (line.find("dynamic KV cache") != std::string::npos || line.find("kv_dynamic") != std::string::npos) {
        if (g_log.s == nullptr || g_log.s->first_context) {
            g_log.out->event(TRACE_NOTE, line);
        }
    }
    if (line.find("LLAMA_KV_DYNAMIC_FAIL") != std::string::npos) {
        g_log.out->event(TRACE_INJECTED);
    }
    if (level == GGML_LOG_LEVEL_ERROR) {
        g_log.out->event(TRACE_ERROR, line);
        if (g_log.s != nullptr) {
            g_log.s->last_error = line;
        }
    }
}

static void log_callback(ggml_log_level level, const char * text, void *) {
    if (g_log.params->verbose) {
        fputs(text, stderr);
    }
    if (level != GGML_LOG_LEVEL_CONT) {
        g_log.level = level;
    }
    for (const char * c = text; *c != '\0'; ++c) {
        if (*c != '\n') {
            g_log.line += *c;
        } else {
            log_line(g_log.level, trimmed(g_log.line));
            g_log.line.clear();
        }
    }
}

// record the text of a failed GGML_ASSERT
static void abort_callback(const char * text) {
    g_log.out->event(TRACE_FAIL, trimmed(text));
    fputs(text, stderr);
    fputc('\n', stderr);
}

void child_load_backends(const kv_check_params & params) {
    ggml_backend_load_all();
    for (const auto & fake : params.fake_devices) {
        fake_device_add((size_t) fake.n_mib << 20, (size_t) fake.page_kib << 10, fake.is_f16);
    }
    if (params.rpc.empty()) {
        return;
    }

    ggml_backend_reg_t rpc_reg = ggml_backend_reg_by_name("RPC");
    if (rpc_reg == nullptr) {
        throw std::runtime_error("--rpc: this build has no RPC backend (configure with -DGGML_RPC=ON)");
    }
    typedef ggml_backend_reg_t (*add_server_t)(const char * endpoint);
    const auto add_server = (add_server_t) ggml_backend_reg_get_proc_address(rpc_reg, "ggml_backend_rpc_add_server");
    if (add_server == nullptr) {
        throw std::runtime_error("--rpc: the RPC backend has no ggml_backend_rpc_add_server");
    }
    size_t pos = 0;
    while (pos < params.rpc.size()) {
        size_t end = params.rpc.find(',', pos);
        if (end == std::string::npos) {
            end = params.rpc.size();
        }
        const std::string server = params.rpc.substr(pos, end - pos);
        ggml_backend_reg_t reg = add_server(server.c_str());
        if (reg == nullptr) {
            throw std::runtime_error("--rpc: no RPC server answers at " + server);
        }
        ggml_backend_register(reg);
        pos = end + 1;
    }
}

void child_set_no_mmap(llama_model_params & mparams) {
    mparams.load_mode = LLAMA_LOAD_MODE_NONE;
}

llama_model_params child_model_params(const kv_check_params & params, std::vector<ggml_backend_dev_t> & devices) {
    llama_model_params res = llama_model_default_params();
    devices.clear();
    std::stringstream wanted(params.device);
    for (std::string name; std::getline(wanted, name, ',');) {
        ggml_backend_dev_t dev = ggml_backend_dev_by_name(name.c_str());
        if (dev == nullptr) {
            std::string names;
            for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
                names += std::string(i > 0 ? ", " : "") + ggml_backend_dev_name(ggml_backend_dev_get(i));
            }
            throw std::runtime_error("there is no device '" + name + "', only: " + names);
        }
        devices.push_back(dev);
    }
    devices.push_back(nullptr);
    res.devices      = devices.data();
    if (params.train) {
        child_set_no_mmap(res);
    }
    res.load_mtp = params.mtp;
    res.n_gpu_layers = params.device.empty() ? 0 : params.n_gpu_layers >= 0 ? params.n_gpu_layers : 999;
    return res;
}

// return the override of one value of the model's metadata, as --override names it
static std::vector<llama_model_kv_override> child_overrides(const kv_check_params & params) {
    std::vector<llama_model_kv_override> res(2);
    res[0].tag     = LLAMA_KV_OVERRIDE_TYPE_INT;
    res[0].val_i64 = params.override_val;
    snprintf(res[0].key, sizeof(res[0].key), "%s", params.override_key.c_str());
    return res;
}

// return the tokens of a text file
static std::vector<llama_token> child_tokens(const llama_model * model, const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file.good() && text.empty()) {
        throw std::runtime_error("the text cannot be read: " + path);
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        throw std::runtime_error("--text: the model has no tokenizer");
    }
    std::vector<llama_token> res(text.size() + 8);
    const int32_t n = llama_tokenize(vocab, text.data(), (int32_t) text.size(), res.data(), (int32_t) res.size(), true, false);
    if (n <= 0) {
        throw std::runtime_error("--text: the model reads no token in " + path);
    }
    res.resize(n);
    return res;
}

static void describe_model(trace_writer & out, side & s) {
    const llama_model * model = s.model;
    char buf[128];
    if (llama_model_meta_val_str(model, "general.architecture", buf, sizeof(buf)) >= 0) {
        s.arch = buf;
        out.model("arch", s.arch);
    }
    s.n_vocab      = (uint32_t) llama_vocab_n_tokens(llama_model_get_vocab(model));
    s.n_embd_out   = (uint32_t) llama_model_n_embd_out(model);
    s.is_recurrent = llama_model_is_recurrent(model);
    s.is_hybrid    = llama_model_is_hybrid(model);
    out.model("n_vocab",      std::to_string(s.n_vocab));
    out.model("n_ctx_train",  std::to_string(llama_model_n_ctx_train(model)));
    out.model("n_swa",        std::to_string(llama_model_n_swa(model)));
    out.model("is_recurrent", s.is_recurrent ? "1" : "0");
    out.model("is_hybrid",    s.is_hybrid    ? "1" : "0");
}

static void run_check(side & s, const std::string & name) {
    const kv_check_scenario * def = kv_check_find_scenario(name);
    s.last_error.clear();
    s.out.begin(name);
    const int64_t t_start = ggml_time_us();
    try {
        def->run(s);
        s.out.event(TRACE_END, "", ggml_time_us() - t_start);
    } catch (const check_skipped & err) {
        s.out.event(TRACE_SKIP, err.what());
        s.out.event(TRACE_END, "", ggml_time_us() - t_start);
    } catch (const check_failed & err) {
        s.out.event(TRACE_FAIL, err.what());
    } catch (const std::exception & err) {
        s.out.event(TRACE_FAIL, std::string("an exception left the library: ") + err.what());
    }
}

static void run_checks(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks, FILE * file) {
    trace_writer out(file);

    if (!params.storage.empty()) {
#ifdef _WIN32
        _putenv_s("LLAMA_KV_DYNAMIC_STORAGE", params.storage.c_str());
#else
        setenv("LLAMA_KV_DYNAMIC_STORAGE", params.storage.c_str(), 1);
#endif
    }

    g_log.params = &params;
    g_log.out    = &out;
    g_log.s      = nullptr;
    llama_log_set(log_callback, nullptr);
    ggml_set_abort_callback(abort_callback);

    llama_model * model = nullptr;
    llama_model * draft = nullptr;
    try {
        child_load_backends(params);
        std::vector<ggml_backend_dev_t> devices;
        const auto overrides = child_overrides(params);
        llama_model_params mparams = child_model_params(params, devices);
        if (!params.override_key.empty()) {
            mparams.kv_overrides = overrides.data();
        }
        model = llama_model_load_from_file(params.model.c_str(), mparams);
        if (model != nullptr && !params.draft.empty()) {
            draft = llama_model_load_from_file(params.draft.c_str(), child_model_params(params, devices));
            if (draft == nullptr) {
                throw std::runtime_error("the draft model cannot be loaded: " + params.draft);
            }
        }
    } catch (const std::exception & err) {
        out.event(TRACE_FAIL, err.what());
        return;
    }
    if (model == nullptr) {
        out.model("load", "failed");
        return;
    }

    side s(params, model, out, dynamic);
    s.draft = draft;
    g_log.s = &s;
    describe_model(out, s);
    if (!params.text.empty()) {
        try {
            s.text = child_tokens(model, params.text);
        } catch (const std::exception & err) {
            out.event(TRACE_FAIL, err.what());
            return;
        }
    }
    if (s.n_vocab == 0) {
        out.event(TRACE_FAIL, "the model has no vocabulary, not even its size");
    } else {
        for (const auto & name : checks) {
            run_check(s, name);
        }
    }

    g_log.s = nullptr;
    llama_model_free(draft);
    llama_model_free(model);
    llama_backend_free();
}

//
// parent process
//

#ifndef _WIN32

static bool is_sanitizer_line(const std::string & line) {
    return line.find("ERROR: AddressSanitizer") != std::string::npos || line.find("ERROR: LeakSanitizer") != std::string::npos ||
        line.find("WARNING: ThreadSanitizer") != std::string::npos || line.find("SUMMARY: ") == 0 ||
        line.find("runtime error: ") != std::string::npos;
}

struct child_stderr {
    std::string telling;   // the line that explains best why the child ended
    std::string sanitizer; // each line of a sanitizer once, joined by " | "
};

static child_stderr read_stderr(FILE * file, bool verbose) {
    rewind(file);
    child_stderr res;
    std::string last;
    std::string all;
    char buf[4096];
    while (fgets(buf, sizeof(buf), file) != nullptr) {
        all += buf;
        const std::string line = trimmed(buf);
        if (line.empty()) {
            continue;
        }
        last = line;
        if (is_sanitizer_line(line) && res.sanitizer.find(line) == std::string::npos) {
            res.sanitizer += (res.sanitizer.empty() ? "" : " | ") + line;
        }
        if (res.telling.empty() && line.find("GGML_ASSERT") != std::string::npos) {
            res.telling = line;
        }
    }
    if (res.telling.empty()) {
        res.telling = last;
    }
    if (!res.sanitizer.empty()) {
        res.telling = res.sanitizer;
    }
    if (verbose || !res.sanitizer.empty()) {
        fputs(all.c_str(), stderr);
    }
    return res;
}

// wait for the child, and kill it at the deadline. return "" if it ended normally, otherwise the reason
static std::string wait_for(pid_t pid, std::chrono::steady_clock::time_point deadline) {
    int status = 0;
    int delay_us = 200;
    while (true) {
        const pid_t res = waitpid(pid, &status, WNOHANG);
        if (res == pid) {
            break;
        }
        if (res < 0 && errno != EINTR) {
            return "lost the process that ran it";
        }
        if (std::chrono::steady_clock::now() > deadline) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return "timeout";
        }
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        delay_us = delay_us < 5000 ? delay_us*2 : 5000;
    }
    if (WIFSIGNALED(status)) {
        const int sig = WTERMSIG(status);
        const char * name =
            sig == SIGABRT ? "SIGABRT" : sig == SIGSEGV ? "SIGSEGV" : sig == SIGBUS ? "SIGBUS" :
            sig == SIGFPE  ? "SIGFPE"  : sig == SIGILL  ? "SIGILL"  : sig == SIGKILL ? "SIGKILL" : nullptr;
        return name != nullptr ? name : "signal " + std::to_string(sig);
    }
    const int rc = WEXITSTATUS(status);
    return rc == 0 ? "" : "exit code " + std::to_string(rc);
}

static std::string run_child(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks, FILE * file,
                             std::chrono::steady_clock::time_point deadline) {
    FILE * err = trace_open_temp();
    if (err == nullptr) {
        return "no temporary file can be made";
    }

    fflush(nullptr); // otherwise, the child would write the buffered output again
    const pid_t pid = fork();
    if (pid < 0) {
        fclose(err);
        return std::string("fork: ") + strerror(errno);
    }
    if (pid == 0) {
        dup2(fileno(err), STDERR_FILENO);
        dup2(fileno(err), STDOUT_FILENO);
        setenv("GGML_NO_BACKTRACE", "1", 0); // a backtrace would start a debugger, which needs seconds
        run_checks(params, dynamic, checks, file);
        exit(0); // not _exit(), because sanitizers print their report at exit
    }

    std::string how = wait_for(pid, deadline);
    const child_stderr said = read_stderr(err, params.verbose);
    fclose(err);
    if (!said.sanitizer.empty()) {
        how = "sanitizer"; // check this for any exit code, because undefined behaviour alone does not end a process
    }
    return how.empty() ? "" : said.telling.empty() ? how : how + ": " + said.telling;
}

// return true if the child ended for a reason outside of the model and the library, such as a timeout
static bool is_lost(const std::string & death) {
    for (const char * how : { "timeout", "SIGKILL", "lost the process", "no temporary file", "fork: " }) {
        if (death.find(how) == 0) {
            return true;
        }
    }
    return death.find("cannot write the trace") != std::string::npos;
}

trace run_side(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(params.timeout_s);

    FILE * file = trace_open_temp();
    if (file == nullptr) {
        throw std::runtime_error("no temporary file can be made (TMPDIR names the directory)");
    }

    std::vector<std::string> todo = checks;
    while (true) {
        const std::string death = run_child(params, dynamic, todo, file, deadline);

        trace res = trace_read(file);
        const trace_check * cur = res.checks.empty() ? nullptr : &res.checks.back();
        if (death.empty()) {
            return res;
        }
        if (cur == nullptr) { // the child ended while it loaded the model
            res.load_error = death;
            return res;
        }

        trace_writer out(file);
        if (cur->ended) { // all checks are complete. the child ended in its cleanup, or with a sanitizer's report at exit
            out.begin("exit");
            out.event(TRACE_FAIL, death);
            return trace_read(file);
        }
        out.event(TRACE_FAIL, cur->fail.empty() ? death : cur->fail + " (" + death.substr(0, death.find(':')) + ")");
        if (is_lost(death)) {
            out.event(TRACE_LOST);
        }
        if (std::chrono::steady_clock::now() > deadline) {
            return trace_read(file);
        }

        // continue with the check after the one in which the child ended
        while (!todo.empty()) {
            const bool found = todo.front() == cur->name;
            todo.erase(todo.begin());
            if (found) {
                break;
            }
        }
        if (todo.empty()) {
            return trace_read(file);
        }
    }
}

#else

trace run_side(const kv_check_params & params, bool dynamic, const std::vector<std::string> & checks) {
    FILE * file = trace_open_temp();
    if (file == nullptr) {
        throw std::runtime_error("no temporary file can be made");
    }
    run_checks(params, dynamic, checks, file);
    return trace_read(file);
}

#endif

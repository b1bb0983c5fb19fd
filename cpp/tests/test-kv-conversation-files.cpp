// Tests of the files of conversations: a file is read exactly as it was written or not at all, whatever happens to the files and
// to the process that writes them

#include "../tools/server/server-conversation-files.h"

#include "test-kv.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#ifndef _WIN32
#    include <csignal>
#    include <fcntl.h>
#    include <sys/resource.h>
#    include <sys/stat.h>
#    include <sys/wait.h>
#    include <unistd.h>
#endif

namespace fs = std::filesystem;

using data = std::vector<uint8_t>;

static int n_warnings = 0;

static void warn(const std::string &) {
    n_warnings++;
}

// a temporary directory, which the destructor removes
struct directory {
    fs::path path;

    explicit directory(const std::string & name) : path(fs::temp_directory_path() / ("test-kv-conversation-files-" + name)) {
        fs::remove_all(path);
    }
    ~directory() {
        std::error_code ec;
        fs::remove_all(path, ec);
    }
};

static data noise(size_t n, uint32_t seed) {
    std::mt19937 rng(seed);

    data res(n);
    for (auto & cur : res) {
        cur = rng();
    }
    return res;
}

static server_conversation_files::bytes bytes_of(const data & cur) {
    return { cur.data(), cur.size() };
}

// return two parts whose content depends on the head
static std::vector<data> parts_of(const data & head) {
    return { noise(40000 + head[0]*16, head[0]), noise(head[0] % 3 == 0 ? 0 : 1000, head[0] + 1) };
}

static std::string write(server_conversation_files & files, const data & head) {
    const auto parts = parts_of(head);

    return files.write(bytes_of(head), { bytes_of(parts[0]), bytes_of(parts[1]) });
}

// check that each file is read as it was written, or not at all. return the number of files that were read
static int n_read(server_conversation_files & files) {
    int res = 0;

    const auto found = files.list(); // a copy, because read() changes the list

    for (const auto & [id, file] : found) {
        const auto & head = file.head;
        const auto parts = files.read(id);
        if (!parts.empty()) {
            check(parts == parts_of(head), "the parts are those of the head");
            res++;
        }
    }

    return res;
}

static data content(const fs::path & path) {
    std::ifstream in(path, std::ios::binary);

    return { std::istreambuf_iterator<char>(in), {} };
}

static void set_content(const fs::path & path, const data & cur) {
    std::ofstream(path, std::ios::binary | std::ios::trunc).write((const char *) cur.data(), cur.size());
}

static void test_round_trip() {
    const directory dir("round-trip");

    std::string id;
    {
        server_conversation_files files((dir.path / "new").string(), 1, 0, warn);
        id = write(files, { 7, 8, 9 });
        check(!id.empty(), "a file is written into a new directory");
        check_eq("files of the writer", 1, n_read(files));
    }
    server_conversation_files again((dir.path / "new").string(), 1, 0, warn);
    check(again.list().count(id) == 1 && again.list().at(id).head == data({ 7, 8, 9 }), "the head is read after a restart");
    check_eq("files after a restart", 1, n_read(again));
    check_eq("number of files", 1, again.n_files());
    check_eq("number of bytes", fs::file_size(dir.path / "new" / id), again.n_bytes());

    server_conversation_files other((dir.path / "new").string(), 2, 0, warn);
    check_eq("files of another key", 0, other.list().size());
    check_eq("number of files of all keys", 1, other.n_files());

    again.remove(id);
    check_eq("files after a removal", 0, again.list().size());

#ifndef _WIN32
    const auto secret = write(again, { 3 });
    struct stat st;
    check(stat((dir.path / "new" / secret).string().c_str(), &st) == 0 && (st.st_mode & 0777) == 0600, "only the owner reads the file");
#endif
}

static void test_limit() {
    const directory dir("limit");

    server_conversation_files files(dir.path.string(), 1, 200000, warn);

    std::vector<std::string> ids;
    for (uint8_t i = 1; i <= 4; ++i) {
        ids.push_back(write(files, { i }));
        fs::last_write_time(dir.path / ids.back(), fs::file_time_type::clock::now() - std::chrono::minutes(10 - i));
    }
    check_eq("files below the limit", 4, files.list().size());

    check(!files.read(ids[0]).empty(), "the oldest file is read");
    write(files, { 5 });

    check_eq("files at the limit", 4, files.list().size());
    check(files.list().count(ids[0]) == 1, "a file that was read is not the oldest any more");
    check(files.list().count(ids[1]) == 0, "the oldest file is removed");
    check(files.n_bytes() <= 200000, "the limit is kept");

    const data large(300000, 1);
    check(files.write(bytes_of({ 6 }), { bytes_of(large) }).empty(), "a file beyond the limit is not written");
    check_eq("files after that", 4, files.list().size());

    const int64_t age_us = 3600ll*1000*1000;
    const data    other(100000, 1);

    check(files.write(bytes_of({ 7 }), { bytes_of(other) }, age_us).empty(), "a conversation that was used before all others is not written");
    check_eq("files after that", 4, files.list().size());

    const auto t_used = fs::last_write_time(dir.path / ids[3]);
    files.touch(ids[3], age_us);
    check(fs::last_write_time(dir.path / ids[3]) == t_used, "a file does not become older");
}

static void test_damage() {
    const directory dir("damage");
    const directory spare("spare");

    std::mt19937 rng(1);

    std::string id;
    {
        server_conversation_files files(dir.path.string(), 1, 0, warn);
        id = write(files, { 2, 4 });
    }
    const data whole = content(dir.path / id);

    for (int i = 0; i < 500; ++i) {
        data cur = whole;
        if (i % 3 == 0) {
            cur.resize(rng() % cur.size());
        } else if (i % 3 == 1) {
            cur[rng() % cur.size()] ^= 1 << rng() % 8;
        } else {
            const size_t n = rng() % 64; // a byte of the numbers or of the head
            cur[n] ^= 1 << rng() % 8;
        }
        set_content(dir.path / id, cur);

        n_warnings = 0;
        server_conversation_files files(dir.path.string(), 1, 0, warn);
        check_eq("files that can be read", 0, n_read(files));
        check_eq("files that can be read, asked again", 0, n_read(files));
        check_eq("warnings", 1, n_warnings);
        check_eq("number of files", 1, files.n_files());
        if (i == 100) {
            check(write(files, { 2, 4 }) == id && n_read(files) == 1, "the same conversation replaces a damaged file");
        }
    }

    // damage a file after its head was read
    set_content(dir.path / id, whole);
    server_conversation_files files(dir.path.string(), 1, 0, warn);
    check_eq("files", 1, files.list().size());
    set_content(dir.path / id, data(whole.begin(), whole.end() - 100));
    check_eq("files that can be read", 0, n_read(files));
    fs::remove(dir.path / id);
    check(files.read(id).empty() && files.list().empty(), "a file that is gone is not found");

    // files that are not conversations must stay
    set_content(dir.path / "letter.txt", whole);
    fs::create_directory(dir.path / ("0000000000000001-0000000000000001.conversation"));
    check_eq("files", 0, files.list().size());
    server_conversation_files small(dir.path.string(), 1, 50000, warn);
    write(small, { 1 });
    check(fs::exists(dir.path / "letter.txt"), "the limit removes no other files");
}

#ifndef _WIN32

static void test_no_room() {
    const directory dir("no-room");

    if (fork() == 0) {
        n_failed = 0;
        server_conversation_files files(dir.path.string(), 1, 0, warn);
        check(!write(files, { 1 }).empty(), "a file is written");

        // imitate a full disk: no file can have more than 30000 bytes
        signal(SIGXFSZ, SIG_IGN);
        const rlimit limit = { 30000, 30000 };
        setrlimit(RLIMIT_FSIZE, &limit);
        n_warnings = 0;
        for (uint8_t i = 2; i < 10; ++i) {
            check(write(files, { i }).empty(), "no file is written to a full disk");
        }
        check_eq("warnings", 1, n_warnings);
        check_eq("files after that", 1, n_read(files));
        check_eq("entries of the directory", 1, std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()));
        _exit(n_failed > 0);
    }
    int status = 0;
    wait(&status);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a full disk");

    n_warnings = 0;
    set_content(dir.path / "plain", { 1 });
    // use a plain file as the directory, because even the super-user cannot create files in it
    server_conversation_files files((dir.path / "plain").string(), 1, 0, warn);
    check(write(files, { 1 }).empty() && files.list().empty(), "no file is written without a directory");
    check_eq("warnings", 1, n_warnings);
}

static void test_kill() {
    const directory dir("kill");

    std::mt19937 rng(1);

    for (int i = 0; i < 200; ++i) {
        const pid_t pid = fork();
        if (pid == 0) {
            server_conversation_files files(dir.path.string(), 1, 500000, warn);
            for (uint8_t k = i; ; ++k) {
                write(files, { k });
            }
        }
        usleep(500 + rng() % 20000);
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
    }

    n_warnings = 0;
    server_conversation_files files(dir.path.string(), 1, 500000, warn);
    check(n_read(files) > 0, "files are left");
    check_eq("damaged files", 0, n_warnings);

    check_eq("entries of the directory", files.list().size(), std::distance(fs::directory_iterator(dir.path), fs::directory_iterator()));
}

static void test_two_processes() {
    const directory dir("two");

    std::vector<pid_t> pids;
    for (int p = 0; p < 3; ++p) {
        pids.push_back(fork());
        if (pids.back() == 0) {
            n_failed = 0;
            // each two processes use the same key
            server_conversation_files files(dir.path.string(), 1 + p/2, 300000, warn);
            std::mt19937 rng(p);
            int n = 0;
            for (int i = 0; i < 150; ++i) {
                write(files, { (uint8_t) (rng() % 20) });
                n += n_read(files);
            }
            check_eq("warnings", 0, n_warnings);
            check(n > 150, "files are found");
            _exit(n_failed > 0);
        }
    }
    for (const pid_t pid : pids) {
        int status = 0;
        waitpid(pid, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process beside others");
    }
}

#endif

int main() {
    test_round_trip();
    test_limit();
    test_damage();
#ifndef _WIN32
    test_no_room();
    test_kill();
    test_two_processes();
#endif

    return report();
}

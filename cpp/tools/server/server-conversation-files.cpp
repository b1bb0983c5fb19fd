#include "server-conversation-files.h"

#include "hash/xxhash/xxhash.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>

#ifdef _WIN32
#    include <io.h>
#    include <process.h>
#else
#    include <sys/file.h>
#    include <unistd.h>
#endif

namespace fs = std::filesystem;

static constexpr const char * SUFFIX           = ".conversation";
static constexpr const char * SUFFIX_TEMPORARY = ".conversation-tmp";

static constexpr char MAGIC[8] = { 'K', 'V', 'C', 'H', 'A', 'T', '\r', '\n' };

static constexpr uint32_t N_PARTS_MAX = 1 << 16;

// the first bytes of a file. After them follow: the sizes of the parts (8 bytes each), the head, and the parts
struct file_start {
    char     magic[8];
    uint32_t version;
    uint32_t n_parts;
    uint64_t key;
    uint64_t n_head;
    uint64_t hash_parts;
    uint64_t hash_head; // hash of this struct (with 0 in this field), of the sizes of the parts, and of the head
};

static_assert(sizeof(file_start) == 48, "no padding");

uint64_t server_conversation_hash(const void * data, size_t size, uint64_t seed) {
    return XXH3_64bits_withSeed(data, size, seed);
}

// computes one hash of several pieces of memory
class hasher {
public:
    hasher() : state(XXH3_createState(), XXH3_freeState) {
        if (!state) {
            throw std::bad_alloc();
        }
        XXH3_64bits_reset(state.get());
    }

    void add(const void * data, size_t size) {
        if (size > 0) {
            XXH3_64bits_update(state.get(), data, size);
        }
    }

    uint64_t result() const { return XXH3_64bits_digest(state.get()); }

private:
    std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state;
};

// an open file, closed by the destructor
class open_file {
public:
    static open_file for_reading(const std::string & path) {
#ifdef _WIN32
        return open_file(_open(path.c_str(), _O_RDONLY | _O_BINARY | _O_NOINHERIT));
#else
        return open_file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
#endif
    }

    // create a file that only its owner can read and write, and lock it
    // The lock shows remove_unfinished() of other processes that the file is still being written.
    static open_file create(const std::string & path) {
#ifdef _WIN32
        return open_file(_open(path.c_str(), _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE));
#else
        for (int i = 0; i < 10; ++i) {
            open_file res(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
            if (!res) {
                return res;
            }
            flock(res.fd, LOCK_EX);

            // Between open() and flock(), another process can remove the file with remove_unfinished(). Then create a new file.
            struct stat st;
            if (fstat(res.fd, &st) == 0 && st.st_nlink > 0) {
                return res;
            }
        }
        return open_file(-1);
#endif
    }

    explicit open_file(int fd) : fd(fd) {}
    open_file(open_file && other) noexcept : fd(std::exchange(other.fd, -1)) {}
    ~open_file() { close(); }

    explicit operator bool() const { return fd >= 0; }

    // return the size in bytes, or -1 if the path does not name a regular file
    int64_t size() const {
#ifdef _WIN32
        struct _stat64 st;
        return _fstat64(fd, &st) == 0 && (st.st_mode & _S_IFREG) ? (int64_t) st.st_size : -1;
#else
        struct stat st;
        return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? (int64_t) st.st_size : -1;
#endif
    }

    bool read(void * data, size_t size) const {
        return transfer(size, [&](size_t pos, size_t n) { return ::read(fd, (char *) data + pos, n); });
    }

    bool write(const void * data, size_t size) const {
        return transfer(size, [&](size_t pos, size_t n) { return ::write(fd, (const char *) data + pos, n); });
    }

    bool seek(uint64_t pos) const {
#ifdef _WIN32
        return _lseeki64(fd, pos, SEEK_SET) >= 0;
#else
        return lseek(fd, pos, SEEK_SET) >= 0;
#endif
    }

    // lock the file. return false if another process holds the lock
    // Windows needs no lock, because a file that a process has open cannot be removed there.
    bool lock() const {
#ifdef _WIN32
        return true;
#else
        return flock(fd, LOCK_EX | LOCK_NB) == 0;
#endif
    }

    bool close() {
        return fd < 0 || ::close(std::exchange(fd, -1)) == 0;
    }

private:
    // call op(pos, n) until all bytes are transferred, because one call of read() or write() may transfer only a part of them
    template <typename T>
    static bool transfer(size_t size, const T & op) {
        for (size_t pos = 0; pos < size; ) {
            const auto res = op(pos, std::min<size_t>(size - pos, 1 << 30));
            if (res < 0 && errno == EINTR) {
                continue;
            }
            if (res <= 0) {
                return false;
            }
            pos += res;
        }
        return true;
    }

    int fd;
};

static bool has_suffix(const std::string & name, const char * suffix) {
    const size_t n = strlen(suffix);
    return name.size() > n && name.compare(name.size() - n, n, suffix) == 0;
}

static uint64_t hash_of_head(file_start start, const std::vector<uint64_t> & sizes, const void * head) {
    start.hash_head = 0;

    hasher res;
    res.add(&start, sizeof(start));
    res.add(sizes.data(), sizes.size()*sizeof(uint64_t));
    res.add(head, start.n_head);

    return res.result();
}

server_conversation_files::server_conversation_files(
        std::string dir_new, uint64_t key, uint64_t limit, std::function<void(const std::string &)> warn)
    : dir(std::move(dir_new)), key(key), limit(limit), warn(std::move(warn)) {
    std::error_code ec;
    if (!fs::is_directory(dir, ec) && fs::create_directories(dir, ec)) {
        fs::permissions(dir, fs::perms::owner_all, ec);
    }
    if (!fs::is_directory(dir, ec)) {
        this->warn("conversations cannot be saved in " + dir + ": not a directory");
        has_failed = true;
    }

    remove_unfinished();
    list();
}

std::string server_conversation_files::path(const std::string & name) const {
    return (fs::path(dir) / name).string();
}

std::vector<server_conversation_files::found> server_conversation_files::scan() {
    std::vector<found> res;

    std::error_code ec;
    for (fs::directory_iterator it(dir, ec), end; !ec && it != end; it.increment(ec)) {
        const std::string name = it->path().filename().string();

        const bool is_temporary = has_suffix(name, SUFFIX_TEMPORARY);
        if (!is_temporary && !has_suffix(name, SUFFIX)) {
            continue;
        }

        std::error_code ec_file; // another server can remove the file at any time
        const auto n_bytes = it->file_size(ec_file);
        if (ec_file) {
            continue;
        }
        const auto t_used = it->last_write_time(ec_file);
        if (ec_file) {
            continue;
        }
        res.push_back({ name, n_bytes, (int64_t) t_used.time_since_epoch().count(), is_temporary });
    }

    std::sort(res.begin(), res.end(), [](const found & a, const found & b) { return a.t_used < b.t_used; });

    n_files_all = 0;
    n_bytes_all = 0;
    for (const auto & cur : res) {
        n_files_all += !cur.is_temporary;
        n_bytes_all += cur.n_bytes;
    }

    return res;
}

void server_conversation_files::remove_unfinished() {
    for (const auto & cur : scan()) {
        if (cur.is_temporary) {
            const auto file = open_file::for_reading(path(cur.name));
            if (file && file.lock()) {
                std::error_code ec;
                fs::remove(path(cur.name), ec);
            }
        }
    }
}

bool server_conversation_files::make_room(uint64_t n_bytes, int64_t t_keep) {
    const auto found = scan();

    const auto fits = [&]() { return limit == 0 || n_bytes_all + n_bytes <= limit; };

    for (const auto & cur : found) {
        if (fits() || cur.t_used >= t_keep) {
            break;
        }
        if (!cur.is_temporary) {
            remove(cur.name);
        }
    }

    return fits();
}

void server_conversation_files::remove(const std::string & id) {
    std::error_code ec;
    const auto n_bytes = fs::file_size(path(id), ec);

    if (!ec && fs::remove(path(id), ec)) {
        n_files_all -= std::min<size_t>(n_files_all, 1);
        n_bytes_all -= std::min<uint64_t>(n_bytes_all, n_bytes);
    }
    files.erase(id);
}

static fs::file_time_type time_of_age(int64_t age_us) {
    return fs::file_time_type::clock::now() -
        std::chrono::duration_cast<fs::file_time_type::duration>(std::chrono::microseconds(age_us));
}

void server_conversation_files::touch(const std::string & id, int64_t age_us) {
    const auto t_used = time_of_age(age_us);

    std::error_code ec;
    if (age_us == 0 || (fs::last_write_time(path(id), ec) < t_used && !ec)) {
        fs::last_write_time(path(id), t_used, ec);
    }
}

std::string server_conversation_files::write(bytes head, const std::vector<bytes> & parts, int64_t age_us) {
    file_start start = {};
    memcpy(start.magic, MAGIC, sizeof(MAGIC));
    start.version = VERSION;
    start.n_parts = parts.size();
    start.key     = key;
    start.n_head  = head.size;

    file res;
    res.head.assign((const uint8_t *) head.data, (const uint8_t *) head.data + head.size);
    res.offset  = sizeof(start) + parts.size()*sizeof(uint64_t) + head.size;
    res.n_bytes = res.offset;

    hasher hash;
    for (const auto & part : parts) {
        res.sizes.push_back(part.size);
        res.n_bytes += part.size;
        hash.add(part.data, part.size);
    }
    res.hash = hash.result();

    start.hash_parts = res.hash;
    start.hash_head  = hash_of_head(start, res.sizes, head.data);

    if (parts.size() > N_PARTS_MAX || (limit > 0 && res.n_bytes > limit)) {
        return "";
    }

    remove_unfinished();

    // With age_us = 0, all files may be removed, whatever their time is. Their times are not compared with the current time,
    // because a file from a machine whose clock is ahead would then never be removed.
    const int64_t t_keep = age_us > 0 ? (int64_t) time_of_age(age_us).time_since_epoch().count() : INT64_MAX;
    if (!make_room(res.n_bytes, t_keep)) {
        return "";
    }

    char id[64];
    snprintf(id, sizeof(id), "%016" PRIx64 "-%016" PRIx64 "%s", key, start.hash_head, SUFFIX);

    char temporary[96];
#ifdef _WIN32
    const int pid = _getpid();
#else
    const int pid = getpid();
#endif
    const uint64_t t_now = fs::file_time_type::clock::now().time_since_epoch().count();
    snprintf(temporary, sizeof(temporary), "%d-%" PRIx64 "-%" PRIu64 "%s", pid, t_now, n_written++, SUFFIX_TEMPORARY);

    auto out = open_file::create(path(temporary));

    bool ok = out && out.write(&start, sizeof(start)) && out.write(res.sizes.data(), res.sizes.size()*sizeof(uint64_t)) &&
        out.write(head.data, head.size);
    for (const auto & part : parts) {
        ok = ok && out.write(part.data, part.size);
    }

#ifdef _WIN32
    ok = out.close() && ok; // an open file cannot be renamed
#endif

    std::error_code ec;
    int err = errno;
    if (ok) {
        fs::rename(path(temporary), path(id), ec);
        ok  = !ec;
        err = ec.value();
    }
    if (!ok) {
        if (!std::exchange(has_failed, true)) {
            warn("conversations cannot be saved in " + dir + ": " + std::generic_category().message(err));
        }
        out.close();
        fs::remove(path(temporary), ec);
        return "";
    }

    has_failed = false;
    ignored.erase(id);
    files[id] = std::move(res);
    if (age_us > 0) {
        fs::last_write_time(path(id), time_of_age(age_us), ec);
    }
    scan();

    return id;
}

void server_conversation_files::ignore(const std::string & name, const char * why) {
    files.erase(name);
    if (ignored.insert(name).second) {
        warn("ignoring the conversation " + path(name) + ": " + why);
    }
}

bool server_conversation_files::read_head(const std::string & name, uint64_t n_bytes, file & res) const {
    const auto in = open_file::for_reading(path(name));

    file_start start;
    if (!in || in.size() != (int64_t) n_bytes || !in.read(&start, sizeof(start)) || memcmp(start.magic, MAGIC, sizeof(MAGIC)) != 0 ||
            start.version != VERSION || start.key != key || start.n_parts > N_PARTS_MAX) {
        return false;
    }

    // check the sizes before memory is allocated for them, because a damaged file can contain any number
    uint64_t n_left = n_bytes - sizeof(start);
    if (start.n_parts*sizeof(uint64_t) > n_left || start.n_head > n_left - start.n_parts*sizeof(uint64_t)) {
        return false;
    }
    res.sizes.resize(start.n_parts);
    res.head .resize(start.n_head);
    if (!in.read(res.sizes.data(), res.sizes.size()*sizeof(uint64_t)) || !in.read(res.head.data(), res.head.size())) {
        return false;
    }
    n_left -= start.n_parts*sizeof(uint64_t) + start.n_head;
    for (const uint64_t size : res.sizes) {
        if (size > n_left) {
            return false;
        }
        n_left -= size;
    }

    res.n_bytes = n_bytes;
    res.offset  = sizeof(start) + res.sizes.size()*sizeof(uint64_t) + res.head.size();
    res.hash    = start.hash_parts;

    return n_left == 0 && hash_of_head(start, res.sizes, res.head.data()) == start.hash_head;
}

const std::map<std::string, server_conversation_files::file> & server_conversation_files::list() {
    char prefix[32];
    snprintf(prefix, sizeof(prefix), "%016" PRIx64 "-", key);

    std::set<std::string> names;
    for (const auto & cur : scan()) {
        if (cur.is_temporary || cur.name.compare(0, strlen(prefix), prefix) != 0) {
            continue;
        }
        names.insert(cur.name);

        if (files.count(cur.name) || ignored.count(cur.name)) {
            continue;
        }
        file res;
        if (read_head(cur.name, cur.n_bytes, res)) {
            files[cur.name] = std::move(res);
            continue;
        }
        std::error_code ec;
        if (fs::exists(path(cur.name), ec)) {
            ignore(cur.name, "the file is damaged, or of another version");
        }
    }

    for (auto it = files.begin(); it != files.end(); ) {
        it = names.count(it->first) ? std::next(it) : files.erase(it);
    }
    for (auto it = ignored.begin(); it != ignored.end(); ) {
        it = names.count(*it) ? std::next(it) : ignored.erase(it);
    }

    return files;
}

std::vector<std::vector<uint8_t>> server_conversation_files::read(const std::string & id) {
    const auto it = files.find(id);
    if (it == files.end()) {
        return {};
    }
    const auto & cur = it->second;

    const auto in = open_file::for_reading(path(id));
    if (!in) {
        files.erase(it); // another server has removed the file
        return {};
    }

    std::vector<std::vector<uint8_t>> res;

    hasher hash;

    bool ok = in.size() == (int64_t) cur.n_bytes && in.seek(cur.offset);
    for (size_t i = 0; ok && i < cur.sizes.size(); ++i) {
        res.emplace_back(cur.sizes[i]);
        ok = in.read(res.back().data(), res.back().size());
        hash.add(res.back().data(), res.back().size());
    }
    if (!ok || hash.result() != cur.hash) {
        ignore(id, "the file is damaged");
        return {};
    }

    touch(id);

    return res;
}

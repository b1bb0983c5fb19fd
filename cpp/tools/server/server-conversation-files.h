#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

// Files in a directory, each with the bytes of one conversation (--cache-disk).
//
// A file has a head, which is read when the file is first seen, and parts, which are read when the conversation is used. The
// class does not know what they contain. Several servers may use the directory at the same time:
//
//   - a file is written under a temporary name, and renamed. It never changes after that
//   - a file belongs to a key: files of other keys count for the limit, but are not listed
//   - the head and the parts have hashes. A file that is damaged or of another format is ignored, with one warning
//   - a file that another server removes is a file that is not found
//
// The oldest files are removed if the files exceed the limit. Reading a file makes it the newest.
//
// Rejected: one file for all conversations, or a file with an index. A server that is killed could damage what others use.
// Rejected: fsync(). All slots would wait for the disk. After a power failure, the hashes find the damaged files.
class server_conversation_files {
public:
    static constexpr uint32_t VERSION = 1; // of the format

    // a piece of memory to write
    struct bytes {
        const void * data;
        size_t       size;
    };

    struct file {
        std::vector<uint8_t> head;

        std::vector<uint64_t> sizes;       // bytes of each part
        uint64_t              n_bytes = 0; // bytes of the file
        uint64_t              offset  = 0; // of the first part
        uint64_t              hash    = 0; // of all parts
    };

    // dir: is created if it is missing
    // key: conversations of another key are not used
    // limit: bytes that the files may have, 0: no limit
    // warn: receives each warning
    server_conversation_files(std::string dir, uint64_t key, uint64_t limit, std::function<void(const std::string &)> warn);

    server_conversation_files(const server_conversation_files &) = delete;
    server_conversation_files & operator=(const server_conversation_files &) = delete;

    // write a file, after the oldest files were removed if the limit requires that
    // age_us: time since the conversation was used. Files that were used later are not removed
    // return its id, "" if it was not written: it exceeds the limit, or the disk is full
    std::string write(bytes head, const std::vector<bytes> & parts, int64_t age_us = 0);

    // read the head of each new file, and forget the files that are gone
    // return the files of the key, by id
    const std::map<std::string, file> & list();

    // read the parts of a file. return an empty list if the file is gone or damaged
    std::vector<std::vector<uint8_t>> read(const std::string & id);

    // note that the conversation of a file was used age_us ago, without reading the file
    void touch(const std::string & id, int64_t age_us = 0);

    void remove(const std::string & id);

    // number and bytes of all files in the directory, as list(), write() or remove() saw it last
    // the numbers include files of other keys
    size_t   n_files() const { return n_files_all; }
    uint64_t n_bytes() const { return n_bytes_all; }

private:
    struct found {
        std::string name;
        uint64_t    n_bytes;
        int64_t     t_used;
        bool        is_temporary;
    };

    std::string path(const std::string & name) const;

    // return the files of the directory, also the temporary ones. the oldest file is the first
    std::vector<found> scan();

    // remove the temporary files that no process is writing
    void remove_unfinished();

    // remove the oldest files until n_bytes more fit into the limit, but none that was used at t_keep or later
    // return false if they do not fit
    bool make_room(uint64_t n_bytes, int64_t t_keep);

    // read the head of a file. return false if the file is damaged, or of another format
    bool read_head(const std::string & name, uint64_t n_bytes, file & res) const;

    // warn about a file once, and ignore it from now on
    void ignore(const std::string & name, const char * why);

    const std::string dir;
    const uint64_t    key;
    const uint64_t    limit;

    const std::function<void(const std::string &)> warn;

    std::map<std::string, file> files; // of the key
    std::set<std::string>       ignored;

    bool has_failed = false; // the last write failed: there was a warning

    uint64_t n_written = 0; // for temporary names

    size_t   n_files_all = 0;
    uint64_t n_bytes_all = 0;
};

// return a hash of some bytes, continued from `seed`
uint64_t server_conversation_hash(const void * data, size_t size, uint64_t seed = 0);

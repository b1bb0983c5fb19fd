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

// A directory of files, each with the bytes of one conversation (--cache-disk).
//
// A file has a head and several parts. The head is read when the file is first seen.
// The parts are read when the conversation is used. The class does not know the meaning of the bytes.
// Several servers may use the directory at the same time, because of these rules:
//
//   - a server writes a file under a temporary name and then renames it. The file never changes after that
//   - a file belongs to a key. Files of other keys count for the limit, but list() does not return them
//   - the head and the parts have hashes. A file that is damaged, or has another format, is ignored after one warning
//   - if another server has removed a file, this server treats the file as not found
//
// If the files exceed the limit, the oldest files are removed. Reading a file makes it the newest file.
//
// Rejected: one file for all conversations, or a file with an index. A server that is killed while it writes could damage the
// file for all servers.
// Rejected: fsync(). All slots would wait for the disk. After a power failure, the hashes find the damaged files.
class server_conversation_files {
public:
    static constexpr uint32_t VERSION = 1; // version of the file format

    // a piece of memory to write
    struct bytes {
        const void * data;
        size_t       size;
    };

    struct file {
        std::vector<uint8_t> head;

        std::vector<uint64_t> sizes;       // bytes of each part
        uint64_t              n_bytes = 0; // bytes of the whole file
        uint64_t              offset  = 0; // offset of the first part in the file, in bytes
        uint64_t              hash    = 0; // hash of all parts
    };

    // open the directory
    // dir:   the directory. It is created if it does not exist
    // key:   the key of the files that this object writes and lists
    // limit: maximum of the sum of all file sizes, in bytes. 0 means: no limit
    // warn:  is called with the text of each warning
    server_conversation_files(std::string dir, uint64_t key, uint64_t limit, std::function<void(const std::string &)> warn);

    server_conversation_files(const server_conversation_files &) = delete;
    server_conversation_files & operator=(const server_conversation_files &) = delete;

    // write a file. If the limit requires it, first remove the oldest files
    // age_us: time since the conversation was last used, in microseconds. If it is larger than 0, files that were used later
    // than this conversation are not removed
    // return the id of the file. The id is "" if no file was written, because of the limit or a full disk
    std::string write(bytes head, const std::vector<bytes> & parts, int64_t age_us = 0);

    // read the head of each new file, and forget the files that are gone
    // return the files of the key of this object, by id
    const std::map<std::string, file> & list();

    // read the parts of a file
    // return an empty list if the file is gone or damaged
    std::vector<std::vector<uint8_t>> read(const std::string & id);

    // set the time of the last use of a file to age_us microseconds ago, unless the file was used later
    // The file is not read.
    void touch(const std::string & id, int64_t age_us = 0);

    void remove(const std::string & id);

    // number and total bytes of all files in the directory, including the files of other keys
    // list(), write() and remove() update the numbers.
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

    // return all files of the directory, including the temporary ones. The first file is the oldest
    std::vector<found> scan();

    // remove temporary files whose writer has ended. A process holds a lock on a file while it writes the file
    void remove_unfinished();

    // remove the oldest files until n_bytes more bytes fit into the limit
    // t_keep: files that were last used at this time or later are not removed
    // return false if the bytes do not fit
    bool make_room(uint64_t n_bytes, int64_t t_keep);

    // read the head of a file
    // return false if the file is damaged or has another format
    bool read_head(const std::string & name, uint64_t n_bytes, file & res) const;

    // print a warning about a file, unless one was printed before, and ignore the file from now on
    void ignore(const std::string & name, const char * why);

    const std::string dir;
    const uint64_t    key;
    const uint64_t    limit;

    const std::function<void(const std::string &)> warn;

    std::map<std::string, file> files; // files of the key of this object, by id
    std::set<std::string>       ignored;

    bool has_failed = false; // the last write failed, and a warning was printed

    uint64_t n_written = 0; // number of writes, which makes the temporary names unique

    size_t   n_files_all = 0;
    uint64_t n_bytes_all = 0;
};

// return a hash of `size` bytes. To hash several pieces of memory, pass the hash of the earlier pieces as `seed`
uint64_t server_conversation_hash(const void * data, size_t size, uint64_t seed = 0);

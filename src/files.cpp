#include "src/files.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "src/error.h"

namespace jetlag {

namespace fs = std::filesystem;

// 0, or the errno of what failed.
static int write_all(int fd, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
        // Linux writes at most 2 GiB at once.
        const ssize_t written = write(fd, bytes.data(), std::min(bytes.size(), size_t{1} << 30));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        bytes = bytes.subspan(static_cast<size_t>(written));
    }
    return 0;
}

// 0, or the errno of what failed. Folders on some file systems cannot be synchronised, and need not be there.
static int sync_folder(const fs::path& folder) {
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno;
    const int fault = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    return fault;
}

static int write_new_file(const fs::path& path, std::span<const std::byte> bytes) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return errno;
    int fault = write_all(fd, bytes);
    if (fault == 0 && fsync(fd) != 0) fault = errno;
    if (close(fd) != 0 && fault == 0) fault = errno;
    return fault;
}

static int write_device(const fs::path& path, std::span<const std::byte> bytes) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) return errno;
    int fault = write_all(fd, bytes);
    if (close(fd) != 0 && fault == 0) fault = errno;
    return fault;
}

void write_file_atomically(const fs::path& path, std::span<const std::byte> bytes) {
    const auto check = [&](int fault) {
        if (fault != 0) fail("cannot write {}: {}", path.string(), std::strerror(fault));
    };
    if (!path.has_filename()) fail("cannot write {}: it names no file", path.empty() ? "\"\"" : path.string());

    struct stat status;
    const bool exists = stat(path.c_str(), &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) check(EISDIR);
    if (exists && !S_ISREG(status.st_mode)) return check(write_device(path, bytes));

    fs::path target = path;
    std::error_code error;
    if (exists && fs::is_symlink(path, error)) target = fs::canonical(path, error);
    check(error.value());
    const fs::path temporary = target.string() + ".tmp";

    int fault = write_new_file(temporary, bytes);
    if (fault == 0 && rename(temporary.c_str(), target.c_str()) != 0) fault = errno;
    if (fault != 0) unlink(temporary.c_str());
    check(fault);
    check(sync_folder(target.has_parent_path() ? target.parent_path() : "."));
}

void write_file_atomically(const fs::path& path, std::string_view text) {
    write_file_atomically(path, std::as_bytes(std::span(text)));
}

void append_file(const fs::path& path, std::string_view text) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int fault = fd < 0 ? errno : write_all(fd, std::as_bytes(std::span(text)));
    if (fd >= 0 && close(fd) != 0 && fault == 0) fault = errno;
    if (fault != 0) fail("cannot append to {}: {}", path.string(), std::strerror(fault));
}

void sync_file(const fs::path& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    int fault = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) close(fd);
    if (fault != 0) fail("cannot write {}: {}", path.string(), std::strerror(fault));
}

FolderLock::~FolderLock() {
    if (fd >= 0) close(fd);
}

FolderLock lock_folder(const fs::path& path, bool wait) {
    FolderLock lock;
    lock.fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock.fd < 0) fail("cannot open folder {}: {}", path.string(), std::strerror(errno));
    // Some file systems have no locks; there two processes are the user's to keep apart.
    if (flock(lock.fd, LOCK_EX | (wait ? 0 : LOCK_NB)) != 0 && errno == EWOULDBLOCK)
        fail("{}: another process is working in this folder", path.string());
    return lock;
}

void check_input_path(const std::string& option, const fs::path& path, int exit_code) {
    std::error_code ignored;
    const fs::file_status status = fs::status(path, ignored);
    const char* fault = !fs::exists(status)                                          ? "no such file"
                        : fs::is_directory(status)                                   ? "is a folder, wanted a file"
                        : fs::is_character_file(status) || fs::is_block_file(status) ? "is a device, wanted a file"
                                                                                     : nullptr;
    if (fault != nullptr) throw Error(exit_code, fmt::format("{} {}: {}", option, path.string(), fault));
}

std::string read_file(const fs::path& path) {
    const auto fail_reading = [&](int fault) {
        fail("cannot read {}: {}", path.empty() ? "\"\"" : path.string(), std::strerror(fault));
    };
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail_reading(errno);

    // The size is a hint only: pipes and /proc files have none. One byte more, so that the end of a file of the
    // expected size is seen without growing.
    struct stat status;
    const bool has_size = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0;
    std::string text(has_size ? static_cast<size_t>(status.st_size) + 1 : size_t{1} << 16, '\0');
    size_t size = 0;
    int fault = 0;
    while (true) {
        if (size == text.size()) text.resize(2 * size);
        const ssize_t count = read(fd, text.data() + size, std::min(text.size() - size, size_t{1} << 30));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fault = errno;
        if (count <= 0) break;
        size += static_cast<size_t>(count);
    }
    close(fd);
    if (fault != 0) fail_reading(fault);
    text.resize(size);
    return text;
}

void make_folder(const fs::path& path) {
    std::error_code error;
    fs::create_directories(path, error);
    if (!error && !fs::is_directory(path, error) && !error) error = std::make_error_code(std::errc::not_a_directory);
    if (error) fail("cannot create folder {}: {}", path.empty() ? "\"\"" : path.string(), error.message());
}

void check_output_path(const std::string& option, const fs::path& path) {
    const fs::path folder = path.parent_path();
    if (!folder.empty() && !fs::is_directory(folder))
        fail_usage("{} {}: there is no folder {}", option, path.string(), folder.string());
    if (fs::is_directory(path)) fail_usage("{} {}: is a folder (wanted a file)", option, path.string());
}

bool same_place(const fs::path& a, const fs::path& b) {
    return fs::weakly_canonical(fs::absolute(a)) == fs::weakly_canonical(fs::absolute(b));
}

std::string sha256_hex(std::span<const std::byte> bytes) {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
    unsigned int size = 0;
    if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1)
        fail("OpenSSL cannot compute SHA-256");
    std::string hex;
    for (unsigned int i = 0; i < size; ++i) hex += fmt::format("{:02x}", digest[i]);
    return hex;
}

std::string sha256_hex(std::string_view text) {
    return sha256_hex(std::as_bytes(std::span(text)));
}

}  // namespace jetlag

// Files: atomic replacement, whole-file reads, checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace jetlag {

// Replaces `path` by `bytes` so that a kill, a full disk or a power cut leaves either the old file or the new
// one: writes PATH.tmp beside it, fsyncs it, renames it over PATH, fsyncs the folder. On failure the temporary
// file is removed and the old file is untouched. A symbolic link is followed; what cannot be replaced (a device,
// a pipe) is written to as it is. Errors name the path and the system's reason.
void write_file_atomically(const std::filesystem::path& path, std::span<const std::byte> bytes);
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// Appends to a file, which is created if it is not there. Errors name the path and the system's reason.
void append_file(const std::filesystem::path& path, std::string_view text);

// Waits until what was appended to a file would survive a power cut.
void sync_file(const std::filesystem::path& path);

// Held by one process at a time for as long as it lives; given up with the object, or when the process dies.
struct FolderLock {
    int fd = -1;
    FolderLock() = default;
    FolderLock(FolderLock&& other) noexcept : fd(std::exchange(other.fd, -1)) {}
    ~FolderLock();
};
// Where another process holds it: an error, or, with `wait`, waits.
FolderLock lock_folder(const std::filesystem::path& path, bool wait);

// The whole file as a string. Errors name the path and the system's reason.
std::string read_file(const std::filesystem::path& path);

// For a file that a user names to be read: an error of that exit code, naming the option, if there is none, or a folder
// or a device (which may have no end). A pipe is good.
void check_input_path(const std::string& option, const std::filesystem::path& path, int exit_code);

// Creates the folder and its parents if they are not there. Errors name the path and the system's reason.
void make_folder(const std::filesystem::path& path);

// For output files that are written after minutes of work: exit code 2, naming the option, if the path is a folder or
// its folder is not there.
void check_output_path(const std::string& option, const std::filesystem::path& path);

// True if two paths name the same place, whether anything is there or not.
bool same_place(const std::filesystem::path& a, const std::filesystem::path& b);

// SHA-256 in lower-case hex.
std::string sha256_hex(std::span<const std::byte> bytes);
std::string sha256_hex(std::string_view text);

}  // namespace jetlag

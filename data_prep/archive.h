// Reading members of archives (libarchive: zip, or tar, compressed or not).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

// Goes through the files of the archive held in memory, in its order, and gives the path and the contents of those that
// `wants` (by its path) to `take`; nothing else is unpacked, and one file at a time. Where a file cannot be read (a
// wrong checksum, encrypted, larger than max_bytes) `fault` says why. `label` names the archive in errors: not an
// archive, damaged so that what follows is lost.
struct ArchiveFile {
    std::string path, contents;
    std::string fault;  // "" if there is none
};
void read_archive(std::string_view archive, const std::string& label, uint64_t max_bytes,
                  const std::function<bool(const std::string& path)>& wants,
                  const std::function<void(ArchiveFile file)>& take);

// The contents of the members whose file name (without folders) is in `names`, in the order of `names`. Further errors:
// a member that is missing or there twice.
std::vector<std::string> read_archive_members(std::string_view archive, const std::string& label,
                                              const std::vector<std::string>& names, uint64_t max_bytes);

// True if the bytes begin as a zip archive does.
bool looks_like_zip(std::string_view bytes);

}  // namespace jetlag

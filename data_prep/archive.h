// Reading members of archives (libarchive: zip, tar, compressed or not).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

// The contents of the members whose file name (without folders) is in `names`, in the order of `names`, read from the
// archive held in memory. `label` names the archive in errors: not an archive, damaged, a member missing or present
// twice, members larger than max_bytes together.
std::vector<std::string> read_archive_members(std::string_view archive, const std::string& label,
                                              const std::vector<std::string>& names, uint64_t max_bytes);

// True if the bytes begin as a zip archive does.
bool looks_like_zip(std::string_view bytes);

}  // namespace jetlag

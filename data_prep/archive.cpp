#include "data_prep/archive.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "src/error.h"

namespace jetlag {

bool looks_like_zip(std::string_view bytes) {
    return bytes.starts_with(std::string_view("PK\x03\x04", 4));
}

void read_archive(std::string_view archive, const std::string& label, uint64_t max_bytes,
                  const std::function<bool(const std::string& path)>& wants,
                  const std::function<void(const std::string& path, std::string contents)>& take) {
    const std::unique_ptr<struct archive, decltype(&archive_read_free)> owner(archive_read_new(), &archive_read_free);
    struct archive* reader = owner.get();
    if (reader == nullptr) fail("{}: libarchive cannot be initialized", label);
    const auto refuse = [&]() {
        const char* reason = archive_error_string(reader);
        fail("{}: cannot be read as an archive: {}", label, reason != nullptr ? reason : "no reason given");
    };
    // Not all formats that libarchive has: one of them takes any text for a list of files, which it then opens.
    archive_read_support_filter_all(reader);
    archive_read_support_format_tar(reader);
    archive_read_support_format_zip(reader);
    if (archive_read_open_memory(reader, archive.data(), archive.size()) != ARCHIVE_OK) refuse();

    uint64_t total = 0;
    while (true) {
        struct archive_entry* entry = nullptr;
        const int header = archive_read_next_header(reader, &entry);
        if (header == ARCHIVE_EOF) break;
        if (header != ARCHIVE_OK && header != ARCHIVE_WARN) refuse();
        const char* raw_path = archive_entry_pathname(entry);
        const std::string path = raw_path != nullptr ? raw_path : "";
        if (archive_entry_filetype(entry) != AE_IFREG || !wants(path)) continue;

        std::string contents;
        char buffer[1 << 16];
        while (true) {
            const la_ssize_t bytes = archive_read_data(reader, buffer, sizeof buffer);
            if (bytes < 0) refuse();
            if (bytes == 0) break;
            total += static_cast<uint64_t>(bytes);
            if (total > max_bytes) fail("{}: holds more than the {} bytes allowed", label, max_bytes);
            contents.append(buffer, static_cast<size_t>(bytes));
        }
        take(path, std::move(contents));
    }
}

std::vector<std::string> read_archive_members(std::string_view archive, const std::string& label,
                                              const std::vector<std::string>& names, uint64_t max_bytes) {
    std::vector<std::string> members(names.size());
    std::vector<bool> found(names.size(), false);
    const auto index_of = [&](const std::string& path) -> size_t {
        const std::string name = std::filesystem::path(path).filename().string();
        return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    };
    read_archive(
        archive, label, max_bytes, [&](const std::string& path) { return index_of(path) < names.size(); },
        [&](const std::string& path, std::string contents) {
            const size_t i = index_of(path);
            if (found[i]) fail("{}: holds {} twice, wanted it once", label, names[i]);
            found[i] = true;
            members[i] = std::move(contents);
        });
    for (size_t i = 0; i < names.size(); ++i)
        if (!found[i]) fail("{}: has no {}, wanted {}", label, names[i], fmt::join(names, ", "));
    return members;
}

}  // namespace jetlag

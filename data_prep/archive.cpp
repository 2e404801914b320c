#include "data_prep/archive.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <clocale>
#include <filesystem>
#include <memory>

#include "src/error.h"

namespace jetlag {

bool looks_like_zip(std::string_view bytes) {
    return bytes.starts_with(std::string_view("PK\x03\x04", 4));
}

using Reader = std::unique_ptr<struct archive, decltype(&archive_read_free)>;

static std::string reason_of(struct archive* reader) {
    const char* text = archive_error_string(reader);
    return text != nullptr ? text : "no reason given";
}

static Reader open_archive(std::string_view archive, const std::string& label) {
    // libarchive has no name for a file whose name the locale cannot write, and the locale "C" writes ASCII only.
    std::setlocale(LC_CTYPE, "C.UTF-8");
    Reader reader(archive_read_new(), &archive_read_free);
    if (reader == nullptr) fail("{}: libarchive cannot be initialized", label);
    // Not all formats that libarchive has: one of them takes any text for a list of files, which it then opens.
    archive_read_support_filter_all(reader.get());
    archive_read_support_format_tar(reader.get());
    archive_read_support_format_zip(reader.get());
    if (archive_read_open_memory(reader.get(), archive.data(), archive.size()) != ARCHIVE_OK)
        fail("{}: cannot be read as an archive: {}", label, reason_of(reader.get()));
    return reader;
}

void read_archive(std::string_view archive, const std::string& label, uint64_t max_bytes,
                  const std::function<bool(const std::string& path)>& wants,
                  const std::function<void(ArchiveFile file)>& take) {
    Reader reader = open_archive(archive, label);
    int64_t position = 0, done = 0;  // of the entry at hand, and how many need no look
    while (true) {
        struct archive_entry* entry = nullptr;
        const int header = archive_read_next_header(reader.get(), &entry);
        if (header == ARCHIVE_EOF) break;
        if (header != ARCHIVE_OK && header != ARCHIVE_WARN)
            fail("{}: cannot be read as an archive: {}", label, reason_of(reader.get()));
        if (position++ < done) continue;
        done = position;
        ArchiveFile file;
        if (const char* path = archive_entry_pathname(entry); path != nullptr) file.path = path;
        if (archive_entry_filetype(entry) != AE_IFREG || !wants(file.path)) continue;

        char buffer[1 << 16];
        la_ssize_t bytes = 1;
        while (bytes > 0 && file.fault.empty()) {
            bytes = archive_read_data(reader.get(), buffer, sizeof buffer);
            if (bytes < 0)
                file.fault = fmt::format("cannot be read from the archive: {}", reason_of(reader.get()));
            else if (file.contents.size() + static_cast<size_t>(bytes) > max_bytes)
                file.fault = fmt::format("is larger than the {} bytes allowed", max_bytes);
            else
                file.contents.append(buffer, static_cast<size_t>(bytes));
        }
        take(std::move(file));
        // The reader has given up; from a new one the files that follow can still be had, in a zip at least.
        if (bytes == ARCHIVE_FATAL) {
            reader = open_archive(archive, label);
            position = 0;
        }
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
        [&](ArchiveFile file) {
            const size_t i = index_of(file.path);
            if (found[i]) fail("{}: holds {} twice, wanted it once", label, names[i]);
            if (!file.fault.empty()) fail("{}: cannot be read as an archive: {} {}", label, file.path, file.fault);
            found[i] = true;
            members[i] = std::move(file.contents);
        });
    for (size_t i = 0; i < names.size(); ++i)
        if (!found[i]) fail("{}: has no {}, wanted {}", label, names[i], fmt::join(names, ", "));
    return members;
}

}  // namespace jetlag

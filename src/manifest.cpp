#include "src/manifest.h"

#include "src/error.h"
#include "src/files.h"

namespace jetlag {

std::filesystem::path manifest_path(const std::filesystem::path& stream_path) {
    std::filesystem::path path = stream_path;
    path += ".json";
    return path;
}

std::optional<nlohmann::ordered_json> read_manifest(const std::filesystem::path& stream_path) {
    const std::filesystem::path path = manifest_path(stream_path);
    if (!std::filesystem::is_regular_file(path)) return std::nullopt;
    const bool allow_exceptions = false;
    nlohmann::ordered_json manifest = nlohmann::ordered_json::parse(read_file(path), nullptr, allow_exceptions);
    if (!manifest.is_object() || !manifest.contains("sha256") || !manifest["sha256"].is_string() ||
        !manifest.contains("size") || !manifest["size"].is_number_unsigned()) {
        return std::nullopt;
    }
    return manifest;
}

bool stream_matches(const std::filesystem::path& stream_path, const nlohmann::ordered_json& manifest) {
    if (!std::filesystem::is_regular_file(stream_path)) return false;
    if (std::filesystem::file_size(stream_path) != manifest.at("size").get<uint64_t>()) return false;
    return sha256_hex(read_file(stream_path)) == manifest.at("sha256").get<std::string>();
}

// True if the file where the manifest goes is one that a data_prep program wrote, or began to write.
static bool is_ours(const std::filesystem::path& stream_path) {
    const std::optional<nlohmann::ordered_json> manifest = read_manifest(stream_path);
    return manifest && manifest->contains("program") && manifest->contains("arguments");
}

void write_stream(const std::filesystem::path& stream_path, std::string_view bytes, nlohmann::ordered_json manifest,
                  bool force) {
    manifest["size"] = bytes.size();
    manifest["sha256"] = sha256_hex(bytes);
    if (std::filesystem::is_directory(stream_path)) {
        fail("{}: is a folder, wanted the path of a file to write", stream_path.string());
    }
    if (stream_path.has_parent_path()) make_folder(stream_path.parent_path());
    // Stream and manifest go together: one process at a time.
    const FolderLock lock = lock_folder(stream_path.has_parent_path() ? stream_path.parent_path() : ".", true);
    const bool same = stream_matches(stream_path, manifest);
    const bool ours = is_ours(stream_path);
    // A manifest cut short beside the stream that it belongs to is made whole.
    const bool is_damaged = same && std::filesystem::exists(manifest_path(stream_path)) &&
                            !nlohmann::json::accept(read_file(manifest_path(stream_path)));
    if (!force && !ours && !is_damaged && std::filesystem::exists(manifest_path(stream_path)))
        fail_usage("{}: is a file that data_prep did not write, where the manifest goes; --force replaces it",
                   manifest_path(stream_path).string());
    if (!force && !ours && !same && std::filesystem::exists(stream_path))
        fail_usage("{}: is a file with other content and without a manifest, so not one of ours; --force replaces it",
                   stream_path.string());
    if (!same) write_file_atomically(stream_path, bytes);
    // A published text may hold any bytes; names and arguments that are not UTF-8 are written with U+FFFD.
    write_file_atomically(manifest_path(stream_path),
                          manifest.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace jetlag

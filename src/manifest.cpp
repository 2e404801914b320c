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

void write_stream(const std::filesystem::path& stream_path, std::string_view bytes, nlohmann::ordered_json manifest,
                  bool force) {
    manifest["size"] = bytes.size();
    manifest["sha256"] = sha256_hex(bytes);
    if (std::filesystem::is_directory(stream_path)) {
        fail("{}: is a folder, wanted the path of a file to write", stream_path.string());
    }
    const bool same = stream_matches(stream_path, manifest);
    if (!same && !force && std::filesystem::exists(stream_path) && !std::filesystem::exists(manifest_path(stream_path)))
        fail_usage("{}: is a file with other content and without a manifest, so not one of ours; --force replaces it",
                   stream_path.string());

    if (stream_path.has_parent_path()) make_folder(stream_path.parent_path());
    if (!same) write_file_atomically(stream_path, bytes);
    // A published text may hold any bytes; names and arguments that are not UTF-8 are written with U+FFFD.
    write_file_atomically(manifest_path(stream_path),
                          manifest.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace jetlag

// The manifest of a token stream: STREAM.json beside STREAM, one JSON object that says where the bytes came from.
// Every manifest holds "name", "size" (bytes), "sha256", "program" and "arguments"; the data_prep program that wrote
// it adds what it knows (source, published checksum, options, counts).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace jetlag {

std::filesystem::path manifest_path(const std::filesystem::path& stream_path);

// The manifest of the stream; nothing if there is none or if it is not a JSON object with a string "sha256" and a
// number "size" (a manifest is never needed, so a damaged one counts as absent).
std::optional<nlohmann::ordered_json> read_manifest(const std::filesystem::path& stream_path);

// True if the stream is there and has the size and SHA-256 that the manifest states.
bool stream_matches(const std::filesystem::path& stream_path, const nlohmann::ordered_json& manifest);

// Writes the stream and then its manifest, each atomically, making the folder if need be; "size" and "sha256" are set
// here. A kill between the two leaves a manifest that does not match, which stream_matches() finds.
// A file that stands at stream_path without a manifest and holds other bytes was not made by data_prep, nor was a file
// where the manifest goes that is no manifest: each is a usage error unless `force`. Where the file already holds these
// bytes only the manifest is written. Other errors name the path: a folder stands there, or it cannot be written.
void write_stream(const std::filesystem::path& stream_path, std::string_view bytes, nlohmann::ordered_json manifest,
                  bool force);

}  // namespace jetlag

// Where a data_prep program takes its bytes from: a file on this machine or an http(s) address.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace jetlag {

// A file that its publisher gives at `address`. `size` and `sha256` are empty where it changes over time, so that
// nothing could be checked.
struct PublishedFile {
    std::string address;
    std::optional<uint64_t> size;
    std::string sha256;
};

struct Source {
    std::string from;  // a path or an address
    bool is_web = false;
    std::string bytes;
    std::string sha256;
    bool is_checked = false;  // meets the published SHA-256
};

// Reads or downloads `from`. `option` is the option that takes a path ("--from"), for errors: no such file, a folder, a
// device, an empty file, an address of another kind, what download() says.
Source read_source(const std::string& option, const std::string& from);

// Compares the source with what is published under the name `name`. A download that differs is an error; a local file
// that differs is recorded as unchecked, with a warning on stderr. Without a published SHA-256 nothing happens.
// `otherwise` says in the error how to take other content.
void check_source(Source& source, const PublishedFile& published, const std::string& name,
                  const std::string& otherwise);

// {"path" or "address", "size", "sha256"}, for manifests.
nlohmann::ordered_json source_json(const Source& source);

// The time now in UTC, as manifests write it: "2026-01-31T23:59:59Z".
std::string time_text();

}  // namespace jetlag

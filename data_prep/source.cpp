#include "data_prep/source.h"

#include <fmt/chrono.h>

#include <ctime>
#include <filesystem>

#include "src/download.h"
#include "src/error.h"
#include "src/files.h"

namespace jetlag {

static std::string read_local(const std::string& option, const std::string& path) {
    if (path.find("://") != std::string::npos)
        fail_usage("{} {}: wanted a path or an http or https address", option, path);
    check_input_path(option, path, kExitFailed);
    std::string bytes = read_file(path);
    if (bytes.empty()) fail("{} {}: is empty", option, path);
    return bytes;
}

static std::string fetch(const std::string& option, const std::string& address) {
    fmt::print("downloading {}\n", address);
    std::fflush(stdout);
    try {
        return download(address);
    } catch (const Error& error) {
        fail("{}; {} PATH takes a copy that you have", error.what(), option);
    }
}

Source read_source(const std::string& option, const std::string& from) {
    Source source;
    source.from = from;
    source.is_web = is_web_address(from);
    source.bytes = source.is_web ? fetch(option, from) : read_local(option, from);
    source.sha256 = sha256_hex(source.bytes);
    return source;
}

void check_source(Source& source, const PublishedFile& published, const std::string& name,
                  const std::string& otherwise) {
    if (published.sha256.empty()) return;
    source.is_checked = source.sha256 == published.sha256;
    if (source.is_checked) return;
    const std::string wanted = published.size ? fmt::format("{} bytes with ", *published.size) : "";
    const std::string difference = fmt::format("found {} bytes with SHA-256 {}, wanted {}SHA-256 {}",
                                               source.bytes.size(), source.sha256, wanted, published.sha256);
    if (source.is_web) fail("{}: not the published {}: {}; {}", source.from, name, difference, otherwise);
    print_note("warning: {}: not the published {}, recorded as unchecked: {}\n", source.from, name, difference);
}

nlohmann::ordered_json source_json(const Source& source) {
    return {
        {source.is_web ? "address" : "path", source.from}, {"size", source.bytes.size()}, {"sha256", source.sha256}};
}

std::string time_text() {
    return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

}  // namespace jetlag

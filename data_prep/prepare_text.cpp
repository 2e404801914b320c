// prepare_text NAME [--from PATH_OR_URL] [--out PATH]: makes a token stream from a text. The stream is the bytes of the
// text, unchanged; its manifest (src/manifest.h) says where they came from and whether a published checksum was met.
#include <fmt/chrono.h>
#include <fmt/ranges.h>

#include <ctime>

#include "data_prep/archive.h"
#include "src/command_line.h"
#include "src/config.h"
#include "src/download.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"

using namespace jetlag;

namespace {

// A corpus that the program knows by name. `size` and `sha256` are those of the file at `address`; empty where the
// source changes over time, so that nothing could be checked. The stream is that file, or, where it is an archive, its
// `members` one after the other.
struct KnownCorpus {
    std::string name;
    std::string address;
    std::optional<uint64_t> size;
    std::string sha256;
    std::vector<std::string> members;
    std::string licence;
};

const std::vector<KnownCorpus>& known_corpora() {
    static const std::vector<KnownCorpus> corpora = {
        {.name = "tiny_shakespeare",
         .address = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
         .size = 1115394,
         .sha256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
         .members = {},
         .licence = "public domain text"},
        // The first address of WikiText (research.metamind.io on S3) is closed. This one belongs to an author of the
        // data set; the SHA-256 is the one that data-set libraries published for the first address.
        {.name = "wikitext2",
         .address = "https://wikitext.smerity.com/wikitext-2-v1.zip",
         .size = std::nullopt,
         .sha256 = "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
         .members = {"wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"},
         .licence = "CC BY-SA"},
        // Project Gutenberg no. 2600; its files are corrected from time to time.
        {.name = "war_and_peace",
         .address = "https://www.gutenberg.org/cache/epub/2600/pg2600.txt",
         .size = std::nullopt,
         .sha256 = "",
         .members = {},
         .licence = "Project Gutenberg licence"},
    };
    return corpora;
}

constexpr uint64_t kMaxUnpackedBytes = uint64_t{1} << 30;

struct Request {
    std::string name;
    std::string from;  // a path or a web address
    bool official = false;
    std::filesystem::path out;
    const KnownCorpus* known = nullptr;
    bool force = false;
};

std::vector<std::string> known_names() {
    std::vector<std::string> names;
    for (const KnownCorpus& corpus : known_corpora()) names.push_back(corpus.name);
    return names;
}

// The file name of a path or of the path of a web address, without its extension.
std::string stem_of(const std::string& from) {
    std::string path = from;
    if (is_web_address(from)) {
        path = path.substr(path.find("//") + 2);
        path = path.substr(0, path.find_first_of("?#"));
        path = path.find('/') == std::string::npos ? "" : path.substr(path.find('/'));
    }
    return std::filesystem::path(path).stem().string();
}

Request resolve_request(const std::string& name, const std::string& from, const std::string& out, bool force) {
    Request request{.name = name, .from = from, .out = out, .force = force};
    const std::vector<std::string> names = known_names();
    if (name.empty() && from.empty())
        fail_usage("no NAME and no --from: name one of {}, or give a text of your own with --from",
                   fmt::join(names, ", "));
    if (name.empty()) request.name = stem_of(from);
    if (request.name.empty()) fail_usage("--from {}: gives no file name to call the corpus by: give a NAME", from);
    if (request.name.find('/') != std::string::npos)
        fail_usage("NAME {}: holds a '/': a NAME is a plain word; --from takes a path, --out another place",
                   request.name);

    for (const KnownCorpus& corpus : known_corpora())
        if (corpus.name == request.name) request.known = &corpus;
    if (from.empty()) {
        if (request.known == nullptr) {
            const std::string near = nearest(name, names);
            fail_usage("unknown corpus {}{}: known are {}; any other text needs --from PATH_OR_URL", name,
                       near.empty() ? "" : fmt::format(" (did you mean {}?)", near), fmt::join(names, ", "));
        }
        request.from = request.known->address;
        request.official = true;
    }
    if (!is_web_address(request.from) && request.from.find("://") != std::string::npos)
        fail_usage("--from {}: wanted a path or an http or https address", from);
    if (out.empty()) request.out = std::filesystem::path("data") / (request.name + ".txt");
    return request;
}

std::string read_local(const std::string& path) {
    if (!std::filesystem::exists(path)) fail("--from {}: no such file", path);
    if (std::filesystem::is_directory(path)) fail("--from {}: is a folder, wanted a file", path);
    if (!std::filesystem::is_regular_file(path)) fail("--from {}: is a device or a pipe, wanted a file", path);
    std::string bytes = read_file(path);
    if (bytes.empty()) fail("--from {}: is empty", path);
    return bytes;
}

std::string fetch(const std::string& address) {
    fmt::print("downloading {}\n", address);
    std::fflush(stdout);
    try {
        return download(address);
    } catch (const Error& error) {
        fail("{}; --from PATH takes a copy that you have", error.what());
    }
}

// What is wrong with the source compared to the published size and checksum; "" if nothing.
std::string mismatch(const KnownCorpus& known, size_t size, const std::string& sha256) {
    if (sha256 == known.sha256) return "";
    std::string wanted = fmt::format("SHA-256 {}", known.sha256);
    if (known.size) wanted = fmt::format("{} bytes with ", *known.size) + wanted;
    return fmt::format("found {} bytes with SHA-256 {}, wanted {}", size, sha256, wanted);
}

// True if the stream was already made from the same source and nothing has changed since.
bool up_to_date(const Request& request, const std::optional<nlohmann::ordered_json>& manifest,
                const std::string& source_sha256) {
    if (request.force || !manifest) return false;
    // operator== of JSON values: a field that is absent or of another type differs, without an exception.
    const auto field = [](const nlohmann::ordered_json& object, const char* key) {
        return object.is_object() && object.contains(key) ? object.at(key) : nlohmann::ordered_json();
    };
    const nlohmann::ordered_json source = field(*manifest, "source");
    const char* kind = is_web_address(request.from) ? "address" : "path";
    if (field(*manifest, "name") != request.name || field(source, kind) != request.from) return false;
    if (!source_sha256.empty() && field(source, "sha256") != source_sha256) return false;
    return stream_matches(request.out, *manifest);
}

int prepare(const Request& request, const std::vector<std::string>& arguments) {
    const bool web = is_web_address(request.from);
    std::error_code not_there;
    if (!web && std::filesystem::equivalent(request.from, request.out, not_there))
        fail_usage("--out {}: is the source itself, wanted another path (any file is a corpus as it is)",
                   request.out.string());
    const std::optional<nlohmann::ordered_json> old_manifest = read_manifest(request.out);
    // A local source is read again, as it may have changed; an address is trusted to hold what it held.
    std::string source = web ? "" : read_local(request.from);
    std::string source_sha256 = web ? "" : sha256_hex(source);
    if (up_to_date(request, old_manifest, source_sha256)) {
        fmt::print("{}: up to date, {} bytes, sha256 {} (--force makes it anew)\n", request.out.string(),
                   old_manifest->at("size").get<uint64_t>(), old_manifest->at("sha256").get<std::string>());
        return kExitGood;
    }
    if (web) {
        source = fetch(request.from);
        source_sha256 = sha256_hex(source);
    }

    const KnownCorpus* known = request.known;
    const bool published = known != nullptr && !known->sha256.empty();
    bool checked = false;
    if (published) {
        const std::string difference = mismatch(*known, source.size(), source_sha256);
        checked = difference.empty();
        if (!checked && web)
            fail("{}: not the published {}: {}; another NAME takes other content", request.from, known->name,
                 difference);
        if (!checked)
            fmt::print(stderr, "warning: {}: not the published {}, recorded as unchecked: {}\n", request.from,
                       known->name, difference);
    }

    nlohmann::ordered_json manifest;
    manifest["name"] = request.name;
    manifest["size"] = nullptr;  // these two are filled in by write_stream; here they keep their place
    manifest["sha256"] = nullptr;
    manifest["source"] = {{web ? "address" : "path", request.from}, {"size", source.size()}, {"sha256", source_sha256}};
    if (known != nullptr) manifest["licence"] = known->licence;
    if (published) {
        nlohmann::ordered_json of_source;
        if (known->size) of_source["size"] = *known->size;
        of_source["sha256"] = known->sha256;
        manifest["published"] = of_source;
    }
    manifest["checked"] = checked;
    manifest["retrieved"] = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
    manifest["program"] = "prepare_text";
    manifest["arguments"] = arguments;

    const bool unpack = looks_like_zip(source) && known != nullptr && !known->members.empty();
    std::string stream;
    if (unpack) {
        nlohmann::ordered_json parts = nlohmann::ordered_json::array();
        const std::vector<std::string> members =
            read_archive_members(source, request.from, known->members, kMaxUnpackedBytes);
        for (size_t i = 0; i < members.size(); ++i) {
            parts.push_back(
                {{"name", known->members[i]}, {"size", members[i].size()}, {"sha256", sha256_hex(members[i])}});
            stream += members[i];
        }
        manifest["members"] = parts;
        if (stream.empty()) fail("{}: its members {} are empty", request.from, fmt::join(known->members, ", "));
    } else {
        if (looks_like_zip(source))
            fmt::print(stderr, "warning: {}: is a zip archive; its bytes are taken as they are\n", request.from);
        stream = std::move(source);
    }
    write_stream(request.out, stream, manifest, request.force);
    fmt::print("{}: {} bytes, sha256 {}, {}\n", request.out.string(), stream.size(), sha256_hex(stream),
               checked ? "as published" : (published ? "other than published" : "no published checksum to check"));
    return kExitGood;
}

}  // namespace

int main(int argc, char** argv) {
    return run_main("prepare_text", [&]() {
        CLI::App app{
            fmt::format("Makes a token stream (the bytes of a text) and its JSON manifest.\n"
                        "Known corpora: {}.",
                        fmt::join(known_names(), ", "))};
        std::string name, from, out;
        bool force = false;
        app.add_option("NAME", name, "a known corpus, or with --from any word (default: the file name of --from)");
        app.add_option("--from", from, "take this file or http(s) address instead of the official address");
        app.add_option("--out", out, "the stream to write (default: data/NAME.txt); the manifest is OUT.json");
        app.add_flag("--force", force, "make it anew even if it is up to date, or if the file there is not ours");
        if (!parse_command_line(app, argc, argv)) return kExitGood;
        return prepare(resolve_request(name, from, out, force), std::vector<std::string>(argv + 1, argv + argc));
    });
}

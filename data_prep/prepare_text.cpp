// prepare_text NAME [--from PATH_OR_URL] [--out PATH]: makes a token stream from a text. The stream is the bytes of the
// text, unchanged; its manifest (src/manifest.h) says where they came from and whether a published checksum was met.
#include <fmt/ranges.h>

#include "data_prep/archive.h"
#include "data_prep/source.h"
#include "src/command_line.h"
#include "src/config.h"
#include "src/download.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"

using namespace jetlag;

namespace {

// A corpus that the program knows by name. The stream is the published file, or, where that is an archive, its
// `members` one after the other.
struct KnownCorpus {
    std::string name;
    PublishedFile file;
    std::vector<std::string> members;
    std::string licence;
};

const std::vector<KnownCorpus>& known_corpora() {
    static const std::vector<KnownCorpus> corpora = {
        {.name = "tiny_shakespeare",
         .file = {.address =
                      "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                  .size = 1115394,
                  .sha256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
         .members = {},
         .licence = "public domain text"},
        // The first address of WikiText (research.metamind.io on S3) is closed. This one belongs to an author of the
        // data set; the SHA-256 is the one that data-set libraries published for the first address.
        {.name = "wikitext2",
         .file = {.address = "https://wikitext.smerity.com/wikitext-2-v1.zip",
                  .size = std::nullopt,
                  .sha256 = "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"},
         .members = {"wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"},
         .licence = "CC BY-SA"},
        // Project Gutenberg no. 2600; its files are corrected from time to time.
        {.name = "war_and_peace",
         .file = {.address = "https://www.gutenberg.org/cache/epub/2600/pg2600.txt",
                  .size = std::nullopt,
                  .sha256 = ""},
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
        request.from = request.known->file.address;
        request.official = true;
    }
    if (out.empty()) request.out = std::filesystem::path("data") / (request.name + ".txt");
    return request;
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
    std::optional<Source> source;
    if (!web) source = read_source("--from", request.from);
    if (up_to_date(request, old_manifest, web ? "" : source->sha256)) {
        fmt::print("{}: up to date, {} bytes, sha256 {} (--force makes it anew)\n", request.out.string(),
                   old_manifest->at("size").get<uint64_t>(), old_manifest->at("sha256").get<std::string>());
        return kExitGood;
    }
    if (web) source = read_source("--from", request.from);

    const KnownCorpus* known = request.known;
    const bool published = known != nullptr && !known->file.sha256.empty();
    if (published) check_source(*source, known->file, known->name, "another NAME takes other content");

    nlohmann::ordered_json manifest;
    manifest["name"] = request.name;
    manifest["size"] = nullptr;  // these two are filled in by write_stream; here they keep their place
    manifest["sha256"] = nullptr;
    manifest["source"] = source_json(*source);
    if (known != nullptr) manifest["licence"] = known->licence;
    if (published) {
        nlohmann::ordered_json of_source;
        if (known->file.size) of_source["size"] = *known->file.size;
        of_source["sha256"] = known->file.sha256;
        manifest["published"] = of_source;
    }
    manifest["checked"] = source->is_checked;
    manifest["retrieved"] = time_text();
    manifest["program"] = "prepare_text";
    manifest["arguments"] = arguments;

    const bool unpack = looks_like_zip(source->bytes) && known != nullptr && !known->members.empty();
    std::string stream;
    if (unpack) {
        nlohmann::ordered_json parts = nlohmann::ordered_json::array();
        const std::vector<std::string> members =
            read_archive_members(source->bytes, request.from, known->members, kMaxUnpackedBytes);
        for (size_t i = 0; i < members.size(); ++i) {
            parts.push_back(
                {{"name", known->members[i]}, {"size", members[i].size()}, {"sha256", sha256_hex(members[i])}});
            stream += members[i];
        }
        manifest["members"] = parts;
        if (stream.empty()) fail("{}: its members {} are empty", request.from, fmt::join(known->members, ", "));
    } else {
        if (looks_like_zip(source->bytes))
            print_note("warning: {}: is a zip archive; its bytes are taken as they are\n", request.from);
        stream = std::move(source->bytes);
    }
    write_stream(request.out, stream, manifest, request.force);
    fmt::print(
        "{}: {} bytes, sha256 {}, {}\n", request.out.string(), stream.size(), sha256_hex(stream),
        source->is_checked ? "as published" : (published ? "other than published" : "no published checksum to check"));
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

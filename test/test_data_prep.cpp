// Data preparation: downloads from a small server in this process, prepare_text, and the motif corpora.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "data_prep/motif.h"
#include "src/download.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"
#include "test/support.h"

namespace jetlag {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;
using test::zip_of;

// Serves each path with the raw response given for it, one connection at a time, on a free port of 127.0.0.1. A path
// without a response gets the request read and then silence, until the server stops.
struct WebServer {
    std::map<std::string, std::string> responses;
    std::atomic<bool> stopping = false;
    std::atomic<int> requests = 0;
    int listener = -1;
    int port = 0;
    std::thread thread;

    explicit WebServer(std::map<std::string, std::string> all) : responses(std::move(all)) {
        listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 8) != 0 ||
            getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
            throw std::runtime_error("the test's web server cannot listen");
        }
        port = ntohs(address.sin_port);
        thread = std::thread([this]() { serve(); });
    }
    ~WebServer() {
        stopping = true;
        shutdown(listener, SHUT_RDWR);  // ends a waiting accept
        thread.join();
        close(listener);
    }
    std::string url(const std::string& path) const { return fmt::format("http://127.0.0.1:{}{}", port, path); }

    void serve() {
        while (!stopping) {
            const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (connection < 0) continue;
            ++requests;
            std::string request;
            char buffer[4096];
            while (request.find("\r\n\r\n") == std::string::npos) {
                const ssize_t bytes = recv(connection, buffer, sizeof buffer, 0);
                if (bytes <= 0) break;
                request.append(buffer, static_cast<size_t>(bytes));
            }
            const size_t start = request.find(' ') + 1;
            const auto response = responses.find(request.substr(start, request.find(' ', start) - start));
            if (response != responses.end()) {
                const std::string& text = response->second;
                for (size_t sent = 0; sent < text.size();) {
                    const ssize_t bytes = send(connection, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
                    if (bytes <= 0) break;
                    sent += static_cast<size_t>(bytes);
                }
            } else {
                while (!stopping && recv(connection, buffer, sizeof buffer, 0) > 0) continue;
            }
            close(connection);
        }
    }
};

std::string response(const std::string& body, const std::string& status = "200 OK", const std::string& headers = "") {
    return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\n{}Connection: close\r\n\r\n{}", status, body.size(),
                       headers, body);
}

// A proxy of the environment must not come between the tests and 127.0.0.1.
const std::vector<std::string> kNoProxy = {"no_proxy=*"};

struct DownloadTest : testing::Test {
    void SetUp() override { setenv("no_proxy", "*", 1); }
};

// The one line of an Error; "" if the download succeeds.
std::string download_error(const std::string& address, const DownloadLimits& limits = {}) {
    try {
        download(address, limits);
    } catch (const Error& error) {
        EXPECT_EQ(error.exit_code, kExitFailed);
        EXPECT_NE(std::string(error.what()).find(address), std::string::npos) << error.what();
        return error.what();
    }
    return "";
}

TEST_F(DownloadTest, GivesTheBodyByteForByte) {
    std::string body;
    std::mt19937 noise(1);
    for (int i = 0; i < 300'000; ++i) body += static_cast<char>(noise());
    WebServer server({{"/a", response(body)}});
    EXPECT_TRUE(download(server.url("/a")) == body);
}

TEST_F(DownloadTest, FollowsRedirectsButNotForEver) {
    WebServer server({{"/old", response("", "301 Moved Permanently", "Location: /new\r\n")},
                      {"/new", response("here")},
                      {"/loop", response("", "302 Found", "Location: /loop\r\n")},
                      {"/file", response("", "302 Found", "Location: file:///etc/passwd\r\n")}});
    EXPECT_EQ(download(server.url("/old")), "here");
    EXPECT_NE(download_error(server.url("/loop")).find("redirect"), std::string::npos);
    EXPECT_NE(download_error(server.url("/file")).find("rotocol"), std::string::npos);
}

TEST_F(DownloadTest, NamesWhatWentWrong) {
    std::string cut = response(std::string(1000, 'x'));
    cut.resize(cut.size() - 10);
    WebServer server({{"/missing", response("not here", "404 Not Found")},
                      {"/cut", cut},
                      {"/empty", response("")},
                      {"/large", response(std::string(1001, 'x'))}});
    EXPECT_NE(download_error(server.url("/missing")).find("404"), std::string::npos);
    EXPECT_NE(download_error(server.url("/cut")).find("10 bytes remaining"), std::string::npos);
    EXPECT_NE(download_error(server.url("/empty")).find("empty"), std::string::npos);
    EXPECT_NE(download_error(server.url("/large"), {.max_bytes = 1000}).find("more than the 1000 bytes"),
              std::string::npos);
    EXPECT_EQ(download_error(server.url("/large"), {.max_bytes = 1001}), "");
    EXPECT_NE(download_error(server.url("/silence"), {.stall_seconds = 1}).find("too slow"), std::string::npos);
}

TEST_F(DownloadTest, NamesARefusedConnection) {
    int port = 0;
    { port = WebServer({}).port; }
    EXPECT_NE(download_error(fmt::format("http://127.0.0.1:{}/x", port)).find("onnect"), std::string::npos);
}

TEST(WebAddress, IsHttpOrHttps) {
    EXPECT_TRUE(is_web_address("http://a/b"));
    EXPECT_TRUE(is_web_address("HTTPS://a/b"));
    EXPECT_FALSE(is_web_address("ftp://a/b"));
    EXPECT_FALSE(is_web_address("http:/a"));
    EXPECT_FALSE(is_web_address("data/http://"));
}

nlohmann::ordered_json manifest_of(const std::filesystem::path& stream) {
    return nlohmann::ordered_json::parse(read_file(manifest_path(stream)));
}

void expect_fails(const ProgramResult& result, int exit_code, const std::vector<std::string>& parts) {
    EXPECT_EQ(result.exit_code, exit_code) << result.out << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
}

TEST(PrepareText, ChecksAKnownCorpusAndIsIdempotent) {
    NEEDS_SHARED();
    TemporaryFolder folder;
    const std::string source = test::shared_folder() / "data/text/tiny_shakespeare.txt";
    const std::string out = folder.path / "deep/er/ts.txt";
    ProgramResult result = run_program("prepare_text", {"tiny_shakespeare", "--from", source, "--out", out});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_TRUE(read_file(out) == read_file(source));
    const nlohmann::ordered_json manifest = manifest_of(out);
    EXPECT_EQ(manifest["name"], "tiny_shakespeare");
    EXPECT_EQ(manifest["size"], 1115394);
    EXPECT_EQ(manifest["sha256"], "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed");
    EXPECT_EQ(manifest["source"]["path"], source);
    EXPECT_EQ(manifest["published"]["size"], 1115394);
    EXPECT_EQ(manifest["published"]["sha256"], manifest["sha256"]);
    EXPECT_EQ(manifest["checked"], true);
    EXPECT_EQ(manifest["program"], "prepare_text");
    EXPECT_EQ(manifest["arguments"].size(), 5u);
    const std::string retrieved = manifest["retrieved"];
    ASSERT_EQ(retrieved.size(), 20u);
    EXPECT_EQ(retrieved[10], 'T');
    EXPECT_EQ(retrieved[19], 'Z');

    const auto written = std::filesystem::last_write_time(manifest_path(out));
    result = run_program("prepare_text", {"tiny_shakespeare", "--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.out.find("up to date"), std::string::npos) << result.out;
    EXPECT_EQ(std::filesystem::last_write_time(manifest_path(out)), written);

    result = run_program("prepare_text", {"tiny_shakespeare", "--from", source, "--out", out, "--force"});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.out.find("up to date"), std::string::npos) << result.out;

    // A damaged stream is made anew.
    write_file_atomically(out, std::string_view("damaged"));
    result = run_program("prepare_text", {"tiny_shakespeare", "--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_TRUE(read_file(out) == read_file(source));
}

TEST(PrepareText, RecordsOtherLocalContentAsUnchecked) {
    TemporaryFolder folder;
    const std::string source = folder.path / "mine.txt", out = folder.path / "out.txt";
    write_file_atomically(source, std::string_view("To be"));
    const ProgramResult result = run_program("prepare_text", {"tiny_shakespeare", "--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.err.find("warning"), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("wanted 1115394 bytes with SHA-256 86c4e6aa"), std::string::npos) << result.err;
    EXPECT_EQ(read_file(out), "To be");
    EXPECT_EQ(manifest_of(out)["checked"], false);
}

TEST(PrepareText, TakesAnyFile) {
    TemporaryFolder folder;
    const std::string source = folder.path / "notes.md";
    std::string bytes("\0\xff\r\n bytes \x80", 13);
    write_file_atomically(source, bytes);
    const std::string out = folder.path / "out.txt";
    ProgramResult result = run_program("prepare_text", {"--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(read_file(out), bytes);
    EXPECT_EQ(manifest_of(out)["name"], "notes");
    EXPECT_EQ(manifest_of(out)["checked"], false);

    // The source changes: the stream follows.
    write_file_atomically(source, bytes += "more");
    result = run_program("prepare_text", {"--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(read_file(out), bytes);

    // A manifest that was cut short beside its stream is made whole; JSON that is no manifest is somebody's file.
    write_file_atomically(manifest_path(out), std::string_view("{"));
    result = run_program("prepare_text", {"--from", source, "--out", out});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(manifest_of(out)["sha256"], sha256_hex(bytes));
    for (const std::string other : {"[]", R"({"size": 1, "sha256": "", "name": 3, "source": "x"})"}) {
        write_file_atomically(manifest_path(out), other);
        result = run_program("prepare_text", {"--from", source, "--out", out});
        EXPECT_EQ(result.exit_code, 2);
        EXPECT_NE(result.err.find(manifest_path(out).string() + ": is a file that data_prep did not write"),
                  std::string::npos)
            << result.err;
        EXPECT_EQ(read_file(manifest_path(out)), other);
    }
    result = run_program("prepare_text", {"--from", source, "--out", out, "--force"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(manifest_of(out)["sha256"], sha256_hex(bytes));

    // Neither the source nor its neighbour is ever replaced.
    result = run_program("prepare_text", {"--from", source, "--out", source});
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_NE(result.err.find("is the source itself, wanted another path"), std::string::npos) << result.err;
    EXPECT_EQ(read_file(source), bytes);
    const std::filesystem::path json_source = folder.path / "notes.json";
    write_file_atomically(json_source, std::string_view("{\"a\": 1}"));
    result = run_program("prepare_text", {"--from", json_source, "--out", folder.path / "notes"});
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(read_file(json_source), "{\"a\": 1}");
    EXPECT_FALSE(std::filesystem::exists(folder.path / "notes"));
}

TEST(PrepareText, JoinsThePartsOfWikiText2) {
    TemporaryFolder folder;
    const std::string source = folder.path / "w.zip", out = folder.path / "w.txt";
    std::string train;  // incompressible, so that a byte flipped in the middle of the archive is one of these
    std::mt19937 noise(1);
    for (int i = 0; i < 5000; ++i) train += static_cast<char>(noise());
    write_file_atomically(source, zip_of({{"wikitext-2/wiki.test.tokens", "test\n"},
                                          {"wikitext-2/README", "no"},
                                          {"wikitext-2/wiki.train.tokens", train},
                                          {"wikitext-2/wiki.valid.tokens", "valid\n"}}));
    ProgramResult result = run_program("prepare_text", {"wikitext2", "--from", source, "--out", out});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(read_file(out) == train + "valid\ntest\n");
    const nlohmann::ordered_json manifest = manifest_of(out);
    EXPECT_EQ(manifest["size"], 5011);
    EXPECT_EQ(manifest["checked"], false);
    EXPECT_EQ(manifest["source"]["sha256"], sha256_hex(read_file(source)));
    ASSERT_EQ(manifest["members"].size(), 3u);
    EXPECT_EQ(manifest["members"][1]["name"], "wiki.valid.tokens");
    EXPECT_EQ(manifest["members"][1]["sha256"], sha256_hex(std::string_view("valid\n")));

    const auto error_with = [&](const std::string& zip) {
        write_file_atomically(source, zip);
        ProgramResult failed = run_program("prepare_text", {"wikitext2", "--from", source, "--out", out});
        EXPECT_EQ(failed.exit_code, 1);
        EXPECT_TRUE(read_file(out) == train + "valid\ntest\n") << "the good stream is gone";
        return failed.err;
    };
    std::string zip = zip_of({{"wiki.train.tokens", "a"}, {"wiki.valid.tokens", "b"}});
    EXPECT_NE(error_with(zip).find("has no wiki.test.tokens"), std::string::npos);
    zip = zip_of({{"wiki.train.tokens", train}, {"wiki.valid.tokens", "b"}, {"wiki.test.tokens", "c"}});
    EXPECT_NE(error_with(zip.substr(0, 3000)).find("cannot be read as an archive"), std::string::npos);
    zip[2500] = static_cast<char>(zip[2500] ^ 1);
    EXPECT_NE(error_with(zip).find("cannot be read as an archive"), std::string::npos);
}

TEST(PrepareText, DownloadsAndKeepsTheGoodStreamWhenThatFails) {
    TemporaryFolder folder;
    const std::string out = folder.path / "out.txt";
    std::string cut = response("a text of the web");
    cut.resize(cut.size() - 3);
    WebServer server({{"/my_text.txt?x=1", response("a text of the web")},
                      {"/cut.txt", cut},
                      {"/gone.txt", response("gone", "404 Not Found")}});
    ProgramResult result =
        run_program("prepare_text", {"--from", server.url("/my_text.txt?x=1"), "--out", out}, kNoProxy);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(read_file(out), "a text of the web");
    EXPECT_EQ(manifest_of(out)["name"], "my_text");
    EXPECT_EQ(manifest_of(out)["source"]["address"], server.url("/my_text.txt?x=1"));

    const int before = server.requests;
    result = run_program("prepare_text", {"--from", server.url("/my_text.txt?x=1"), "--out", out}, kNoProxy);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.out.find("up to date"), std::string::npos) << result.out;
    EXPECT_EQ(server.requests, before);

    const std::string manifest = read_file(manifest_path(out));
    expect_fails(run_program("prepare_text", {"--from", server.url("/cut.txt"), "--out", out}, kNoProxy), 1,
                 {server.url("/cut.txt"), "3 bytes remaining", "--from"});
    expect_fails(run_program("prepare_text", {"--from", server.url("/gone.txt"), "--out", out}, kNoProxy), 1,
                 {server.url("/gone.txt"), "404", "--from"});
    // Under a known name a download must be the published content.
    expect_fails(run_program("prepare_text",
                             {"tiny_shakespeare", "--from", server.url("/my_text.txt?x=1"), "--out", out}, kNoProxy),
                 1,
                 {"found 17 bytes", sha256_hex(std::string_view("a text of the web")), "wanted 1115394", "86c4e6aa"});
    EXPECT_EQ(read_file(out), "a text of the web");
    EXPECT_EQ(read_file(manifest_path(out)), manifest);
}

TEST(PrepareText, NamesTheAddressWhenThereIsNoNetwork) {
    // A proxy that refuses connections stands for a machine without network.
    int port = 0;
    { port = WebServer({}).port; }
    TemporaryFolder folder;
    const std::string proxy = fmt::format("http://127.0.0.1:{}", port);
    expect_fails(run_program("prepare_text", {"war_and_peace", "--out", folder.path / "x"},
                             {"https_proxy=" + proxy, "no_proxy="}),
                 1, {"https://www.gutenberg.org/", "--from PATH takes a copy"});
    EXPECT_FALSE(std::filesystem::exists(folder.path / "x"));
}

TEST(PrepareText, RefusesBadUsageAndBadFiles) {
    TemporaryFolder folder;
    const std::string empty = folder.path / "empty", good = folder.path / "good";
    write_file_atomically(empty, std::string_view(""));
    write_file_atomically(good, std::string_view("good"));
    const std::string out = folder.path / "out";
    expect_fails(run_program("prepare_text", {}), 2, {"tiny_shakespeare, wikitext2, war_and_peace", "--from"});
    expect_fails(run_program("prepare_text", {"tiny_shakespear"}), 2,
                 {"unknown corpus tiny_shakespear", "did you mean tiny_shakespeare?", "wikitext2", "--from"});
    expect_fails(run_program("prepare_text", {"--from", folder.path / "none", "--out", out}), 1,
                 {(folder.path / "none").string(), "no such file"});
    expect_fails(run_program("prepare_text", {"--from", folder.path, "--out", out}), 1, {"is a folder"});
    expect_fails(run_program("prepare_text", {"--from", empty, "--out", out}), 1, {empty, "is empty"});
    expect_fails(run_program("prepare_text", {"--from", "ftp://a/b", "--out", out}), 2, {"ftp://a/b", "http"});
    expect_fails(run_program("prepare_text", {"a/b", "--from", good, "--out", out}), 2, {"a/b", "'/'"});
    expect_fails(run_program("prepare_text", {"--from", good, "--out", folder.path}), 1, {"is a folder"});
    expect_fails(run_program("prepare_text", {"--from", good, "--ouch", out}), 2, {"--ouch"});
    EXPECT_FALSE(std::filesystem::exists(out));

    expect_fails(run_program("prepare_text", {"--from", good, "--out", folder.path / "good/below"}), 1,
                 {(folder.path / "good").string()});

    // A file of the user's own is not replaced unless that is asked for.
    write_file_atomically(out, std::string_view("my own"));
    expect_fails(run_program("prepare_text", {"--from", good, "--out", out}), 2, {out, "--force"});
    EXPECT_EQ(read_file(out), "my own");
    EXPECT_EQ(run_program("prepare_text", {"--from", good, "--out", out, "--force"}).exit_code, 0);
    EXPECT_EQ(read_file(out), "good");
}

std::vector<std::string> bars_of(const std::string& text) {
    std::vector<std::string> bars;
    for (size_t start = 0; start < text.size();) {
        const size_t end = text.find('\n', start) + 1;
        bars.push_back(text.substr(start, end - start));
        start = end;
    }
    return bars;
}

int64_t equal_at_lag(const std::vector<std::string>& bars, int lag) {
    int64_t count = 0;
    for (size_t i = static_cast<size_t>(lag); i < bars.size(); ++i) count += bars[i] == bars[i - lag] ? 1 : 0;
    return count;
}

TEST(MotifCorpus, HasTheDocumentedForm) {
    const std::string text = make_motif_corpus({.bars = 2000, .seed = 5}).text;
    const std::vector<std::string> bars = bars_of(text);
    ASSERT_EQ(bars.size(), 2000u);
    const std::string pitches = "CcDdEFfGgAaB";
    for (const std::string& bar : bars) {
        ASSERT_EQ(bar.size(), static_cast<size_t>(kBarBytes)) << bar;
        ASSERT_NE(pitches.find(bar[0]), std::string::npos) << bar;
        ASSERT_NE(std::string("Mmo").find(bar[1]), std::string::npos) << bar;
        for (size_t step = 0; step < 8; ++step) {
            const std::string event = bar.substr(3 + 3 * step, 2);
            ASSERT_EQ(bar[2 + 3 * step], ' ') << bar;
            if (event == "--" || event == "..") continue;
            ASSERT_NE(pitches.find(event[0]), std::string::npos) << bar;
            ASSERT_TRUE(event[1] >= '3' && event[1] <= '7') << bar;
        }
        // A note is held only where one sounds.
        EXPECT_EQ(bar.find(".. --"), std::string::npos) << bar;
    }
}

TEST(MotifCorpus, StrongNotesBelongToTheChord) {
    const std::string pitches = "CcDdEFfGgAaB";
    for (const std::string& bar : bars_of(make_motif_corpus({.bars = 500, .seed = 6}).text)) {
        const int root = static_cast<int>(pitches.find(bar[0]));
        const int third = bar[1] == 'M' ? 4 : 3, fifth = bar[1] == 'o' ? 6 : 7;
        for (const size_t at : {size_t{3}, size_t{15}}) {
            if (bar[at] == '-' || bar[at] == '.') continue;
            const int above = (static_cast<int>(pitches.find(bar[at])) - root + 12) % 12;
            EXPECT_TRUE(above == 0 || above == third || above == fifth) << bar;
        }
    }
}

TEST(MotifCorpus, BarsReturnAsOftenAsAsked) {
    const MotifOptions options{.bars = 80'000, .seed = 7};
    const MotifCorpus corpus = make_motif_corpus(options);
    const std::array<int64_t, 4> counts = count_returns(corpus.text);
    for (size_t i = 0; i < kReturnLags.size(); ++i) {
        const double expected = options.returns[i] * (1 - options.variation) * static_cast<double>(options.bars);
        // 10,000 phrases: five standard deviations of their number, eight bars each.
        const double phrases = static_cast<double>(options.bars) / kPhraseBars;
        const double deviation = 8 * std::sqrt(phrases * options.returns[i] * (1 - options.returns[i]));
        EXPECT_NEAR(static_cast<double>(corpus.copied[i]), expected, 5 * deviation);
        EXPECT_GE(counts[i], corpus.copied[i]);
    }
}

TEST(MotifCorpus, WithASingleLagEveryPhraseIsTheFirst) {
    const std::vector<std::string> bars = bars_of(
        make_motif_corpus({.bars = 64 * 20, .seed = 8, .returns = {0, 0, 0, 1}, .variation = 0, .modulation = 1}).text);
    for (size_t i = 64; i < bars.size(); ++i) ASSERT_EQ(bars[i], bars[i - 64]) << i;
    EXPECT_LT(equal_at_lag(bars, 32), static_cast<int64_t>(bars.size()) / 20);
}

TEST(MotifCorpus, WithoutReturnsBarsHardlyRepeat) {
    const std::vector<std::string> bars =
        bars_of(make_motif_corpus({.bars = 20'000, .seed = 9, .returns = {0, 0, 0, 0}}).text);
    for (const int lag : kReturnLags) EXPECT_LT(equal_at_lag(bars, lag), 100) << lag;
}

TEST(MotifCorpus, IsAFunctionOfItsOptions) {
    const std::string text = make_motif_corpus({.bars = 1000, .seed = 1}).text;
    EXPECT_TRUE(make_motif_corpus({.bars = 1000, .seed = 1}).text == text);
    EXPECT_NE(make_motif_corpus({.bars = 1000, .seed = 2}).text, text);
    EXPECT_EQ(shuffle_bars(text, 1), shuffle_bars(text, 1));
    EXPECT_NE(shuffle_bars(text, 2), shuffle_bars(text, 1));
    // More bars continue the same stream.
    EXPECT_EQ(make_motif_corpus({.bars = 1800, .seed = 1}).text.substr(0, text.size()), text);
    EXPECT_EQ(make_motif_corpus({.bars = 1, .seed = 1}).text, text.substr(0, kBarBytes));
    EXPECT_EQ(sha256_hex(text), "9c0e73200b56b075f0d4fed1e6e03e0f63da73dc79720c6323a0edf280c8a500");
    EXPECT_EQ(sha256_hex(shuffle_bars(text, 1)), "81257a4f91dca94dcb9eb8a7a7dcfaa5a69e93cbe0252d9b9aaa213589052dab");
}

TEST(MotifCorpus, TheControlHoldsTheSameBarsAndReturnsOnlyByChance) {
    const std::string text = make_motif_corpus({.bars = 20'000, .seed = 3}).text;
    std::vector<std::string> bars = bars_of(text), control = bars_of(shuffle_bars(text, 3));
    // Chance that two places hold the same bar, over all pairs of places.
    std::map<std::string, double> times;
    for (const std::string& bar : bars) times[bar] += 1;
    double pairs = 0;
    for (const auto& [bar, n] : times) pairs += n * (n - 1);
    const auto total = static_cast<double>(bars.size());
    const double chance = pairs / (total * (total - 1));
    for (const int lag : kReturnLags) {
        const double expected = chance * (total - lag);
        EXPECT_NEAR(static_cast<double>(equal_at_lag(control, lag)), expected, 6 * std::sqrt(expected) + 3) << lag;
        EXPECT_GT(static_cast<double>(equal_at_lag(bars, lag)), 50 * expected) << lag;
    }
    EXPECT_NE(bars, control);
    std::sort(bars.begin(), bars.end());
    std::sort(control.begin(), control.end());
    EXPECT_TRUE(bars == control) << "not the same bars";
}

TEST(MakeMotifCorpus, ManifestsCountWhatTheStreamsHold) {
    TemporaryFolder folder;
    const std::string out = folder.path / "m.txt", control = folder.path / "c.txt", alone = folder.path / "s.txt";
    const ProgramResult result =
        run_program("make_motif_corpus", {"--bars", "3000", "--seed", "4", "--out", out, "--control", control,
                                          "--return-64", "0.3", "--variation", "0.05"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    for (const std::string& path : {out, control}) {
        const std::string text = read_file(path);
        const nlohmann::ordered_json manifest = manifest_of(path);
        EXPECT_EQ(manifest["size"], text.size());
        EXPECT_EQ(manifest["sha256"], sha256_hex(text));
        EXPECT_EQ(manifest["order"], path == out ? "composed" : "shuffled");
        EXPECT_EQ(manifest["program"], "make_motif_corpus");
        EXPECT_EQ(manifest["options"]["bars"], 3000);
        EXPECT_EQ(manifest["options"]["seed"], 4);
        EXPECT_EQ(manifest["options"]["return_64"], 0.3);
        EXPECT_EQ(manifest["options"]["variation"], 0.05);
        ASSERT_EQ(manifest["lags"].size(), 4u);
        for (size_t i = 0; i < 4; ++i) {
            EXPECT_EQ(manifest["lags"][i]["bars"], kReturnLags[i]);
            EXPECT_EQ(manifest["lags"][i]["bytes"], kReturnLags[i] * 27);
            EXPECT_EQ(manifest["lags"][i]["returning"], equal_at_lag(bars_of(text), kReturnLags[i]));
        }
        EXPECT_NE(result.out.find(sha256_hex(text)), std::string::npos) << result.out;
    }
    EXPECT_NE(result.out.find("3000 bars, 81000 bytes"), std::string::npos) << result.out;

    const ProgramResult shuffled = run_program(
        "make_motif_corpus",
        {"--bars", "3000", "--seed", "4", "--out", alone, "--shuffle", "--return-64", "0.3", "--variation", "0.05"});
    EXPECT_EQ(shuffled.exit_code, 0) << shuffled.err;
    EXPECT_EQ(read_file(alone), read_file(control));
}

TEST(MakeMotifCorpus, RefusesBadUsage) {
    TemporaryFolder folder;
    const std::string out = folder.path / "m.txt";
    const auto with = [&](std::vector<std::string> arguments) {
        arguments.insert(arguments.end(), {"--out", out});
        return run_program("make_motif_corpus", arguments);
    };
    expect_fails(with({"--bars", "0", "--seed", "1"}), 2, {"--bars: found 0, wanted 1 to 10000000"});
    expect_fails(with({"--bars", "10000001", "--seed", "1"}), 2, {"--bars: found 10000001"});
    expect_fails(with({"--bars", "many", "--seed", "1"}), 2, {"--bars", "many"});
    expect_fails(with({"--bars", "8"}), 2, {"--seed"});
    expect_fails(with({"--bars", "8", "--seed", "-1"}), 2, {"--seed: found -1"});
    expect_fails(with({"--bars", "8", "--seed", "99999999999999999999"}), 2, {"--seed: found 9999"});
    expect_fails(with({"--bars", "8", "--seed", "1", "--variation", "nan"}), 2, {"--variation: found nan"});
    expect_fails(with({"--bars", "8", "--seed", "1", "--return-8", "0.8"}), 2, {"add up to 1.25, wanted at most 1"});
    expect_fails(with({"--bars", "8", "--seed", "1", "--shuffle", "--control", "x"}), 2, {"--shuffle", "--control"});
    expect_fails(with({"--bars", "8", "--seed", "1", "--control", folder.path / "." / "m.txt"}), 2, {"--control"});
    EXPECT_FALSE(std::filesystem::exists(out));
    EXPECT_EQ(with({"--bars", "1", "--seed", "1"}).exit_code, 0);
    EXPECT_EQ(read_file(out).size(), static_cast<size_t>(kBarBytes));
}

}  // namespace
}  // namespace jetlag

#include "src/token_stream.h"

#include <sys/stat.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <vector>

#include "src/error.h"
#include "src/files.h"
#include "test/support.h"

namespace jetlag {
namespace {

static_assert(!std::is_copy_constructible_v<TokenStream> && !std::is_copy_assignable_v<TokenStream>);

void expect_refused(const std::filesystem::path& path, const std::string& reason) {
    try {
        open_token_stream(path);
        ADD_FAILURE() << path << " was opened";
    } catch (const Error& e) {
        const std::string message = e.what();
        EXPECT_NE(message.find(path.string()), std::string::npos) << message;
        EXPECT_NE(message.find(reason), std::string::npos) << message;
    }
}

TEST(TokenStream, TokensAreTheBytes) {
    test::TemporaryFolder folder;
    std::string bytes;
    for (int i = 0; i < 10000; ++i) bytes += static_cast<char>(i * i % 256);
    write_file_atomically(folder.path / "stream", bytes);
    const TokenStream stream = open_token_stream(folder.path / "stream");
    EXPECT_EQ(std::string(stream.tokens.begin(), stream.tokens.end()), bytes);
    EXPECT_EQ(stream.sha256, sha256_hex(bytes));
    EXPECT_EQ(stream.path, folder.path / "stream");
}

TEST(TokenStream, SurvivesMovesAndReplacementOfItsFile) {
    test::TemporaryFolder folder;
    write_file_atomically(folder.path / "a", "first");
    write_file_atomically(folder.path / "b", "second");
    TokenStream moved = open_token_stream(folder.path / "a");
    {
        TokenStream other = open_token_stream(folder.path / "b");
        moved = std::move(other);
    }
    TokenStream last(std::move(moved));
    EXPECT_TRUE(moved.tokens.empty());
    write_file_atomically(folder.path / "b", "other");
    EXPECT_EQ(std::string(last.tokens.begin(), last.tokens.end()), "second");
    EXPECT_EQ(last.sha256, sha256_hex("second"));
    EXPECT_EQ(last.path, folder.path / "b");
}

TEST(TokenStream, RefusesWhatIsNoStream) {
    test::TemporaryFolder folder;
    expect_refused(folder.path / "missing", "No such file or directory");
    expect_refused(folder.path, "is a folder");
    write_file_atomically(folder.path / "empty", "");
    expect_refused(folder.path / "empty", "is empty");
    expect_refused("/dev/zero", "is a device or a pipe");
    ASSERT_EQ(mkfifo((folder.path / "pipe").c_str(), 0600), 0);
    expect_refused(folder.path / "pipe", "is a device or a pipe");
    EXPECT_THROW(open_token_stream(""), Error);
}

TEST(TokenStream, SplitsAtTheFractionUnlessAPartIsTooSmall) {
    const std::vector<uint8_t> tokens(100000);
    const auto parts_of = [&](size_t size, double fraction) {
        const std::span<const uint8_t> all = std::span(tokens).first(size);
        const CorpusParts parts = split_corpus(all, fraction);
        EXPECT_EQ(parts.train.data(), all.data());
        EXPECT_EQ(parts.eval.data(), all.data() + parts.train.size());
        return std::pair(parts.train.size(), parts.eval.size());
    };
    using Sizes = std::pair<size_t, size_t>;
    EXPECT_EQ(parts_of(100000, 0.9), Sizes(90000, 10000));
    EXPECT_EQ(parts_of(99999, 0.9), Sizes(89999, 10000));
    EXPECT_EQ(parts_of(5120, 0.9), Sizes(4608, 512));
    EXPECT_EQ(parts_of(5111, 0.9), Sizes(4599, 512));
    EXPECT_EQ(parts_of(5110, 0.9), Sizes(2555, 2555));  // would leave 511
    EXPECT_EQ(parts_of(5101, 0.9), Sizes(2550, 2551));
    EXPECT_EQ(parts_of(5120, 0.1), Sizes(512, 4608));
    EXPECT_EQ(parts_of(5119, 0.1), Sizes(2559, 2560));
    EXPECT_EQ(parts_of(4000, 1), Sizes(2000, 2000));
    EXPECT_EQ(parts_of(4000, 0), Sizes(2000, 2000));
    EXPECT_EQ(parts_of(1, 0.9), Sizes(0, 1));
    EXPECT_EQ(parts_of(0, 0.9), Sizes(0, 0));
    for (const double bad : {-0.1, 1.1, std::nan("")}) {
        try {
            split_corpus(tokens, bad);
            ADD_FAILURE() << "fraction " << bad << " was taken";
        } catch (const Error& e) {
            EXPECT_EQ(e.exit_code, kExitUsage);
        }
    }
}

TEST(TokenStream, SplitsTheCorpusOfTheStudyAsPublished) {
    NEEDS_SHARED();
    const auto golden = nlohmann::json::parse(read_file(test::shared_folder() / "golden" / "torch_rng.json"));
    for (const auto& [name, run] : golden.at("training_runs").items()) {
        const size_t train = run.at("train_bytes"), eval = run.at("eval_bytes");
        const std::vector<uint8_t> tokens(train + eval);
        const CorpusParts parts = split_corpus(tokens, 0.9);
        EXPECT_EQ(parts.train.size(), train) << name;
        EXPECT_EQ(parts.eval.size(), eval) << name;
    }
}

}  // namespace
}  // namespace jetlag

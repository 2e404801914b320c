// A token stream: the bytes of a file, memory-mapped, one token a byte. Its manifest (STREAM.json, written by the
// data_prep programs) says where the bytes came from; a stream without a manifest is as good.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace jetlag {

struct TokenStream {
    std::filesystem::path path;
    std::span<const uint8_t> tokens;  // memory-mapped, read-only
    std::string sha256;               // of the whole stream

    TokenStream() = default;
    TokenStream(TokenStream&& other) noexcept;
    TokenStream& operator=(TokenStream&& other) noexcept;
    ~TokenStream();
};

// Errors name the path: missing, a folder, a device, unreadable, empty. The file must not shrink while it is mapped.
TokenStream open_token_stream(const std::filesystem::path& path);

inline constexpr size_t kSmallestPart = 512;  // tokens

struct CorpusParts {
    std::span<const uint8_t> train;  // the first floor(train_fraction * N) tokens
    std::span<const uint8_t> eval;   // the rest; if either part is then under kSmallestPart, the first is floor(N / 2)
    bool is_halved = false;
};
// Errors (exit code 2): a fraction outside 0 to 1.
CorpusParts split_corpus(std::span<const uint8_t> tokens, double train_fraction);

}  // namespace jetlag

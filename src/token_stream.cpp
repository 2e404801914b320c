#include "src/token_stream.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "src/error.h"
#include "src/files.h"

namespace jetlag {

TokenStream::TokenStream(TokenStream&& other) noexcept
    : path(std::move(other.path)), tokens(std::exchange(other.tokens, {})), sha256(std::move(other.sha256)) {}

TokenStream& TokenStream::operator=(TokenStream&& other) noexcept {
    std::swap(path, other.path);
    std::swap(tokens, other.tokens);
    std::swap(sha256, other.sha256);
    return *this;
}

TokenStream::~TokenStream() {
    if (!tokens.empty()) munmap(const_cast<uint8_t*>(tokens.data()), tokens.size());
}

TokenStream open_token_stream(const std::filesystem::path& path) {
    const std::string file = path.empty() ? "\"\"" : path.string();
    // Not blocking: a pipe that nobody writes to must be refused, not waited for.
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail("cannot open token stream {}: {}", file, std::strerror(errno));

    struct stat status = {};
    int fault = fstat(fd, &status) == 0 ? 0 : errno;
    const bool is_file = S_ISREG(status.st_mode);
    const size_t size = static_cast<size_t>(status.st_size);
    void* map = MAP_FAILED;
    if (fault == 0 && is_file && size > 0) {
        map = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) fault = errno;
    }
    close(fd);
    if (fault != 0) fail("cannot read token stream {}: {}", file, std::strerror(fault));
    if (S_ISDIR(status.st_mode)) fail("token stream {} is a folder, wanted a file", file);
    if (!is_file) fail("token stream {} is a device or a pipe, wanted a file", file);
    if (size == 0) fail("token stream {} is empty", file);

    TokenStream stream;
    stream.path = path;
    stream.tokens = {static_cast<const uint8_t*>(map), size};
    stream.sha256 = sha256_hex(std::as_bytes(stream.tokens));
    return stream;
}

CorpusParts split_corpus(std::span<const uint8_t> tokens, double train_fraction) {
    if (!(train_fraction >= 0 && train_fraction <= 1))
        fail_usage("train fraction {}, wanted a number from 0 to 1", train_fraction);
    size_t cut = static_cast<size_t>(std::floor(train_fraction * static_cast<double>(tokens.size())));
    const bool is_halved = std::min(cut, tokens.size() - cut) < kSmallestPart;
    if (is_halved) cut = tokens.size() / 2;
    return {tokens.first(cut), tokens.subspan(cut), is_halved};
}

}  // namespace jetlag

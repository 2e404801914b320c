#include "models/windows.h"

#include "src/error.h"

namespace jetlag {

std::vector<int64_t> draw_windows(TorchGenerator& generator, int64_t tokens, int64_t T, int64_t count) {
    std::vector<int64_t> starts(static_cast<size_t>(count));
    fill_randint(generator, 0, tokens - T - 1, starts);
    return starts;
}

int64_t tokens_to_draw_from(int64_t T) {
    return T + 2;
}

int64_t disjoint_windows(int64_t tokens, int64_t T) {
    return (tokens - 1) / T;
}

Batch make_batch(std::span<const uint8_t> part, std::span<const int64_t> starts, int64_t T) {
    Batch batch;
    batch.tokens.reserve(starts.size() * static_cast<size_t>(T));
    batch.targets.reserve(starts.size() * static_cast<size_t>(T));
    for (int64_t start : starts) {
        const auto begin = part.begin() + start;
        batch.tokens.insert(batch.tokens.end(), begin, begin + T);
        batch.targets.insert(batch.targets.end(), begin + 1, begin + T + 1);
    }
    return batch;
}

TokenStream open_corpus(const std::string& where, const std::string& corpus) {
    try {
        return open_token_stream(corpus);
    } catch (const Error& e) {
        fail_usage("{}: data.corpus: {}", where, e.what());
    }
}

void check_fits(const std::string& where, const std::string& key, int64_t T, int64_t tokens, int64_t needed,
                const std::string& part_name) {
    if (tokens < needed)
        fail_usage("{}: {}: windows of {} tokens do not fit the {} of {} tokens (wanted at least {})", where, key, T,
                   part_name, tokens, needed);
}

}  // namespace jetlag

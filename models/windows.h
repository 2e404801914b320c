// Windows of a token stream: T inputs and the T tokens that follow each of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/random.h"
#include "src/token_stream.h"

namespace jetlag {

// Streams of make_indexed_generator, so that no two uses of a seed draw the same windows.
enum WindowStream : uint64_t { kTrainWindows = 1, kInitialEvalWindows = 2, kHeldOutWindows = 3, kEvalWindows = 4 };

// `count` uniform starts in [0, tokens - T - 1), as torch.randint(0, tokens - T - 1, (count,)) draws them.
std::vector<int64_t> draw_windows(TorchGenerator& generator, int64_t tokens, int64_t T, int64_t count);

// The fewest tokens from which a window of T can be drawn: T + 2.
int64_t tokens_to_draw_from(int64_t T);

// How many windows of T tokens a part holds without overlap.
int64_t disjoint_windows(int64_t tokens, int64_t T);

struct Batch {
    std::vector<int32_t> tokens, targets;  // (B, T)
};
Batch make_batch(std::span<const uint8_t> part, std::span<const int64_t> starts, int64_t T);

// Opens data.corpus; `where` says where the key was set. Errors (exit code 2) name both, the path, and what is wrong.
TokenStream open_corpus(const std::string& where, const std::string& corpus);

// Exit code 2 if a part of `tokens` tokens is too short for windows of T, which need `needed`: `key` names the length,
// `part_name` the part.
void check_fits(const std::string& where, const std::string& key, int64_t T, int64_t tokens, int64_t needed,
                const std::string& part_name);

}  // namespace jetlag

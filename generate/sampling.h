// Drawing the next token from logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace jetlag {

struct Sampling {
    double temperature = 1;  // logits are divided by it; 0: the likeliest token
    int64_t top_k = 0;       // only so many of the likeliest tokens; 0: all
    double top_p = 1;        // of those, the fewest of the likeliest whose probabilities reach this sum
};

struct Candidate {
    int32_t token;
    double probability;
};

// The tokens that may be drawn, the likeliest first, equally likely ones by rising token; their probabilities sum to 1.
// logits: (V), finite.
std::vector<Candidate> sampling_candidates(std::span<const float> logits, const Sampling& sampling);

// The candidate in whose share of [0, 1) u lies.
int32_t pick_candidate(std::span<const Candidate> candidates, double u);

// A number in [0, 1) of 53 random bits, from two draws of the engine: the same on every machine.
double draw_uniform(std::mt19937& engine);

}  // namespace jetlag

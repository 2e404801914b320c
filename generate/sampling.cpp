#include "generate/sampling.h"

#include <algorithm>
#include <cmath>

namespace jetlag {

// Divides by the sum.
static void normalize(std::vector<Candidate>& candidates) {
    double sum = 0;
    for (const Candidate& candidate : candidates) sum += candidate.probability;
    for (Candidate& candidate : candidates) candidate.probability /= sum;
}

std::vector<Candidate> sampling_candidates(std::span<const float> logits, const Sampling& sampling) {
    std::vector<Candidate> candidates;
    for (size_t token = 0; token < logits.size(); token++)
        candidates.push_back({static_cast<int32_t>(token), logits[token]});
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
        return a.probability != b.probability ? a.probability > b.probability : a.token < b.token;
    });
    const size_t kept = sampling.temperature == 0 ? 1 : static_cast<size_t>(sampling.top_k);
    if (kept > 0 && kept < candidates.size()) candidates.resize(kept);

    const double largest = candidates[0].probability;
    for (Candidate& candidate : candidates) {
        const double below = candidate.probability - largest;
        // Also at temperature 0, and where the division overflows.
        candidate.probability = below == 0 ? 1 : std::exp(below / sampling.temperature);
    }
    normalize(candidates);
    if (sampling.top_p == 1) return candidates;
    double sum = 0;
    size_t count = 0;
    while (count < candidates.size() && sum < sampling.top_p) sum += candidates[count++].probability;
    candidates.resize(count);
    normalize(candidates);
    return candidates;
}

int32_t pick_candidate(std::span<const Candidate> candidates, double u) {
    double sum = 0;
    int32_t last = candidates[0].token;
    for (const Candidate& candidate : candidates) {
        sum += candidate.probability;
        if (u < sum) return candidate.token;
        if (candidate.probability > 0) last = candidate.token;
    }
    return last;  // the sum was rounded to less than 1
}

double draw_uniform(std::mt19937& engine) {
    const uint64_t high = engine() >> 5, low = engine() >> 6;
    return static_cast<double>(high << 26 | low) * 0x1p-53;
}

}  // namespace jetlag

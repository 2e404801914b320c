#include "data_prep/motif.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "src/error.h"

namespace jetlag {

namespace {

constexpr int kSteps = 8;

// The distributions of the standard library differ between implementations; these do not.
struct Draws {
    std::mt19937_64 generator;
    explicit Draws(uint64_t seed) : generator(seed) {}
    uint64_t below(uint64_t n) {  // n < 2^32
        return ((generator() >> 32) * n) >> 32;
    }
    double uniform() {  // in [0, 1)
        return static_cast<double>(generator() >> 11) * 0x1p-53;
    }
    bool chance(double probability) { return uniform() < probability; }
};

struct Key {
    int tonic;  // pitch class, 0 = C
    bool minor;
};

// What a bar is composed over; kept for every bar, so that a varied bar can take over the frame of another.
struct Frame {
    Key key;
    uint8_t degree;  // of the chord, 0 = tonic
    bool cadence;
    std::array<uint8_t, 2> rhythms;  // of the phrase
};

constexpr std::string_view kPitchNames = "CcDdEFfGgAaB";
constexpr int kMajorScale[7] = {0, 2, 4, 5, 7, 9, 11};
constexpr int kMinorScale[7] = {0, 2, 3, 5, 7, 8, 10};

// Chord degrees of the eight bars of a phrase.
constexpr uint8_t kProgressions[][kPhraseBars] = {
    {0, 3, 4, 0, 0, 3, 4, 0}, {0, 5, 3, 4, 0, 5, 4, 0}, {0, 4, 5, 3, 0, 3, 4, 0}, {5, 3, 0, 4, 5, 3, 4, 0},
    {0, 0, 3, 3, 4, 3, 4, 0}, {0, 2, 3, 4, 5, 1, 4, 0}, {0, 3, 6, 2, 5, 1, 4, 0}, {0, 1, 4, 0, 5, 1, 4, 0},
};

// One bit for each step, the first step highest: 1 where a note begins.
constexpr uint8_t kRhythms[] = {
    0b10101010, 0b11101110, 0b10111011, 0b11111010, 0b10101111, 0b10110110, 0b11011010,
    0b11101011, 0b10111110, 0b11111111, 0b10111010, 0b11111110, 0b11010111, 0b10101110,
};
constexpr uint8_t kCadenceRhythms[] = {0b10101000, 0b11101000, 0b10111000, 0b11111000};

// Melodies move on scale degrees counted from the tonic in octave 4; about two octaves.
constexpr int kLowestDegree = -2;
constexpr int kHighestDegree = 12;
constexpr int kMoves[] = {-4, -3, -2, -2, -1, -1, 0, 1, 1, 2, 2, 3, 4};
constexpr double kRestChance = 0.08;

// Semitones from the tonic of octave 4 for a scale degree of any octave.
int semitones(const Key& key, int degree) {
    const int octave = (degree + 70) / 7 - 10;
    const int* scale = key.minor ? kMinorScale : kMajorScale;
    return 12 * octave + scale[degree - 7 * octave];
}

// The degree of the triad on `chord_degree` nearest to `degree`; of two at the same distance the lower one.
int nearest_chord_degree(int degree, int chord_degree) {
    for (int distance = 0;; ++distance)
        for (const int candidate : {degree - distance, degree + distance}) {
            const int above_root = (candidate - chord_degree + 70) % 7;
            if (above_root == 0 || above_root == 2 || above_root == 4) return candidate;
        }
}

Key neighbour_key(const Key& key, Draws& draws) {
    switch (draws.below(3)) {
        case 0:
            return {(key.tonic + 7) % 12, key.minor};
        case 1:
            return {(key.tonic + 5) % 12, key.minor};
        default:  // the relative key
            return key.minor ? Key{(key.tonic + 3) % 12, false} : Key{(key.tonic + 9) % 12, true};
    }
}

void append_chord(const Frame& frame, std::string& text) {
    const int root = semitones(frame.key, frame.degree);
    const int third = semitones(frame.key, frame.degree + 2) - root;
    const int fifth = semitones(frame.key, frame.degree + 4) - root;
    text += kPitchNames[static_cast<size_t>((frame.key.tonic + root) % 12)];
    text += third == 4 ? 'M' : (fifth == 6 ? 'o' : 'm');
}

void append_note(const Key& key, int degree, std::string& text) {
    const int pitch = 12 * 4 + key.tonic + semitones(key, degree);
    text += kPitchNames[static_cast<size_t>(pitch % 12)];
    text += static_cast<char>('0' + pitch / 12);
}

// Appends a bar. `degree` is where the melody stands; it moves.
void append_fresh_bar(const Frame& frame, int& degree, Draws& draws, std::string& text) {
    const uint8_t rhythm = frame.cadence ? kCadenceRhythms[draws.below(std::size(kCadenceRhythms))]
                                         : frame.rhythms[draws.below(std::size(frame.rhythms))];
    int last_step = kSteps - 1;
    while ((rhythm >> (kSteps - 1 - last_step) & 1) == 0) --last_step;

    append_chord(frame, text);
    bool sounding = false;
    for (int step = 0; step < kSteps; ++step) {
        text += ' ';
        const bool begins = (rhythm >> (kSteps - 1 - step) & 1) != 0;
        if (!begins) {
            text += sounding ? "--" : "..";
            continue;
        }
        sounding = !draws.chance(kRestChance) || (frame.cadence && step == last_step);
        if (!sounding) {
            text += "..";
            continue;
        }
        degree = std::clamp(degree + kMoves[draws.below(std::size(kMoves))], kLowestDegree, kHighestDegree);
        const bool strong = step % 4 == 0;
        if (strong || (frame.cadence && step == last_step)) degree = nearest_chord_degree(degree, frame.degree);
        append_note(frame.key, degree, text);
    }
    text += '\n';
}

std::string_view bar_at(std::string_view text, int64_t bar) {
    return text.substr(static_cast<size_t>(bar) * kBarBytes, kBarBytes);
}

void check_options(const MotifOptions& options) {
    if (options.bars < 1 || options.bars > kMaxBars)
        fail_usage("--bars: found {}, wanted 1 to {}", options.bars, kMaxBars);
    const auto check_probability = [](const std::string& name, double value) {
        if (!(value >= 0 && value <= 1)) fail_usage("--{}: found {}, wanted a probability from 0 to 1", name, value);
    };
    double sum = 0;
    for (size_t i = 0; i < kReturnLags.size(); ++i) {
        check_probability(fmt::format("return-{}", kReturnLags[i]), options.returns[i]);
        sum += options.returns[i];
    }
    // Decimal fractions that add up to 1 may exceed it by rounding.
    if (sum > 1 + 1e-12) fail_usage("--return-8, -16, -32, -64: add up to {}, wanted at most 1", sum);
    check_probability("variation", options.variation);
    check_probability("modulation", options.modulation);
}

}  // namespace

MotifCorpus make_motif_corpus(const MotifOptions& options) {
    check_options(options);
    Draws draws(options.seed);
    MotifCorpus corpus;
    // Room for all bars at once: `text` is appended from itself.
    corpus.text.reserve(static_cast<size_t>(options.bars) * kBarBytes);
    std::vector<Frame> frames;
    frames.reserve(static_cast<size_t>(options.bars));

    Key key{static_cast<int>(draws.below(12)), draws.chance(0.5)};
    int degree = 4;
    for (int64_t first = 0; first < options.bars; first += kPhraseBars) {
        const int64_t end = std::min(first + kPhraseBars, options.bars);
        // Which return, if any: one draw, laid on the row of probabilities.
        double position = draws.uniform();
        size_t which = 0;
        while (which < kReturnLags.size() && position >= options.returns[which]) position -= options.returns[which++];

        if (which < kReturnLags.size() && kReturnLags[which] <= first) {
            const int lag = kReturnLags[which];
            for (int64_t bar = first; bar < end; ++bar) {
                const Frame frame = frames[static_cast<size_t>(bar - lag)];
                frames.push_back(frame);
                if (draws.chance(options.variation)) {
                    append_fresh_bar(frame, degree, draws, corpus.text);
                } else {
                    corpus.text.append(bar_at(corpus.text, bar - lag));
                    ++corpus.copied[which];
                }
            }
            continue;
        }

        if (draws.chance(options.modulation)) key = neighbour_key(key, draws);
        const uint8_t* progression = kProgressions[draws.below(std::size(kProgressions))];
        const uint8_t rhythm_a = kRhythms[draws.below(std::size(kRhythms))];
        const uint8_t rhythm_b = kRhythms[draws.below(std::size(kRhythms))];
        for (int64_t bar = first; bar < end; ++bar) {
            const int64_t place = bar - first;
            const Frame frame{key, progression[place], place == kPhraseBars - 1, {rhythm_a, rhythm_b}};
            frames.push_back(frame);
            append_fresh_bar(frame, degree, draws, corpus.text);
        }
    }
    return corpus;
}

std::string shuffle_bars(std::string_view text, uint64_t seed) {
    // Another sequence than the one that composed the corpus of the same seed.
    Draws draws(seed ^ 0x9e3779b97f4a7c15u);
    std::vector<uint32_t> order(text.size() / kBarBytes);
    std::iota(order.begin(), order.end(), 0u);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draws.below(i)]);
    std::string shuffled;
    shuffled.reserve(text.size());
    for (const uint32_t bar : order) shuffled.append(bar_at(text, bar));
    return shuffled;
}

std::array<int64_t, 4> count_returns(std::string_view text) {
    const auto bars = static_cast<int64_t>(text.size() / kBarBytes);
    std::array<int64_t, 4> counts{};
    for (size_t i = 0; i < kReturnLags.size(); ++i)
        for (int64_t bar = kReturnLags[i]; bar < bars; ++bar)
            counts[i] += bar_at(text, bar) == bar_at(text, bar - kReturnLags[i]) ? 1 : 0;
    return counts;
}

}  // namespace jetlag

// Motif corpora: music-like event text in which bars return exactly, byte for byte, after 8, 16, 32 and 64 bars.
//
// A bar is one line of exactly kBarBytes = 27 bytes: a chord, a space, eight steps (eighth notes) of two characters
// with spaces between, a line break:
//
//     CM C5 -- E5 G5 -- -- A5 ..
//
// A step is a note (pitch class and octave), "--" (the note before is held) or ".." (a rest). Pitch classes are
// C c D d E F f G g A a B; a small letter is the sharp of the capital. A chord is the pitch class of its root and M
// (major), m (minor) or o (diminished). As all bars have the same length, a return after n bars is a return after
// 27 n bytes: 216, 432, 864 and 1728.
//
// Bars come in phrases of eight. A phrase is fresh, or returns: then each of its bars is an exact copy of the bar 8,
// 16, 32 or 64 bars earlier (one lag for the phrase), except that with probability `variation` a bar keeps only the
// chord of that bar and gets a new melody. A fresh phrase has a key (which may move to a neighbour on the circle of
// fifths or to the relative key), a progression of eight chords and two rhythms; its melodies are walks on the scale
// that meet a chord note on the strong steps; its last bar is a cadence. No bar says where it stands.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

inline constexpr int kBarBytes = 27;
inline constexpr int kPhraseBars = 8;
inline constexpr std::array<int, 4> kReturnLags = {8, 16, 32, 64};  // in bars
inline constexpr int64_t kMaxBars = 10'000'000;

struct MotifOptions {
    int64_t bars = 0;  // 1 to kMaxBars
    uint64_t seed = 0;
    // The probability that a phrase returns after kReturnLags[i] bars; it is fresh with what is left to 1, and where
    // the stream is still shorter than the lag. So a bar is a copy with probability returns[i] * (1 - variation).
    std::array<double, 4> returns = {0.25, 0.20, 0.15, 0.10};
    double variation = 0.10;   // that a bar of a returning phrase gets a new melody
    double modulation = 0.40;  // that a fresh phrase changes the key
};

struct MotifCorpus {
    std::string text;                 // (bars, kBarBytes)
    std::array<int64_t, 4> copied{};  // bars made as copies, by lag
};

// The corpus is a function of the options alone, the same on every platform: raw draws of std::mt19937_64, reduced to
// integers here. Errors (usage): bars outside 1..kMaxBars, a probability outside [0, 1], returns that add up to more
// than 1; the message names the option of make_motif_corpus.
MotifCorpus make_motif_corpus(const MotifOptions& options);

// The same bars in a random order (a function of text and seed): the control, in which a return is a coincidence.
std::string shuffle_bars(std::string_view text, uint64_t seed);

// For each of kReturnLags the number of bars equal to the bar that many bars earlier: copies, copies of copies, and
// coincidences.
std::array<int64_t, 4> count_returns(std::string_view text);

}  // namespace jetlag

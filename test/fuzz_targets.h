// What the fuzzers check of one input, for libFuzzer (test/fuzz/) and for the tests, which run kept inputs.
#pragma once

#include <cstdint>
#include <span>

namespace jetlag::test {

// Any bytes as a MIDI file, in both modes: it is refused with an error, or it is read, takes no more memory than it
// may, comes back from being written, plays, and makes tokens that come back from both formats. Aborts where that is
// not so.
void fuzz_midi_reader(std::span<const uint8_t> bytes);

// Any bytes as a token stream, whose format the first byte chooses: they make a MIDI file that can be read again, or an
// error. Aborts where that is not so.
void fuzz_stream_to_midi(std::span<const uint8_t> bytes);

}  // namespace jetlag::test

#include "test/fuzz_targets.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "data_prep/midi_tokens.h"
#include "src/error.h"
#include "src/midi.h"

namespace jetlag::test {

static void check(bool is_so, const char* what) {
    if (is_so) return;
    fmt::print(stderr, "not so: {}\n", what);
    std::abort();
}

static bool same_events(const std::vector<StreamEvent>& a, const std::vector<StreamEvent>& b, bool velocity_bins) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); i++) {
        const bool in_bin = velocity_bins && a[i].kind == StreamEventKind::note_on;
        if (a[i].delta != b[i].delta || a[i].kind != b[i].kind || a[i].channel != b[i].channel ||
            a[i].number != b[i].number || (in_bin ? a[i].value / 4 != b[i].value / 4 : a[i].value != b[i].value))
            return false;
    }
    return true;
}

static void read_in_mode(std::span<const uint8_t> bytes, MidiMode mode) {
    MidiFile file;
    std::string written;
    try {
        file = read_midi(bytes, "a", mode);
        size_t track_bytes = 0;
        for (const MidiTrack& track : file.tracks) track_bytes += track.bytes.size();
        check(track_bytes <= bytes.size() * 3 / 2 + 8 * file.tracks.size(), "tracks take 1.5 times the file");
        written = write_midi(file, "a");
    } catch (const Error&) {
        return;
    }
    const MidiFile again = read_midi({reinterpret_cast<const uint8_t*>(written.data()), written.size()}, "b", mode);
    check(again.tracks.size() == file.tracks.size(), "as many tracks come back");
    for (size_t i = 0; i < file.tracks.size(); i++)
        check(again.tracks[i].bytes == file.tracks[i].bytes, "the events come back");
    check(again.seconds == file.seconds, "the time comes back");
    if (file.format == 2) return;

    TokenOptions options;
    options.controls = options.programs = true;
    TokenCounts counts;
    const std::vector<StreamEvent> events = stream_events(file, "a", options, counts);
    check(counts.events == std::ssize(events), "events are counted");
    for (const TokenFormat format : {TokenFormat::text, TokenFormat::binary}) {
        const DecodedStream decoded = decode_stream(encode_piece("PIECE=0000|", events, format), format);
        check(decoded.dropped == 0 && decoded.pieces.size() == 1, "no token is dropped");
        check(same_events(decoded.pieces[0].events, events, format == TokenFormat::binary), "tokens come back");
    }
}

void fuzz_midi_reader(std::span<const uint8_t> bytes) {
    read_in_mode(bytes, MidiMode::strict);
    read_in_mode(bytes, MidiMode::lenient);
}

void fuzz_stream_to_midi(std::span<const uint8_t> bytes) {
    if (bytes.empty()) return;
    const TokenFormat format = bytes[0] % 2 == 0 ? TokenFormat::text : TokenFormat::binary;
    const std::string_view stream(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
    const TokenOptions options = stream_options("", stream);
    const DecodedStream decoded = decode_stream(stream, format);
    const size_t events = static_cast<size_t>(event_count(decoded));
    check(events + static_cast<size_t>(decoded.dropped) <= stream.size(), "there are no more events than bytes");
    try {
        const std::string midi = write_midi(pieces_to_midi(decoded.pieces, options.grid_ms, "a"), "a");
        TokenOptions all;
        all.controls = all.programs = true;
        all.max_events = INT64_MAX;
        TokenCounts counts;
        stream_events(read_midi({reinterpret_cast<const uint8_t*>(midi.data()), midi.size()}, "b", MidiMode::strict),
                      "b", all, counts);
        check(counts.events >= static_cast<int64_t>(events), "every event is in the file");
    } catch (const Error& error) {
        const std::string what = error.what();
        check(what.find("limit") != what.npos || what.find("cannot be written") != what.npos ||
                  what.find("longer than") != what.npos,
              "only what is too long is refused");
    }
}

}  // namespace jetlag::test

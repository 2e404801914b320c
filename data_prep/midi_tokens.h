// MIDI as token streams, and back: the study's text of events, and a vocabulary of one byte a token.
//
// Text. A piece is a line: a header of fields that end in '|', the first PIECE=NNNN, then its events with a blank
// between two. Lines that begin with '#' hold no events.
//     dDDD.onPPP.vVVV.cC    note on: pitch, velocity, channel      dDDD.ccNNN.vVVV.cC    control change: control, value
//     dDDD.offPPP.cC        note off                               dDDD.pgNNN.cC         program change
// DDD is the time since the event before, in steps of the grid; numbers have three digits (DDD up to six), the channel
// one or two.
//
// Binary. One byte is one token:
//       0 .. 127  a number: what the token before it wants
//     128 .. 159  note on, velocity 4 (t - 128) to 4 (t - 128) + 3, read back as 4 (t - 128) + 2; a pitch follows
//     160         note off; a pitch follows
//     161         control change; the control and its value follow
//     162         program change; the program follows
//     163         a piece starts, in channel 0
//     164 .. 179  channel t - 164, for all events from here on
//     180 .. 210  time passes: 1 to 31 steps
//     211 .. 242  time passes: 32, 64, ... 1024 steps
//     243 .. 255  none
// An event is its time (nothing, or the largest tokens first), its channel where that changes, and its own tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "src/midi.h"

namespace jetlag {

enum class TokenFormat { text, binary };

// Limits of the options, so that a delta is at most six digits and can be written to a MIDI file.
inline constexpr double kSmallestGrid = 0.1, kLargestGrid = 10000;  // milliseconds
inline constexpr int64_t kLargestDelta = 999999;

struct TokenOptions {
    TokenFormat format = TokenFormat::text;
    double grid_ms = 20;
    int64_t max_delta = 999;  // steps
    int64_t max_events = 20000;
    bool controls = false;
    bool programs = false;
};

enum class StreamEventKind : uint8_t { note_on, note_off, control, program };

struct StreamEvent {
    int64_t delta = 0;  // steps of the grid since the event before
    StreamEventKind kind = StreamEventKind::note_on;
    uint8_t channel = 0;
    uint8_t number = 0;  // pitch, control or program
    uint8_t value = 0;   // velocity (of note on) or the control's value
};

struct TokenCounts {
    int64_t events = 0, note_on = 0, note_off = 0, control = 0, program = 0;
    int64_t skipped_messages = 0;  // that are not written; where a piece is cut, those before the cut
};

// The events of a file on the grid. Each message's own time since the message before is rounded to the grid by itself,
// half to even; the rounded times add up until an event is written, which takes the sum, at most max_delta. Stops at
// max_events. Adds to `counts`. Errors: format 2, naming the file by `name`.
std::vector<StreamEvent> stream_events(const MidiFile& file, const std::string& name, const TokenOptions& options,
                                       TokenCounts& counts);

// The value of an option --grid-ms. Errors (exit code 2): no number, or one out of range.
double parse_grid(const std::string& text);

// A text for a field of a header: every run of characters outside A-Za-z0-9_ .,+:/()- becomes one '_', then every run
// of blanks one '_'; at most 80 characters; "NA" where it is empty.
std::string header_field(std::string_view text);

// The line that opens a text stream; it holds the options, and ends with its newline.
std::string stream_header(const TokenOptions& options);

// The options that a stream was made with: from its manifest; else from its own header line; what neither says is
// guessed (the format) or the default. `stream` may be any part from its beginning on.
TokenOptions stream_options(const std::filesystem::path& path, std::string_view stream);

// A piece in either format. `header` ("PIECE=0000|...|") is for the text; the binary format has none.
std::string encode_piece(const std::string& header, const std::vector<StreamEvent>& events, TokenFormat format);

struct StreamPiece {
    std::string header;  // "" if the stream began inside the piece, and in the binary format
    std::vector<StreamEvent> events;
};
struct DecodedStream {
    std::vector<StreamPiece> pieces;
    int64_t dropped = 0;        // text: words; binary: tokens that made no event
    std::string first_dropped;  // in words, with its offset; "" if there is none
};
// Reads a stream. What is malformed, as in a model's output or at a cut, is dropped and counted.
DecodedStream decode_stream(std::string_view stream, TokenFormat format);

// The events of all pieces.
int64_t event_count(const DecodedStream& decoded);

// The pieces as a file of format 0, one after the other, each opened by a marker with its header; a tick is a step of
// the grid. Notes that still sound at the end of a piece are ended there, and pedals (controls 64 to 69) lifted.
// Errors: a stream that is longer than kMaxMidiTick.
MidiFile pieces_to_midi(const std::vector<StreamPiece>& pieces, double grid_ms, const std::string& name);

}  // namespace jetlag

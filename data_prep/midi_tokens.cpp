#include "data_prep/midi_tokens.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <charconv>
#include <cmath>

#include "src/command_line.h"
#include "src/error.h"
#include "src/manifest.h"

namespace jetlag {

// ---------------------------------------------------------------------------------------------------------------
// From MIDI

// Whether the event goes into the stream; fills everything but its delta.
static bool select_event(const MidiEvent& event, const TokenOptions& options, StreamEvent& out) {
    const uint8_t kind = event.status & 0xf0;
    if (kind == 0xf0 || event.data.empty()) return false;
    out.channel = event.status & 0x0f;
    out.number = event.data[0];
    out.value = 0;
    if (kind == 0x80 || (kind == 0x90 && event.data[1] == 0)) {
        out.kind = StreamEventKind::note_off;
        return true;
    }
    if (kind == 0xc0) {
        out.kind = StreamEventKind::program;
        return options.programs;
    }
    if (kind != 0x90 && kind != 0xb0) return false;
    out.value = event.data[1];
    out.kind = kind == 0x90 ? StreamEventKind::note_on : StreamEventKind::control;
    return kind == 0x90 || options.controls;
}

std::vector<StreamEvent> stream_events(const MidiFile& file, const std::string& name, const TokenOptions& options,
                                       TokenCounts& counts) {
    std::vector<StreamEvent> events;
    MidiPlayback playback = begin_playback(file, name);
    MidiMoment moment;
    int64_t steps = 0;
    while (std::ssize(events) < options.max_events && next_moment(playback, moment)) {
        // nearbyint rounds half to even.
        steps += static_cast<int64_t>(std::nearbyint(moment.delta * 1000 / options.grid_ms));
        StreamEvent event;
        if (!select_event(moment.event, options, event)) {
            counts.skipped_messages++;
            continue;
        }
        event.delta = std::min(steps, options.max_delta);
        steps = 0;
        events.push_back(event);
        counts.events++;
        switch (event.kind) {
            case StreamEventKind::note_on:
                counts.note_on++;
                break;
            case StreamEventKind::note_off:
                counts.note_off++;
                break;
            case StreamEventKind::control:
                counts.control++;
                break;
            case StreamEventKind::program:
                counts.program++;
                break;
        }
    }
    return events;
}

// ---------------------------------------------------------------------------------------------------------------
// Encoding

double parse_grid(const std::string& text) {
    static const std::string wanted = fmt::format("milliseconds from {} to {}", kSmallestGrid, kLargestGrid);
    return parse_real(
        "--grid-ms", text, [](double ms) { return ms >= kSmallestGrid && ms <= kLargestGrid; }, wanted.c_str());
}

std::string header_field(std::string_view text) {
    constexpr std::string_view kKept = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_ .,+:/()-";
    std::string kept;
    bool in_run = false;
    for (char c : text) {
        const bool is_kept = kKept.find(c) != std::string_view::npos;
        if (is_kept)
            kept += c;
        else if (!in_run)
            kept += '_';
        in_run = !is_kept;
    }
    std::string field;
    for (size_t i = 0; i < kept.size(); i++)
        if (kept[i] != ' ')
            field += kept[i];
        else if (i == 0 || kept[i - 1] != ' ')
            field += '_';
    if (field.size() > 80) field.resize(80);
    return field.empty() ? "NA" : field;
}

std::string stream_header(const TokenOptions& options) {
    return fmt::format("# jetlag MIDI events; grid_ms={}; max_delta={}; controls={:d}; programs={:d}\n",
                       options.grid_ms, options.max_delta, options.controls, options.programs);
}

TokenOptions stream_options(const std::filesystem::path& path, std::string_view stream) {
    TokenOptions options;
    // What the stream looks like: the format in which it has more events.
    const std::string_view beginning = stream.substr(0, 1 << 16);
    options.format = event_count(decode_stream(beginning, TokenFormat::binary)) >
                             event_count(decode_stream(beginning, options.format))
                         ? TokenFormat::binary
                         : options.format;
    // A number that manifest or header line gives under this name.
    nlohmann::ordered_json given = nlohmann::ordered_json::object();
    if (const auto manifest = path.empty() ? std::nullopt : read_manifest(path);
        manifest && manifest->contains("options") && manifest->at("options").is_object()) {
        given = manifest->at("options");
        const auto format = given.find("format");
        if (format != given.end()) options.format = *format == "binary" ? TokenFormat::binary : TokenFormat::text;
    }
    const std::string_view line = stream.starts_with('#') ? stream.substr(0, stream.find('\n')) : "";
    const auto number = [&](const std::string& json_name, const std::string& line_name, double otherwise, double least,
                            double most) {
        double value = otherwise;
        const size_t at = line.find(" " + line_name + "=");
        if (at != std::string_view::npos)
            std::from_chars(line.data() + at + line_name.size() + 2, line.data() + line.size(), value);
        if (const auto found = given.find(json_name); found != given.end()) {
            if (found->is_number()) value = found->get<double>();
            if (found->is_boolean()) value = found->get<bool>() ? 1 : 0;
        }
        return value >= least && value <= most ? value : otherwise;
    };
    options.grid_ms = number("grid_ms", "grid_ms", options.grid_ms, kSmallestGrid, kLargestGrid);
    options.max_delta = static_cast<int64_t>(
        number("max_delta", "max_delta", static_cast<double>(options.max_delta), 1, kLargestDelta));
    options.controls = number("include_controls", "controls", 0, 0, 1) != 0;
    options.programs = number("include_programs", "programs", 0, 0, 1) != 0;
    return options;
}

static void append_text(std::string& out, const StreamEvent& event) {
    const auto to = std::back_inserter(out);
    fmt::format_to(to, "d{:03}.", event.delta);
    switch (event.kind) {
        case StreamEventKind::note_on:
            fmt::format_to(to, "on{:03}.v{:03}", event.number, event.value);
            break;
        case StreamEventKind::note_off:
            fmt::format_to(to, "off{:03}", event.number);
            break;
        case StreamEventKind::control:
            fmt::format_to(to, "cc{:03}.v{:03}", event.number, event.value);
            break;
        case StreamEventKind::program:
            fmt::format_to(to, "pg{:03}", event.number);
            break;
    }
    fmt::format_to(to, ".c{}", event.channel);
}

namespace {

// The vocabulary of the binary format: the first token of each kind.
enum Token : int {
    kVelocityToken = 128,
    kNoteOffToken = 160,
    kControlToken = 161,
    kProgramToken = 162,
    kPieceToken = 163,
    kChannelToken = 164,
    kShortTimeToken = 180,  // + steps - 1
    kLongTimeToken = 211,   // + steps / 32 - 1
    kTokenCount = 243,
};
constexpr int64_t kLongStep = 32, kLongestTime = 1024;

}  // namespace

static void append_binary(std::string& out, const StreamEvent& event, int& channel) {
    const auto put = [&](int64_t token) { out += static_cast<char>(token); };
    int64_t delta = event.delta;
    for (; delta >= kLongestTime; delta -= kLongestTime) put(kLongTimeToken + kLongestTime / kLongStep - 1);
    if (delta >= kLongStep) put(kLongTimeToken + delta / kLongStep - 1);
    if (delta % kLongStep > 0) put(kShortTimeToken + delta % kLongStep - 1);
    if (event.channel != channel) put(kChannelToken + event.channel);
    channel = event.channel;
    switch (event.kind) {
        case StreamEventKind::note_on:
            put(kVelocityToken + event.value / 4);
            break;
        case StreamEventKind::note_off:
            put(kNoteOffToken);
            break;
        case StreamEventKind::control:
            put(kControlToken);
            break;
        case StreamEventKind::program:
            put(kProgramToken);
            break;
    }
    put(event.number);
    if (event.kind == StreamEventKind::control) put(event.value);
}

std::string encode_piece(const std::string& header, const std::vector<StreamEvent>& events, TokenFormat format) {
    std::string out;
    if (format == TokenFormat::binary) {
        out += static_cast<char>(kPieceToken);
        int channel = 0;
        for (const StreamEvent& event : events) append_binary(out, event, channel);
        return out;
    }
    out = header;
    for (size_t i = 0; i < events.size(); i++) {
        if (i > 0) out += ' ';
        append_text(out, events[i]);
    }
    out += '\n';
    return out;
}

// ---------------------------------------------------------------------------------------------------------------
// Decoding

// Takes `prefix` and a number of `digits` digits, or of three to six if digits is 0, off the front of the text.
static bool take(std::string_view& text, std::string_view prefix, int digits, int64_t most, int64_t& value) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    const size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
    if (digits == 0 ? end < 3 || end > 6 : end != static_cast<size_t>(digits)) return false;
    std::from_chars(text.data(), text.data() + end, value);
    text.remove_prefix(end);
    return value <= most;
}

// An event from its text form; false if the text is anything else.
static bool parse_event(std::string_view text, StreamEvent& event) {
    int64_t delta = 0, number = 0, value = 0, channel = 0;
    if (!take(text, "d", 0, INT64_MAX, delta)) return false;
    if (take(text, ".on", 3, 127, number)) {
        event.kind = StreamEventKind::note_on;
        if (!take(text, ".v", 3, 127, value) || value == 0) return false;
    } else if (take(text, ".off", 3, 127, number)) {
        event.kind = StreamEventKind::note_off;
    } else if (take(text, ".cc", 3, 127, number)) {
        event.kind = StreamEventKind::control;
        if (!take(text, ".v", 3, 127, value)) return false;
    } else if (take(text, ".pg", 3, 127, number)) {
        event.kind = StreamEventKind::program;
    } else {
        return false;
    }
    const int digits = text.size() == 3 ? 1 : 2;
    if (!take(text, ".c", digits, 15, channel) || !text.empty() || (digits == 2 && channel < 10)) return false;
    event.delta = delta;
    event.number = static_cast<uint8_t>(number);
    event.value = static_cast<uint8_t>(value);
    event.channel = static_cast<uint8_t>(channel);
    return true;
}

static void drop(DecodedStream& decoded, size_t offset, std::string_view what) {
    if (decoded.dropped++ > 0) return;
    std::string shown;
    for (char c : what.substr(0, 40)) {
        const uint8_t byte = static_cast<uint8_t>(c);
        shown += byte >= 0x20 && byte < 0x7f ? std::string(1, c) : fmt::format("<{:02x}>", byte);
    }
    decoded.first_dropped = fmt::format("\"{}\" at byte {}", shown, offset);
}

static DecodedStream decode_text(std::string_view stream) {
    DecodedStream decoded;
    constexpr std::string_view kBlanks = " \t\r\n";
    size_t at = 0;
    while (true) {
        const bool is_line_start = at == 0 || stream[at - 1] == '\n';
        if (is_line_start && at < stream.size() && stream[at] == '#') {
            const size_t end = std::min(stream.find('\n', at), stream.size());
            at = std::min(end + 1, stream.size());
            continue;
        }
        if (at >= stream.size()) break;
        if (kBlanks.find(stream[at]) != std::string_view::npos) {
            at++;
            continue;
        }
        const size_t end = std::min(stream.find_first_of(kBlanks, at), stream.size());
        std::string_view word = stream.substr(at, end - at);
        if (word.starts_with("PIECE=") && word.find('|') != std::string_view::npos) {
            const size_t events = word.rfind('|') + 1;
            decoded.pieces.push_back({std::string(word.substr(0, events)), {}});
            word.remove_prefix(events);
        }
        StreamEvent event;
        if (parse_event(word, event)) {
            if (decoded.pieces.empty()) decoded.pieces.emplace_back();
            decoded.pieces.back().events.push_back(event);
        } else if (!word.empty()) {
            drop(decoded, end - word.size(), word);
        }
        at = end;
    }
    return decoded;
}

static DecodedStream decode_binary(std::string_view stream) {
    DecodedStream decoded;
    int64_t delta = 0;
    uint8_t channel = 0;
    size_t at = 0;
    const auto token = [&](size_t i) { return i < stream.size() ? static_cast<uint8_t>(stream[i]) : int{kTokenCount}; };
    while (at < stream.size()) {
        const int t = token(at);
        if (t == kPieceToken) {
            decoded.pieces.emplace_back();
            channel = 0;
            delta = 0;
            at++;
        } else if (t >= kChannelToken && t < kShortTimeToken) {
            channel = static_cast<uint8_t>(t - kChannelToken);
            at++;
        } else if (t >= kShortTimeToken && t < kTokenCount) {
            delta += t < kLongTimeToken ? t - kShortTimeToken + 1 : (t - kLongTimeToken + 1) * kLongStep;
            delta = std::min(delta, kLargestDelta);  // nobody wrote more; a model may
            at++;
        } else if (t >= kVelocityToken && t <= kProgramToken) {
            const size_t numbers = t == kControlToken ? 2 : 1;
            if (token(at + 1) > 127 || token(at + numbers) > 127) {
                drop(decoded, at, stream.substr(at, 1));
                at++;
                continue;
            }
            StreamEvent event;
            event.delta = delta;
            event.channel = channel;
            event.number = static_cast<uint8_t>(token(at + 1));
            if (t < kNoteOffToken) {
                event.kind = StreamEventKind::note_on;
                event.value = static_cast<uint8_t>(4 * (t - kVelocityToken) + 2);
            } else if (t == kNoteOffToken) {
                event.kind = StreamEventKind::note_off;
            } else if (t == kControlToken) {
                event.kind = StreamEventKind::control;
                event.value = static_cast<uint8_t>(token(at + 2));
            } else {
                event.kind = StreamEventKind::program;
            }
            if (decoded.pieces.empty()) decoded.pieces.emplace_back();
            decoded.pieces.back().events.push_back(event);
            delta = 0;
            at += 1 + numbers;
        } else {  // a number that nothing asked for, or no token at all
            drop(decoded, at, stream.substr(at, 1));
            at++;
        }
    }
    return decoded;
}

DecodedStream decode_stream(std::string_view stream, TokenFormat format) {
    return format == TokenFormat::text ? decode_text(stream) : decode_binary(stream);
}

int64_t event_count(const DecodedStream& decoded) {
    int64_t count = 0;
    for (const StreamPiece& piece : decoded.pieces) count += std::ssize(piece.events);
    return count;
}

// ---------------------------------------------------------------------------------------------------------------
// Back to MIDI

MidiFile pieces_to_midi(const std::vector<StreamPiece>& pieces, double grid_ms, const std::string& name) {
    // A quarter note is about half a second, and a whole number of steps: then a tick can be one step.
    const double steps = std::clamp(std::round(500 / grid_ms), 1.0, 32767.0);
    const double tempo = std::clamp(std::round(steps * grid_ms * 1000), 1.0, 16777215.0);
    const uint32_t microseconds = static_cast<uint32_t>(tempo);
    MidiFile file;
    file.format = 0;
    file.ticks_per_quarter = static_cast<int>(steps);
    MidiTrack& track = file.tracks.emplace_back();
    const std::array<uint8_t, 3> tempo_bytes = {static_cast<uint8_t>(microseconds >> 16),
                                                static_cast<uint8_t>(microseconds >> 8),
                                                static_cast<uint8_t>(microseconds)};
    append_midi_event(track, 0, kMetaStatus, tempo_bytes, kMetaSetTempo);

    int64_t tick = 0;
    for (const StreamPiece& piece : pieces) {
        const std::span<const uint8_t> header(reinterpret_cast<const uint8_t*>(piece.header.data()),
                                              piece.header.size());
        if (!header.empty()) append_midi_event(track, tick, kMetaStatus, header, kMetaMarker);
        std::bitset<16 * 128> sounding, pressed;
        for (const StreamEvent& event : piece.events) {
            tick += event.delta;
            if (tick > kMaxMidiTick) fail("{}: is longer than {} steps", name, kMaxMidiTick);
            const size_t key = event.channel * size_t{128} + event.number;
            static constexpr uint8_t kStatus[] = {0x90, 0x80, 0xb0, 0xc0};  // in the order of StreamEventKind
            const uint8_t data[2] = {event.number, event.value};
            const size_t length = event.kind == StreamEventKind::program ? 1 : 2;
            append_midi_event(track, tick, kStatus[static_cast<size_t>(event.kind)] | event.channel,
                              std::span(data, length));
            if (event.kind == StreamEventKind::note_on) sounding.set(key);
            if (event.kind == StreamEventKind::note_off) sounding.reset(key);
            if (event.kind == StreamEventKind::control && event.number >= 64 && event.number <= 69)
                pressed.set(key, event.value > 0);
        }
        if (sounding.none() && pressed.none()) continue;
        for (size_t key = 0; key < sounding.size(); key++) {
            const uint8_t data[2] = {static_cast<uint8_t>(key % 128), 0};
            const uint8_t channel = static_cast<uint8_t>(key / 128);
            if (sounding[key]) append_midi_event(track, tick, 0x80 | channel, data);
            if (pressed[key]) append_midi_event(track, tick, 0xb0 | channel, data);
        }
    }
    append_midi_event(track, tick, kMetaStatus, {}, kMetaEndOfTrack);
    return file;
}

}  // namespace jetlag

#include "src/midi.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "src/error.h"

namespace jetlag {

const char* midi_repair_name(MidiRepair repair) {
    static constexpr const char* names[kMidiRepairs] = {
        "data bytes over 127 clamped",
        "running status across other events",
        "chunk lengths too long",
        "chunk lengths too short",
        "missing Ends of Track",
        "files ending inside an event",
        "foreign chunks passed over",
        "wrong track counts",
        "malformed meta events",
        "real-time bytes dropped",
        "undefined status bytes dropped",
        "data bytes without a status dropped",
        "runs of bytes between chunks passed over",
        "zeros after End of Track passed over",
        "unknown formats read as 1",
    };
    return names[repair];
}

// ---------------------------------------------------------------------------------------------------------------
// Events in their encoded form

static void append_number(std::vector<uint8_t>& bytes, uint64_t value) {
    int shift = 63;
    while (shift > 0 && (value >> shift) == 0) shift -= 7;
    for (; shift > 0; shift -= 7) bytes.push_back(static_cast<uint8_t>(0x80 | ((value >> shift) & 0x7f)));
    bytes.push_back(static_cast<uint8_t>(value & 0x7f));
}

static uint64_t take_number(const uint8_t*& at) {
    uint64_t value = 0;
    while (*at >= 0x80) value = value << 7 | (*at++ & 0x7f);
    return value << 7 | *at++;
}

// Data bytes after a status byte; -1: a length stands before them (system exclusive, meta); -2: no such status.
static int data_length(uint8_t status) {
    if (status >= 0xc0 && status <= 0xdf) return 1;
    if (status >= 0x80 && status < 0xf0) return 2;
    switch (status) {
        case 0xf0:
        case 0xf7:
        case 0xff:
            return -1;
        case 0xf1:
        case 0xf3:
            return 1;
        case 0xf2:
            return 2;
        case 0xf6:
        case 0xf8:
        case 0xfa:
        case 0xfb:
        case 0xfc:
        case 0xfe:
            return 0;
        default:  // 0xf4, 0xf5, 0xf9, 0xfd
            return -2;
    }
}

void append_midi_event(MidiTrack& track, int64_t tick, uint8_t status, std::span<const uint8_t> data, uint8_t type) {
    append_number(track.bytes, static_cast<uint64_t>(tick - track.last_tick));
    track.bytes.push_back(status);
    if (status == kMetaStatus) track.bytes.push_back(type);
    if (data_length(status) == -1) append_number(track.bytes, data.size());
    track.bytes.insert(track.bytes.end(), data.begin(), data.end());
    track.last_tick = tick;
}

MidiCursor begin_track(const MidiTrack& track) {
    return {track.bytes.data(), track.bytes.data() + track.bytes.size(), 0};
}

bool next_event(MidiCursor& cursor, MidiEvent& event) {
    if (cursor.at == cursor.end) return false;
    cursor.tick += static_cast<int64_t>(take_number(cursor.at));
    event.tick = cursor.tick;
    event.status = *cursor.at++;
    event.type = event.status == kMetaStatus ? *cursor.at++ : 0;
    const int fixed = data_length(event.status);
    const size_t size = fixed >= 0 ? static_cast<size_t>(fixed) : take_number(cursor.at);
    event.data = {cursor.at, size};
    cursor.at += size;
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// Reading

namespace {

struct EndsEarly {};  // thrown where the file ends inside something

struct Reader {
    std::span<const uint8_t> bytes;
    size_t at = 0;
    MidiMode mode;
    const std::string& name;
    std::array<int64_t, kMidiRepairs>& repairs;
    size_t limit = bytes.size();  // events end here: the end of the file, or of a chunk that can be trusted
    bool is_trial = false;        // trying how a doubtful byte is best read

    bool is_strict() const { return mode == MidiMode::strict; }
    size_t left() const { return limit - at; }
    bool starts_with(size_t offset, const char* text) const {
        return offset + 4 <= bytes.size() && std::memcmp(bytes.data() + offset, text, 4) == 0;
    }
};

template <typename... Args>
[[noreturn]] void refuse(const Reader& r, size_t offset, fmt::format_string<Args...> format, Args&&... args) {
    fail("{}: byte {}: {}", r.name, offset, fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void refuse_end(const Reader& r) {
    refuse(r, r.bytes.size(), "the file ends early");
}

uint8_t read_byte(Reader& r) {
    if (r.left() == 0) throw EndsEarly{};
    return r.bytes[r.at++];
}

uint32_t read_number(Reader& r) {
    const size_t begin = r.at;
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const uint8_t byte = read_byte(r);
        value = value << 7 | (byte & 0x7f);
        if (byte < 0x80) return value;
    }
    if (r.left() == 0) throw EndsEarly{};
    refuse(r, begin, "a number of variable length has more than 4 bytes");
}

uint32_t big_endian(const uint8_t* p, int bytes) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | p[i];
    return value;
}
uint32_t little_endian(const uint8_t* p) {
    return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
}

// What is wrong with a meta event by the rules of the study's reader; "" if nothing.
std::string meta_fault(uint8_t type, std::span<const uint8_t> data) {
    const auto needs = [&](size_t size) {
        return data.size() < size ? fmt::format("has {} bytes, wanted {}", data.size(), size) : std::string();
    };
    std::string fault;
    switch (type) {
        case 0x00:  // sequence number; empty stands for a number of its own
            return data.empty() ? "" : needs(2);
        case 0x20:  // channel prefix
            return needs(1);
        case kMetaSetTempo:
            return needs(3);
        case 0x54:  // SMPTE offset: hours, minutes, seconds, frames, hundredths of a frame
            fault = needs(5);
            if (fault.empty() && (data[1] > 59 || data[2] > 59 || data[4] > 99))
                fault = fmt::format("has {} minutes, {} seconds and {}/100 frames, wanted at most 59, 59 and 99",
                                    data[1], data[2], data[4]);
            return fault;
        case 0x58:  // time signature
            fault = needs(4);
            // The study's reader wants log(2^n) / log(2) to be whole, which by rounding it is not for all n.
            if (fault.empty()) {
                const double exponent = std::log(std::ldexp(1.0, data[1])) / std::log(2.0);
                if (exponent != std::trunc(exponent))
                    fault = fmt::format("has the denominator 2^{}, which the study's reader refuses", data[1]);
            }
            return fault;
        case 0x59: {  // key signature: sharps (negative: flats), mode
            fault = needs(2);
            if (!fault.empty()) return fault;
            const int sharps = static_cast<int8_t>(data[0]);
            if (sharps < -7 || sharps > 7 || data[1] > 1)
                fault = fmt::format("has {} sharps and mode {}, wanted -7 to 7 and 0 or 1", sharps, data[1]);
            return fault;
        }
        default:
            return "";
    }
}

// The length that a meta event has by the specification; -1: any.
int meta_length(uint8_t type) {
    switch (type) {
        case 0x00:
            return 2;
        case 0x20:
        case 0x21:
            return 1;
        case kMetaEndOfTrack:
            return 0;
        case kMetaSetTempo:
            return 3;
        case 0x54:
            return 5;
        case 0x58:
            return 4;
        case 0x59:
            return 2;
        default:
            return -1;
    }
}

// What runs on from event to event within a track.
struct TrackState {
    uint8_t running_status = 0;   // 0: none yet
    bool is_interrupted = false;  // by an event that ends running status
    int64_t tick = 0;
    bool has_ended = false;  // an End of Track came
};

// The bytes of a meta or system-exclusive event, after its length. Nothing is copied before the length is known to be
// there.
std::span<const uint8_t> read_payload(Reader& r) {
    // mido's MAX_MESSAGE_LENGTH.
    constexpr uint32_t kLongest = 1000000;
    const size_t begin = r.at;
    const uint32_t length = read_number(r);
    if (r.is_strict() && length > kLongest)
        refuse(r, begin, "an event of {} bytes, longer than the {} that the study's reader takes", length, kLongest);
    if (length > r.left()) throw EndsEarly{};
    const std::span<const uint8_t> payload = r.bytes.subspan(r.at, length);
    r.at += length;
    return payload;
}

void read_meta(Reader& r, MidiTrack& track, TrackState& state, size_t begin) {
    const uint8_t type = read_byte(r);
    const std::span<const uint8_t> payload = read_payload(r);
    const std::string fault = meta_fault(type, payload);
    if (r.is_strict() && !fault.empty()) refuse(r, begin, "meta event 0x{:02x} {}", type, fault);
    const int length = meta_length(type);
    // A sequence number and a port may be empty: many files have them so.
    const bool is_known_form = length < 0 || payload.size() == static_cast<size_t>(length) ||
                               (payload.empty() && (type == 0x00 || type == 0x21));
    if (!r.is_strict() && (!fault.empty() || !is_known_form)) r.repairs[kMetaWrong]++;
    append_midi_event(track, state.tick, kMetaStatus, payload, type);
    if (type == kMetaEndOfTrack) state.has_ended = true;
}

void read_sysex(Reader& r, MidiTrack& track, TrackState& state, uint8_t status) {
    const std::span<const uint8_t> payload = read_payload(r);
    const size_t offset = r.at - payload.size();
    // The study's reader takes a 0xf0 at the start and a 0xf7 at the end for marks, after any 0xf0 or 0xf7, and wants
    // data bytes between them.
    size_t first = 0, last = payload.size();
    if (last > 0 && payload[0] == 0xf0) first = 1;
    if (last > first && payload[last - 1] == 0xf7) last--;
    const auto is_high = [](uint8_t byte) { return byte > 127; };
    const auto high = std::find_if(payload.begin() + first, payload.begin() + last, is_high);
    if (high == payload.begin() + last) {
        append_midi_event(track, state.tick, status, payload);
        return;
    }
    if (r.is_strict())
        refuse(r, offset + (high - payload.begin()), "a data byte over 127 (0x{:02x}) in a system-exclusive event",
               *high);
    // A continuation (0xf7) may carry any bytes.
    append_midi_event(track, state.tick, status, payload);
    if (status == 0xf7) return;
    const auto copy = track.bytes.end() - static_cast<int64_t>(payload.size());
    for (auto byte = copy + first; byte != copy + last; ++byte)
        if (is_high(*byte)) {
            *byte = 127;
            r.repairs[kDataByteClamped]++;
        }
}

bool is_real_time(uint8_t byte) {
    return byte >= 0xf8 && byte != 0xff;
}

void read_event(Reader& r, MidiTrack& track, TrackState& state);

// How many of the events from `at` on come out wrong, of the next few, if the event before them ends there.
int64_t faults_from(const Reader& r, const TrackState& state, size_t at) {
    if (at > r.limit) return INT64_MAX;
    std::array<int64_t, kMidiRepairs> repairs = {};
    Reader trial{r.bytes, at, r.mode, r.name, repairs, r.limit, true};
    TrackState trial_state = state;
    MidiTrack scratch;
    try {
        for (int event = 0; event < 16 && trial.left() > 0 && !trial_state.has_ended; event++)
            read_event(trial, scratch, trial_state);
    } catch (const EndsEarly&) {
        return INT64_MAX;
    } catch (const Error&) {
        return INT64_MAX;
    }
    // Where there is one real-time byte there are others: they do not count. A track without its end does.
    const int64_t faults = std::accumulate(repairs.begin(), repairs.end(), int64_t{0}) - repairs[kRealTimeByte];
    return faults + (trial.left() == 0 && !trial_state.has_ended ? 1 : 0);
}

// Whether the byte at r.at - 1, which has the value of a real-time status, is one among the data bytes of an event, of
// which `missing` are still to come: then one more byte follows than if it were a data byte itself. What follows tells.
bool is_inserted(const Reader& r, const TrackState& state, size_t missing) {
    if (r.is_trial) return false;
    return faults_from(r, state, r.at + missing) < faults_from(r, state, r.at + missing - 1);
}

// The data bytes of a channel or system-common event.
void read_message(Reader& r, MidiTrack& track, TrackState& state, uint8_t status, std::span<const uint8_t> already) {
    const size_t length = static_cast<size_t>(data_length(status));
    std::array<uint8_t, 2> data = {};
    std::array<size_t, 2> offsets = {r.at - already.size(), 0};
    size_t count = 0;
    for (uint8_t byte : already) data[count++] = byte;
    // A status that runs on without data bytes of its own.
    if (count > length) refuse(r, r.at - 1, "a data byte after status 0x{:02x}, which has none", status);
    while (count < length) {
        const size_t offset = r.at;
        const uint8_t byte = read_byte(r);
        if (!r.is_strict() && is_real_time(byte) && data_length(byte) == 0 && is_inserted(r, state, length - count)) {
            r.repairs[kRealTimeByte]++;
            continue;
        }
        offsets[count] = offset;
        data[count++] = byte;
    }
    for (size_t i = 0; i < length; i++) {
        if (data[i] <= 127) continue;
        if (r.is_strict())
            refuse(r, offsets[i], "a data byte over 127 (0x{:02x}) in an event with status 0x{:02x}", data[i], status);
        data[i] = 127;
        r.repairs[kDataByteClamped]++;
    }
    append_midi_event(track, state.tick, status, std::span(data).first(length));
}

void read_event(Reader& r, MidiTrack& track, TrackState& state) {
    state.tick += read_number(r);
    if (state.tick > kMaxMidiTick) refuse(r, r.at, "tick {} is past the limit of {}", state.tick, kMaxMidiTick);
    const size_t begin = r.at;
    uint8_t status = read_byte(r);
    std::span<const uint8_t> already;  // data bytes that were read: with running status the first
    if (status < 0x80) {
        already = r.bytes.subspan(begin, 1);
        status = state.running_status;
        if (status == 0) {
            if (r.is_strict()) refuse(r, begin, "a data byte (0x{:02x}) where a status byte should be", already[0]);
            r.repairs[kDataWithoutStatus]++;
            return;
        }
        if (!r.is_strict() && state.is_interrupted) r.repairs[kRunningStatusKept]++;
        state.is_interrupted = false;
    } else if (r.is_strict()) {
        // In the study's reader every status but 0xff runs on, and an event that runs on from a system-exclusive one is
        // such an event, whose first byte is lost.
        if (status != kMetaStatus) state.running_status = status;
    } else if (status < 0xf0) {
        state.running_status = status;
        state.is_interrupted = false;
    } else {
        if (is_real_time(status)) {
            r.repairs[kRealTimeByte]++;
            return;
        }
        state.is_interrupted = true;
        if (data_length(status) == -2) {
            r.repairs[kUndefinedStatus]++;
            return;
        }
    }
    if (status == kMetaStatus)
        read_meta(r, track, state, begin);
    else if (status == 0xf0 || status == 0xf7)
        read_sysex(r, track, state, status);
    else if (data_length(status) == -2)
        refuse(r, begin, "undefined status byte 0x{:02x}", status);
    else
        read_message(r, track, state, status, already);
}

// Whether a chunk with another name than MTrk starts here: a printable name and a length after which there is a track,
// another such name or the end.
bool is_foreign_chunk(const Reader& r, size_t offset) {
    const auto has_name = [&](size_t at) {
        return at + 8 <= r.bytes.size() && std::all_of(r.bytes.begin() + at, r.bytes.begin() + at + 4,
                                                       [](uint8_t c) { return c >= 0x20 && c < 0x7f; });
    };
    if (!has_name(offset) || r.starts_with(offset, "MTrk")) return false;
    const size_t end = offset + 8 + big_endian(r.bytes.data() + offset + 4, 4);
    return end == r.bytes.size() || has_name(end);
}

// A track as the study's reader reads it: until the events fill the chunk to the byte. One that crosses the chunk's end
// reads on, and fails in what follows or at the end of the file.
void read_track_strictly(Reader& r, MidiTrack& track) {
    if (r.left() < 8) refuse_end(r);
    if (!r.starts_with(r.at, "MTrk")) refuse(r, r.at, "no MTrk header where a track should start");
    const size_t end = r.at + 8 + big_endian(r.bytes.data() + r.at + 4, 4);
    r.at += 8;
    TrackState state;
    while (r.at != end) read_event(r, track, state);
}

bool is_zero(const Reader& r, size_t begin, size_t end) {
    return std::all_of(r.bytes.begin() + begin, r.bytes.begin() + end, [](uint8_t byte) { return byte == 0; });
}

// Where the next "MTrk" stands, from `offset` on; the end of the file if there is none.
size_t find_track(const Reader& r, size_t offset) {
    constexpr std::string_view kTrack = "MTrk";
    return static_cast<size_t>(std::search(r.bytes.begin() + offset, r.bytes.end(), kTrack.begin(), kTrack.end()) -
                               r.bytes.begin());
}

// The chunk's length can be trusted if another chunk or the end of the file follows it: then no event may cross its
// end. If not, the track goes on to its End of Track, or to the next "MTrk".
void read_track_leniently(Reader& r, MidiTrack& track) {
    const size_t begin = r.at + 8;
    size_t end = begin + big_endian(r.bytes.data() + r.at + 4, 4);
    const bool is_trusted = end == r.bytes.size() || r.starts_with(end, "MTrk") || is_foreign_chunk(r, end);
    if (end > r.bytes.size()) {
        r.repairs[kChunkTooLong]++;
        end = r.bytes.size();
    }
    if (is_trusted) r.limit = end;
    r.at = begin;
    TrackState state;
    bool is_past_end = false;
    size_t event = r.at;
    try {
        while (r.left() > 0 && !(r.at >= end && state.has_ended)) {
            if (!is_trusted && r.starts_with(r.at, "MTrk")) {
                if (r.at < end && end < r.bytes.size()) r.repairs[kChunkTooLong]++;
                break;
            }
            if (r.at >= end && is_foreign_chunk(r, r.at)) break;
            if (state.has_ended && r.starts_with(r.at, "MTrk")) {
                r.repairs[kChunkTooLong]++;
                break;
            }
            if (r.at >= end) is_past_end = true;
            const bool had_ended = state.has_ended;
            event = r.at;
            read_event(r, track, state);
            if (r.at > end) is_past_end = true;
            if (state.has_ended && !had_ended && r.at < end && is_zero(r, r.at, end)) {
                r.repairs[kBytesAfterEndOfTrack]++;
                r.at = end;
            }
        }
    } catch (const EndsEarly&) {
        r.repairs[kEndsInsideEvent]++;
        r.at = is_trusted ? end : find_track(r, event);
    }
    r.limit = r.bytes.size();
    if (is_past_end) r.repairs[kChunkTooShort]++;
    if (!state.has_ended) r.repairs[kEndOfTrackMissing]++;
}

// Closes a track that does not end with an End of Track.
void close_track(MidiTrack& track) {
    MidiEvent event;
    bool is_closed = false;
    for (MidiCursor c = begin_track(track); next_event(c, event);)
        is_closed = event.status == kMetaStatus && event.type == kMetaEndOfTrack;
    if (!is_closed) append_midi_event(track, track.last_tick, kMetaStatus, {}, kMetaEndOfTrack);
    track.bytes.shrink_to_fit();
}

void read_tracks_leniently(Reader& r, MidiFile& file, size_t declared) {
    while (r.left() > 0) {
        if (r.left() >= 8 && r.starts_with(r.at, "MTrk")) {
            if (file.tracks.size() == 65535) refuse(r, r.at, "more than 65535 tracks");
            file.tracks.emplace_back();
            const std::array<int64_t, kMidiRepairs> before = r.repairs;
            try {
                read_track_leniently(r, file.tracks.back());
            } catch (const Error&) {
                // What comes after the declared tracks may be anything.
                if (file.tracks.size() <= declared) throw;
                file.tracks.pop_back();
                r.repairs = before;
                r.repairs[kBytesBetweenChunks]++;
                break;
            }
            close_track(file.tracks.back());
        } else if (is_foreign_chunk(r, r.at)) {
            r.repairs[kForeignChunk]++;
            r.at += 8 + big_endian(r.bytes.data() + r.at + 4, 4);
        } else {
            r.repairs[kBytesBetweenChunks]++;
            r.at = find_track(r, r.at + 1);
        }
    }
    if (file.tracks.size() != declared) r.repairs[kTrackCountWrong]++;
}

// Where a RIFF file holds the Standard MIDI File: its "data" chunk.
void enter_riff(Reader& r) {
    if (r.bytes.size() < 12 || !r.starts_with(8, "RMID")) refuse(r, 8, "a RIFF file of another kind than RMID");
    size_t at = 12;
    while (at + 8 <= r.bytes.size()) {
        const size_t size = little_endian(r.bytes.data() + at + 4);
        if (r.starts_with(at, "data")) {
            if (at + 8 + size > r.bytes.size()) r.repairs[kChunkTooLong]++;
            r.at = at + 8;
            r.bytes = r.bytes.first(std::min(r.bytes.size(), r.at + size));
            r.limit = r.bytes.size();
            return;
        }
        at += 8 + size + size % 2;
    }
    refuse(r, r.bytes.size(), "a RIFF file without a data chunk");
}

}  // namespace

MidiFile read_midi(std::span<const uint8_t> bytes, const std::string& name, MidiMode mode) {
    MidiFile file;
    Reader r{bytes, 0, mode, name, file.repairs};
    if (!r.is_strict() && r.starts_with(0, "RIFF")) enter_riff(r);
    const size_t begin = r.at;
    if (r.left() < 8) refuse(r, r.bytes.size(), "the file ends early, inside the header");
    if (!r.starts_with(begin, "MThd")) refuse(r, begin, "no MThd header: not a Standard MIDI File");
    const size_t size = big_endian(r.bytes.data() + begin + 4, 4);
    if (size < 6) refuse(r, begin + 4, "a header of {} bytes, wanted at least 6", size);
    if (r.left() < 14) refuse(r, r.bytes.size(), "the file ends early, inside the header");
    const uint8_t* header = r.bytes.data() + begin + 8;
    const int format = static_cast<int>(big_endian(header, 2));
    const size_t declared = big_endian(header + 2, 2);
    const int division = static_cast<int16_t>(big_endian(header + 4, 2));
    r.at = std::min(r.bytes.size(), begin + 8 + size);
    if (!r.is_strict() && size > 6 && !r.starts_with(r.at, "MTrk") && r.starts_with(begin + 14, "MTrk")) {
        r.repairs[kChunkTooLong]++;
        r.at = begin + 14;
    }
    file.format = format;
    if (format > 2 && !r.is_strict()) {
        r.repairs[kUnknownFormat]++;
        file.format = 1;
    }
    if (division > 0) {
        file.ticks_per_quarter = division;
    } else {
        file.frames_per_second = -(division >> 8);
        file.ticks_per_frame = division & 0xff;
    }
    if (file.ticks_per_quarter == 0 && file.frames_per_second == 0)
        refuse(r, begin + 12, "zero ticks per quarter note");
    if (file.ticks_per_quarter == 0 && file.ticks_per_frame == 0) refuse(r, begin + 12, "zero ticks per frame");

    if (r.is_strict()) {
        // The study's reader takes the number of tracks for a signed one.
        const int count = std::max<int>(0, static_cast<int16_t>(declared));
        try {
            for (int i = 0; i < count; i++) {
                file.tracks.emplace_back();
                read_track_strictly(r, file.tracks.back());
                close_track(file.tracks.back());
            }
        } catch (const EndsEarly&) {
            refuse_end(r);
        }
    } else {
        read_tracks_leniently(r, file, declared);
    }

    // Times, and their limit.
    const auto play = [&](const MidiFile& part) {
        MidiPlayback playback = begin_playback(part, name);
        MidiMoment moment;
        while (next_moment(playback, moment))
            if (!(moment.seconds <= kMaxMidiSeconds))
                fail("{}: tick {} comes after {:.0f} seconds, past the limit of {:.0f}", name, moment.event.tick,
                     moment.seconds, kMaxMidiSeconds);
        file.seconds = std::max(file.seconds, moment.seconds);
    };
    if (file.format != 2) {
        play(file);
        return file;
    }
    MidiFile one = {.format = 1,
                    .ticks_per_quarter = file.ticks_per_quarter,
                    .frames_per_second = file.frames_per_second,
                    .ticks_per_frame = file.ticks_per_frame,
                    .tracks = {}};
    one.tracks.resize(1);
    for (MidiTrack& track : file.tracks) {
        std::swap(one.tracks[0], track);
        play(one);
        std::swap(one.tracks[0], track);
    }
    return file;
}

// ---------------------------------------------------------------------------------------------------------------
// Writing

std::string write_midi(const MidiFile& file, const std::string& name) {
    constexpr int64_t kLongestDelta = (1 << 28) - 1;
    if (file.tracks.size() > 65535)
        fail("{}: {} tracks cannot be written, at most 65535 can", name, file.tracks.size());
    std::string out;
    const auto put = [&](uint64_t value, int bytes) {
        for (int i = bytes; i-- > 0;) out += static_cast<char>(value >> (8 * i) & 0xff);
    };
    out += "MThd";
    put(6, 4);
    put(static_cast<uint64_t>(file.format), 2);
    put(file.tracks.size(), 2);
    put(file.ticks_per_quarter != 0
            ? static_cast<uint64_t>(file.ticks_per_quarter)
            : static_cast<uint64_t>(-file.frames_per_second * 256 + file.ticks_per_frame) & 0xffff,
        2);
    for (const MidiTrack& track : file.tracks) {
        MidiEvent event;
        int64_t tick = 0;
        for (MidiCursor c = begin_track(track); next_event(c, event); tick = event.tick)
            if (event.tick - tick > kLongestDelta)
                fail("{}: {} ticks between two events cannot be written, at most {} can", name, event.tick - tick,
                     kLongestDelta);
        out += "MTrk";
        put(track.bytes.size(), 4);
        out.append(reinterpret_cast<const char*>(track.bytes.data()), track.bytes.size());
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------------------
// Playing

static bool comes_later(const MidiPlayback::Head& a, const MidiPlayback::Head& b) {
    return a.event.tick != b.event.tick ? a.event.tick > b.event.tick : a.track > b.track;
}

static bool is_end_of_track(const MidiEvent& event) {
    return event.status == kMetaStatus && event.type == kMetaEndOfTrack;
}

// Puts the next event of the head's track onto the heap.
static void push_next(MidiPlayback& playback, MidiPlayback::Head head) {
    if (!next_event(head.cursor, head.event)) return;
    playback.heads.push_back(head);
    std::push_heap(playback.heads.begin(), playback.heads.end(), comes_later);
}

MidiPlayback begin_playback(const MidiFile& file, const std::string& name) {
    if (file.format == 2)
        fail("{}: format 2: its {} tracks are pieces of their own, which are not merged", name, file.tracks.size());
    MidiPlayback playback;
    playback.file = &file;
    playback.heads.reserve(file.tracks.size());
    for (size_t i = 0; i < file.tracks.size(); i++)
        push_next(playback, {.event = {}, .cursor = begin_track(file.tracks[i]), .track = i});
    return playback;
}

bool next_moment(MidiPlayback& playback, MidiMoment& moment) {
    if (playback.is_over) return false;
    // If nothing but Ends of Track is left, the last of them closes the whole; so does one of a file without tracks.
    MidiPlayback::Head head = {
        .event = {.tick = 0, .status = kMetaStatus, .type = kMetaEndOfTrack, .data = {}}, .cursor = {}, .track = 0};
    while (!playback.heads.empty()) {
        std::pop_heap(playback.heads.begin(), playback.heads.end(), comes_later);
        head = playback.heads.back();
        playback.heads.pop_back();
        push_next(playback, head);
        if (!is_end_of_track(head.event)) break;
    }
    playback.is_over = is_end_of_track(head.event);

    // In this order the products are those of the study's reader, to the bit.
    const MidiFile& file = *playback.file;
    const int64_t ticks = head.event.tick - playback.tick;
    const double ntsc = file.frames_per_second == 29 ? 30000.0 / 1001.0 : file.frames_per_second;
    const double scale = file.ticks_per_quarter != 0 ? playback.tempo * 1e-6 / file.ticks_per_quarter
                                                     : 1 / (ntsc * file.ticks_per_frame);
    moment.event = head.event;
    moment.track = head.track;
    moment.delta = ticks > 0 ? static_cast<double>(ticks) * scale : 0;
    playback.seconds += moment.delta;
    moment.seconds = playback.seconds;
    playback.tick = head.event.tick;
    const std::span<const uint8_t> data = head.event.data;
    if (head.event.status == kMetaStatus && head.event.type == kMetaSetTempo && data.size() >= 3)
        playback.tempo = big_endian(data.data(), 3);
    return true;
}

}  // namespace jetlag

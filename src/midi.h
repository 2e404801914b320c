// Standard MIDI Files: a reader and a writer (The Complete MIDI 1.0 Detailed Specification, "Standard MIDI Files 1.0";
// RMID: "RIFF MIDI", Microsoft 1991).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

// Past these a file is refused: they are far beyond music, and keep sums of ticks and seconds exact.
inline constexpr int64_t kMaxMidiTick = int64_t{1} << 40;
inline constexpr double kMaxMidiSeconds = 1e9;

// How to read.
//   strict   refuses exactly what mido 1.2, the reader of the published corpora, refuses to load (1.2.10, the last of
//            that series; default settings), and reads the rest as it does.
//   lenient  repairs what it can and counts each kind of repair.
// Both refuse: zero ticks per quarter note or frame, numbers of variable length over 4 bytes, a header that is not
// there or too short, ticks past kMaxMidiTick, times past kMaxMidiSeconds.
enum class MidiMode { strict, lenient };

enum MidiRepair {
    kDataByteClamped,       // a data byte over 127 became 127
    kRunningStatusKept,     // a status ran on across a meta, system-exclusive or system-common event
    kChunkTooLong,          // a chunk claims more bytes than it has
    kChunkTooShort,         // a track goes on after the end of its chunk
    kEndOfTrackMissing,     // a track has no End of Track
    kEndsInsideEvent,       // the file ends inside an event, which is dropped
    kForeignChunk,          // a chunk that is no track, which is passed over
    kTrackCountWrong,       // the header declares another number of tracks than there are
    kMetaWrong,             // a meta event of the wrong length or with a value out of range, which is kept as it is
    kRealTimeByte,          // a system real-time byte (0xf8 .. 0xfe), which is dropped
    kUndefinedStatus,       // status byte 0xf4 or 0xf5, which is dropped
    kDataWithoutStatus,     // a data byte before any status byte, which is dropped
    kBytesBetweenChunks,    // a run of bytes between or after chunks that are no chunk, which is passed over
    kBytesAfterEndOfTrack,  // zeros between the End of Track and the end of the chunk, which are passed over
    kUnknownFormat,         // a format other than 0, 1 and 2, which is read as 1
    kMidiRepairs
};
// "data bytes over 127 clamped", ...: for reports and manifests.
const char* midi_repair_name(MidiRepair repair);

// One event. Channel events: status 0x80 .. 0xef with one or two data bytes (0xc0 .. 0xdf have one). System exclusive:
// status 0xf0, or 0xf7 for a continuation, with the bytes that follow the length. Meta events: status 0xff with `type`
// and their bytes. System common (0xf1, 0xf2, 0xf3, 0xf6) and, read strictly, real-time: status and data bytes.
struct MidiEvent {
    int64_t tick = 0;  // from the start of the track
    uint8_t status = 0;
    uint8_t type = 0;  // of a meta event
    std::span<const uint8_t> data;
};
inline constexpr uint8_t kMetaStatus = 0xff, kMetaEndOfTrack = 0x2f, kMetaSetTempo = 0x51, kMetaMarker = 0x06;

// The events of a track in the encoding of the file (delta, status, data), each with its status byte and the shortest
// form of its numbers: this takes no more than one and a half times the bytes of the file, where an array of structs
// would take many times as much. The last event is an End of Track, also where the file has none.
struct MidiTrack {
    std::vector<uint8_t> bytes;
    int64_t last_tick = 0;
};

struct MidiFile {
    int format = 1;             // 0, 1, 2; read strictly also others, which count as 1
    int ticks_per_quarter = 0;  // 0: SMPTE
    int frames_per_second = 0;  // SMPTE: 24, 25, 29 (for 30000/1001), 30
    int ticks_per_frame = 0;
    std::vector<MidiTrack> tracks;
    std::array<int64_t, kMidiRepairs> repairs = {};
    double seconds = 0;  // of the last event of any track; format 2: of the longest track
};

// `name` names the file in errors: "NAME: byte OFFSET: what is wrong". Memory taken is a few times the size of `bytes`.
MidiFile read_midi(std::span<const uint8_t> bytes, const std::string& name, MidiMode mode);

// The file as bytes. Reading it gives the same events. Errors: more than 65535 tracks, a delta over 2^28 - 1 ticks
// (which only events that were dropped in reading can have left).
std::string write_midi(const MidiFile& file, const std::string& name);

// Adds an event at `tick`, which must not be before the track's last one.
void append_midi_event(MidiTrack& track, int64_t tick, uint8_t status, std::span<const uint8_t> data, uint8_t type = 0);

// The events of a track, one after the other: for (MidiCursor c = begin_track(track); next_event(c, event);)
struct MidiCursor {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int64_t tick = 0;
};
MidiCursor begin_track(const MidiTrack& track);
bool next_event(MidiCursor& cursor, MidiEvent& event);

// The events of all tracks in the order of their ticks, at one tick in the order of the tracks, with their times. A
// tempo counts from its tick on, whatever track it stands in; of two at one tick the later in this order wins. As the
// study's reader does it, Ends of Track are left out, and their ticks belong to the event that follows; one last End of
// Track closes the whole.
struct MidiPlayback {
    const MidiFile* file = nullptr;
    struct Head {
        MidiEvent event;
        MidiCursor cursor;
        size_t track;
    };
    std::vector<Head> heads;  // a heap: the next event of each track
    double tempo = 500000;    // microseconds per quarter note
    int64_t tick = 0;         // of the last event given
    double seconds = 0;
    bool is_over = false;
};
struct MidiMoment {
    MidiEvent event;
    size_t track = 0;
    double delta = 0;    // seconds since the event before
    double seconds = 0;  // since the start: the sum of the deltas
};
// Errors: format 2, whose tracks are pieces of their own and have no common time. `name` names the file.
MidiPlayback begin_playback(const MidiFile& file, const std::string& name);
bool next_moment(MidiPlayback& playback, MidiMoment& moment);

}  // namespace jetlag

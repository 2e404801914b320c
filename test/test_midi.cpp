// The reader and writer of Standard MIDI Files: a table of faults and oddities, times, and the real corpora.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>

#include "data_prep/archive.h"
#include "src/error.h"
#include "src/files.h"
#include "src/midi.h"
#include "test/midi_support.h"
#include "test/support.h"

namespace jetlag {
namespace {

using test::big_endian_bytes;
using test::bytes_of;
using test::chunk;
using test::hex;
using test::midi_header;
using test::one_track;

// "OK" or the error.
struct Outcome {
    std::string error;
    MidiFile file;
};
Outcome read(const std::string& bytes, MidiMode mode) {
    Outcome outcome;
    try {
        outcome.file = read_midi(bytes_of(bytes), "a.mid", mode);
        outcome.error = "OK";
    } catch (const Error& error) {
        outcome.error = error.what();
    }
    return outcome;
}

// "clamped=2, ..." with the names of test cases for the repairs.
std::string repairs_of(const MidiFile& file) {
    static const std::map<int, std::string> names = {
        {kDataByteClamped, "clamped"}, {kRunningStatusKept, "running"},  {kChunkTooLong, "long"},
        {kChunkTooShort, "short"},     {kEndOfTrackMissing, "no end"},   {kEndsInsideEvent, "cut"},
        {kForeignChunk, "foreign"},    {kTrackCountWrong, "count"},      {kMetaWrong, "meta"},
        {kRealTimeByte, "real time"},  {kUndefinedStatus, "undefined"},  {kDataWithoutStatus, "stray"},
        {kBytesBetweenChunks, "junk"}, {kBytesAfterEndOfTrack, "zeros"}, {kUnknownFormat, "format"},
    };
    EXPECT_EQ(names.size(), size_t{kMidiRepairs});
    std::string text;
    for (const auto& [repair, name] : names)
        if (file.repairs[static_cast<size_t>(repair)] > 0)
            text += (text.empty() ? "" : " ") + fmt::format("{}={}", name, file.repairs[static_cast<size_t>(repair)]);
    return text;
}

// The events but the Ends of Track of all tracks: "tick:status data data".
std::string events_of(const MidiFile& file) {
    std::string text;
    for (const MidiTrack& track : file.tracks) {
        if (&track != &file.tracks.front()) text += "| ";
        MidiEvent event;
        for (MidiCursor cursor = begin_track(track); next_event(cursor, event);) {
            if (event.status == kMetaStatus && event.type == kMetaEndOfTrack) continue;
            text += fmt::format("{}:{:02x}", event.tick, event.status);
            if (event.status == kMetaStatus) text += fmt::format("{:02x}", event.type);
            for (uint8_t byte : event.data) text += fmt::format("{:02x}", byte);
            text += ' ';
        }
    }
    if (!text.empty()) text.pop_back();
    return text;
}

const std::string kNote = "00 90 3c 40", kEnd = "00 ff 2f 00";

struct Case {
    std::string what;
    std::string bytes;
    std::string strict;   // the events, or "! part of the error"
    std::string lenient;  // the same
    std::string repairs;
};

std::vector<Case> cases() {
    const std::string header = midi_header(1, 1, 96), end = hex(kEnd), note = hex(kNote);
    const auto track = [](const std::string& events) { return one_track(hex(events)); };
    const std::string riff_body = "RMID" + std::string("data") + hex("1e 00 00 00") + one_track(note + end);
    return {
        // What both read.
        {"a note", track(kNote + kEnd), "0:903c40", "0:903c40", ""},
        {"format 0", midi_header(0, 1, 96) + chunk("MTrk", note + end), "0:903c40", "0:903c40", ""},
        {"running status", track(kNote + "10 3c 00 05 3e 40" + kEnd), "0:903c40 16:903c00 21:903e40",
         "0:903c40 16:903c00 21:903e40", ""},
        {"running status with one data byte", track("00 c1 05 07 06" + kEnd), "0:c105 7:c106", "0:c105 7:c106", ""},
        {"deltas of one to four bytes", track("7f 903c40 8100 903c00 818000 903c40 81808000 903c00" + kEnd),
         "127:903c40 255:903c00 16639:903c40 2113791:903c00", "127:903c40 255:903c00 16639:903c40 2113791:903c00", ""},
        {"a delta in a longer form than it needs", track("80 80 01 90 3c 40" + kEnd), "1:903c40", "1:903c40", ""},
        {"two tracks", midi_header(1, 2, 96) + chunk("MTrk", note + end) + chunk("MTrk", hex("05 c0 01") + end),
         "0:903c40 | 5:c001", "0:903c40 | 5:c001", ""},
        {"a header longer than it needs", hex("4d546864 00000008 0001 0001 0060 7878") + chunk("MTrk", note + end),
         "0:903c40", "0:903c40", ""},
        {"system exclusive and its continuation", track("00 f0 03 43 12 00 10 f7 02 01 f7" + kEnd),
         "0:f0431200 16:f701f7", "0:f0431200 16:f701f7", ""},
        {"system exclusive without bytes", track("00 f0 00" + kEnd), "0:f0", "0:f0", ""},
        {"an unknown meta event keeps its time", track("10 ff 60 02 01 02 00 90 3c 40" + kEnd), "16:ff600102 16:903c40",
         "16:ff600102 16:903c40", ""},
        {"a tempo and a text", track("00 ff 51 03 07 a1 20 00 ff 01 02 41 42" + kEnd), "0:ff5107a120 0:ff014142",
         "0:ff5107a120 0:ff014142", ""},
        {"system common", track("00 f1 12 00 f2 01 02 00 f3 04 00 f6" + kEnd), "0:f112 0:f20102 0:f304 0:f6",
         "0:f112 0:f20102 0:f304 0:f6", ""},
        {"events after an End of Track", track(kNote + kEnd + "10 80 3c 00" + kEnd), "0:903c40 16:803c00",
         "0:903c40 16:803c00", ""},
        {"format 2 is read", midi_header(2, 2, 96) + chunk("MTrk", note + end) + chunk("MTrk", note + end),
         "0:903c40 | 0:903c40", "0:903c40 | 0:903c40", ""},
        {"SMPTE", midi_header(1, 1, -25 * 256 + 40) + chunk("MTrk", note + end), "0:903c40", "0:903c40", ""},
        {"an empty sequence number and port", track("00 ff 00 00 00 ff 21 00" + kEnd), "0:ff00 0:ff21", "0:ff00 0:ff21",
         ""},

        // What strict refuses and lenient repairs.
        {"a data byte over 127", track("00 90 3c c8 00 80 90 00" + kEnd),
         "! byte 25: a data byte over 127 (0xc8) in an event with status 0x90", "0:903c7f 0:807f00", "clamped=2"},
        {"a data byte of 255", track("00 b0 07 ff" + kEnd), "! byte 25: a data byte over 127 (0xff)", "0:b0077f",
         "clamped=1"},
        {"a data byte over 127 in system exclusive", track("00 f0 04 f0 43 90 f7" + kEnd),
         "! byte 27: a data byte over 127 (0x90) in a system-exclusive event", "0:f0f0437ff7", "clamped=1"},
        {"a continuation that carries any bytes", track("00 f7 02 fa 12" + kEnd),
         "! byte 25: a data byte over 127 (0xfa)", "0:f7fa12", ""},
        {"a track header of another name", header + chunk("MTxx", note + end) + chunk("MTrk", note + end),
         "! byte 14: no MTrk header where a track should start", "0:903c40", "foreign=1"},
        {"a foreign chunk between tracks",
         midi_header(1, 2, 96) + chunk("MTrk", note + end) + chunk("XFIH", "abc") + chunk("MTrk", note + end),
         "! byte 30: no MTrk header where a track should start", "0:903c40 | 0:903c40", "foreign=1"},
        {"bytes between tracks",
         midi_header(1, 2, 96) + chunk("MTrk", note + end) + hex("00") + chunk("MTrk", note + end),
         "! byte 30: no MTrk header where a track should start", "0:903c40 | 0:903c40", "junk=1"},
        {"a chunk too long, at the end of the file", one_track(note + end, 100), "! byte 30: the file ends early",
         "0:903c40", "long=1"},
        {"a chunk too long, before a track",
         midi_header(1, 2, 96) + chunk("MTrk", note + end, 11) + chunk("MTrk", note + end),
         "! byte 33: no MTrk header where a track should start", "0:903c40 | 0:903c40", "long=1"},
        {"a chunk too short, inside an event", one_track(note + hex("10 80 3c 00") + end, 6), "! the file ends early",
         "0:903c40 16:803c00", "short=1"},
        {"a chunk too short, between events",
         midi_header(1, 2, 96) + chunk("MTrk", note + hex("10 80 3c 00") + end, 4) + chunk("MTrk", note + end),
         "! byte 26: no MTrk header where a track should start", "0:903c40 16:803c00 | 0:903c40", "short=1"},
        {"a track that ends inside an event, before another",
         midi_header(1, 2, 96) + chunk("MTrk", note + hex("10 80 3c")) + chunk("MTrk", note + end),
         "! byte 38: a data byte over 127", "0:903c40 | 0:903c40", "no end=1 cut=1"},
        {"a chunk too long and without End of Track, before a track",
         midi_header(1, 2, 96) + chunk("MTrk", note + hex("10 80 3c 00"), 12) + chunk("MTrk", note + end),
         "! the file ends early", "0:903c40 16:803c00 | 0:903c40", "long=1 no end=1"},
        {"a text that claims more bytes than its chunk has",
         midi_header(1, 2, 96) + chunk("MTrk", note + hex("00 ff 01 0a 41") + end) + chunk("MTrk", note + end),
         "! the file ends early", "0:903c40 | 0:903c40", "no end=1 cut=1"},
        {"the same in a chunk too long",
         midi_header(1, 2, 96) + chunk("MTrk", note + hex("00 ff 01 7f 41") + end, 99) + chunk("MTrk", note + end),
         "! the file ends early", "0:903c40 | 0:903c40", "long=1 no end=1 cut=1"},
        {"a file that ends inside an event", header + "MTrk" + hex("00000010") + note + hex("10 80 3c"),
         "! byte 29: the file ends early", "0:903c40", "long=1 no end=1 cut=1"},
        {"a file that ends inside a number", header + "MTrk" + hex("00000005") + note + hex("81"),
         "! byte 27: the file ends early", "0:903c40", "no end=1 cut=1"},
        {"a file that ends inside a text", header + "MTrk" + hex("00000010") + note + hex("00 ff 01 09 41 42"),
         "! byte 32: the file ends early", "0:903c40", "long=1 no end=1 cut=1"},
        {"fewer tracks than declared", midi_header(1, 3, 96) + chunk("MTrk", note + end),
         "! byte 30: the file ends early", "0:903c40", "count=1"},
        {"a channel prefix without a channel", track("00 ff 20 00" + kNote + kEnd), "! byte 23: meta event 0x20 has 0",
         "0:ff20 0:903c40", "meta=1"},
        {"a tempo of two bytes", track("00 ff 51 02 07 a1 60 90 3c 40" + kEnd), "! byte 23: meta event 0x51 has 2",
         "0:ff5107a1 96:903c40", "meta=1"},
        {"a key of eight sharps", track("00 ff 59 02 08 00" + kEnd), "! byte 23: meta event 0x59 has 8 sharps",
         "0:ff590800", "meta=1"},
        {"a key of mode 2", track("00 ff 59 02 f9 02" + kEnd), "! meta event 0x59 has -7 sharps and mode 2",
         "0:ff59f902", "meta=1"},
        {"an SMPTE offset of 60 minutes", track("00 ff 54 05 60 3c 00 00 00" + kEnd),
         "! meta event 0x54 has 60 minutes", "0:ff54603c000000", "meta=1"},
        {"a time signature of three bytes", track("00 ff 58 03 04 02 18" + kEnd), "! meta event 0x58 has 3",
         "0:ff58040218", "meta=1"},
        {"a sequence number of one byte", track("00 ff 00 01 05" + kEnd), "! meta event 0x00 has 1", "0:ff0005",
         "meta=1"},
        {"real-time bytes nobody defined", track("05 f9 05 fd" + kNote + kEnd), "! byte 23: undefined status byte 0xf9",
         "10:903c40", "real time=2"},
        {"an undefined status byte", track("05 f4" + kNote + kEnd), "! byte 23: undefined status byte 0xf4", "5:903c40",
         "undefined=1"},
        {"a real-time byte inside an event", track("00 90 3c f8 40" + kEnd), "! byte 25: a data byte over 127 (0xf8)",
         "0:903c40", "real time=1"},
        {"a data byte with the value of a real-time byte", track("00 90 3c fe 10 80 3c 40 20 91 f8 40" + kEnd),
         "! byte 25: a data byte over 127 (0xfe)", "0:903c7f 16:803c40 48:917f40", "clamped=2"},
        {"real-time bytes inside and between events", track("00 90 f8 3c 40 00 f8 10 3c 00 05 c0 fe 07" + kEnd),
         "! byte 24: a data byte over 127 (0xf8)", "0:903c40 16:903c00 21:c007", "real time=3"},
        {"a data byte before any status byte", track("05 3c 40 90 3c 40" + kEnd),
         "! byte 23: a data byte (0x3c) where a status byte should be", "69:903c40", "stray=1"},
        {"RMID", "RIFF" + hex("2a 00 00 00") + riff_body, "! byte 0: no MThd header", "0:903c40", ""},
        {"an RMID chunk that claims too much",
         "RIFF" + hex("2a 00 00 00") + "RMIDLIST" + hex("01 00 00 00 00 00") + "data" + hex("ff 00 00 00") +
             one_track(note + end),
         "! byte 0: no MThd header", "0:903c40", "long=1"},
        {"an event of over a million bytes", track("00 ff 01 bd 84 41") + std::string(1000001, 'a') + end,
         "! byte 25: an event of 1000001 bytes",
         "0:ff01" +
             [] {
                 std::string a;
                 for (int i = 0; i < 1000001; i++) a += "61";
                 return a;
             }(),
         "short=1"},

        // What strict reads in a way of its own, or lets pass, and lenient repairs.
        {"running status across a meta event", track(kNote + "00 ff 01 01 41 10 3c 00" + kEnd),
         "0:903c40 0:ff0141 16:903c00", "0:903c40 0:ff0141 16:903c00", "running=1"},
        {"running status across system exclusive: a second one for the study's reader",
         track(kNote + "00 f0 02 01 f7 10 3c 00" + kEnd), "0:903c40 0:f001f7 16:f0", "0:903c40 0:f001f7 16:903c00",
         "running=1"},
        {"real-time bytes between events", track("05 f8 05 fe" + kNote + kEnd), "5:f8 10:fe 10:903c40", "10:903c40",
         "real time=2"},
        {"no End of Track", track(kNote), "0:903c40", "0:903c40", "no end=1"},
        {"an empty track", header + chunk("MTrk", ""), "", "", "no end=1"},
        {"more tracks than declared", midi_header(1, 1, 96) + chunk("MTrk", note + end) + chunk("MTrk", note + end),
         "0:903c40", "0:903c40 | 0:903c40", "count=1"},
        {"a track beyond those declared that cannot be read",
         midi_header(1, 1, 96) + chunk("MTrk", note + end) + chunk("MTrk", note + hex("80 80 80 80 00") + end),
         "0:903c40", "0:903c40", "junk=1"},
        {"bytes after the last track", header + chunk("MTrk", note + end) + hex("1a 1a 00"), "0:903c40", "0:903c40",
         "junk=1"},
        {"zeros after End of Track", header + chunk("MTrk", note + end + hex("00 00 00")), "0:903c40 0:900000",
         "0:903c40", "zeros=1"},
        {"a tempo of four bytes", track("00 ff 51 04 07 a1 20 00" + kEnd), "0:ff5107a12000", "0:ff5107a12000",
         "meta=1"},
        {"format 5", midi_header(5, 1, 96) + chunk("MTrk", note + end), "0:903c40", "0:903c40", "format=1"},

        // What both refuse.
        {"nothing", "", "! byte 0: the file ends early, inside the header", "! byte 0: the file ends early", ""},
        {"text", "This is not a MIDI file.", "! byte 0: no MThd header", "! byte 0: no MThd header", ""},
        {"a header cut short", header.substr(0, 12), "! byte 12: the file ends early, inside the header",
         "! byte 12: the file ends early, inside the header", ""},
        {"a header too short", chunk("MThd", hex("0001 0001")) + chunk("MTrk", note + end),
         "! byte 4: a header of 4 bytes, wanted at least 6", "! byte 4: a header of 4 bytes, wanted at least 6", ""},
        {"zero ticks per quarter note", midi_header(1, 1, 0) + chunk("MTrk", note + end),
         "! byte 12: zero ticks per quarter note", "! byte 12: zero ticks per quarter note", ""},
        {"zero ticks per frame", midi_header(1, 1, -25 * 256) + chunk("MTrk", note + end),
         "! byte 12: zero ticks per frame", "! byte 12: zero ticks per frame", ""},
        {"a number of five bytes", track(kNote + "81 80 80 80 00 80 3c 00" + kEnd),
         "! byte 26: a number of variable length has more than 4 bytes",
         "! byte 26: a number of variable length has more than 4 bytes", ""},
        {"a length of five bytes", track("00 ff 01 80 80 80 80 00" + kEnd),
         "! byte 25: a number of variable length has more than 4 bytes",
         "! byte 25: a number of variable length has more than 4 bytes", ""},
        {"a time past the limit",
         midi_header(1, 1, 1) + chunk("MTrk", hex("00 ff 51 03 ff ff ff ff ff ff 7f 90 3c 40") + end),
         "! comes after 4503599342 seconds, past the limit of 1000000000", "! past the limit of 1000000000", ""},
        {"ticks past the limit",
         [] {
             std::string events;
             for (int i = 0; i < 4097; i++) events += hex("ff ff ff 7f c0 00");
             return midi_header(1, 1, 32767) + chunk("MTrk", hex("00 ff 51 03 00 00 01") + events + hex(kEnd));
         }(),
         "! past the limit of 1099511627776", "! past the limit of 1099511627776", ""},
        {"a RIFF file that holds a sound", "RIFF" + hex("04 00 00 00") + "WAVE", "! byte 0: no MThd header",
         "! byte 8: a RIFF file of another kind than RMID", ""},
        {"an RMID file without data", "RIFF" + hex("04 00 00 00") + "RMID", "! byte 0: no MThd header",
         "! a RIFF file without a data chunk", ""},
    };
}

TEST(Midi, ReadsOrRefusesEveryFaultAsSaid) {
    for (const Case& c : cases()) {
        for (const MidiMode mode : {MidiMode::strict, MidiMode::lenient}) {
            const bool is_strict = mode == MidiMode::strict;
            SCOPED_TRACE(c.what + (is_strict ? ", strict" : ", lenient"));
            const Outcome outcome = read(c.bytes, mode);
            const std::string& wanted = is_strict ? c.strict : c.lenient;
            if (wanted.starts_with("! ")) {
                EXPECT_TRUE(outcome.error.starts_with("a.mid: ")) << outcome.error;
                EXPECT_NE(outcome.error.find(wanted.substr(2)), std::string::npos) << outcome.error;
                continue;
            }
            EXPECT_EQ(outcome.error, "OK");
            std::string events = events_of(outcome.file);
            EXPECT_EQ(events, wanted);
            EXPECT_EQ(repairs_of(outcome.file), is_strict ? "" : c.repairs);
        }
    }
}

// The table of docs/midi.md, from what the reader does: "read", "read, REPAIRS" or the error, for the cases that any of
// the two modes does not simply read.
TEST(Midi, TheTableInTheNotesIsTrue) {
    std::string table = "| file | strict | lenient |\n| --- | --- | --- |\n";
    for (const Case& c : cases()) {
        std::string row = "| " + c.what;
        bool is_plain = true;
        for (const MidiMode mode : {MidiMode::strict, MidiMode::lenient}) {
            const Outcome outcome = read(c.bytes, mode);
            std::string said = outcome.error == "OK" ? "read" : outcome.error.substr(7);
            for (int i = 0; i < kMidiRepairs; i++)
                if (const int64_t count = outcome.file.repairs[static_cast<size_t>(i)]; count > 0)
                    said += fmt::format(", {} {}", count, midi_repair_name(static_cast<MidiRepair>(i)));
            is_plain = is_plain && said == "read";
            row += " | " + said;
        }
        if (!is_plain) table += row + " |\n";
    }
    const std::string notes = read_file("docs/midi.md");
    EXPECT_NE(notes.find(table), std::string::npos) << table;
}

TEST(Midi, WritesWhatItReads) {
    for (const Case& c : cases())
        for (const MidiMode mode : {MidiMode::strict, MidiMode::lenient}) {
            SCOPED_TRACE(c.what);
            const Outcome outcome = read(c.bytes, mode);
            if (outcome.error != "OK") continue;
            const Outcome again = read(write_midi(outcome.file, "b.mid"), mode);
            ASSERT_EQ(again.error, "OK");
            EXPECT_EQ(again.file.format, outcome.file.format);
            EXPECT_EQ(again.file.ticks_per_quarter, outcome.file.ticks_per_quarter);
            EXPECT_EQ(again.file.frames_per_second, outcome.file.frames_per_second);
            EXPECT_EQ(again.file.ticks_per_frame, outcome.file.ticks_per_frame);
            EXPECT_EQ(again.file.seconds, outcome.file.seconds);
            ASSERT_EQ(again.file.tracks.size(), outcome.file.tracks.size());
            for (size_t i = 0; i < outcome.file.tracks.size(); i++)
                EXPECT_EQ(again.file.tracks[i].bytes, outcome.file.tracks[i].bytes);
        }
}

// Every time signature that log(2^n) / log(2) in double calls a power of two, by what Python prints.
TEST(Midi, KnowsTheDenominatorsOfTheStudysReader) {
    const std::vector<int> refused = {29, 31, 39, 47, 51, 55, 58, 59, 62};
    for (int n = 0; n < 64; n++) {
        const std::string bytes = one_track(hex("00 ff 58 04 04") + static_cast<char>(n) + hex("18 08" + kEnd));
        const bool is_refused = std::find(refused.begin(), refused.end(), n) != refused.end();
        EXPECT_EQ(read(bytes, MidiMode::strict).error != "OK", is_refused) << n;
    }
}

// Cut anywhere, a file is refused or read, and lenient keeps what stands before the cut.
TEST(Midi, ReadsFilesCutAnywhere) {
    const std::string whole = midi_header(1, 2, 96) +
                              chunk("MTrk", hex("00 ff 51 03 06 1a 80 00 ff 03 02 41 42" + kEnd)) +
                              chunk("MTrk", hex("00 90 3c 40 30 3c 00 00 f0 03 01 02 f7 10 b0 40 7f" + kEnd));
    for (size_t size = 0; size < whole.size(); size++) {
        const Outcome strict = read(whole.substr(0, size), MidiMode::strict);
        const Outcome lenient = read(whole.substr(0, size), MidiMode::lenient);
        EXPECT_NE(strict.error, "OK") << size;
        EXPECT_EQ(lenient.error == "OK", size >= 14) << size << ": " << lenient.error;
        if (lenient.error == "OK") {
            const std::string all = events_of(read(whole, MidiMode::lenient).file);
            EXPECT_TRUE(all.starts_with(events_of(lenient.file))) << events_of(lenient.file);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Times

std::vector<MidiMoment> play(const MidiFile& file) {
    std::vector<MidiMoment> moments;
    MidiPlayback playback = begin_playback(file, "a.mid");
    MidiMoment moment;
    while (next_moment(playback, moment)) moments.push_back(moment);
    return moments;
}

TEST(Midi, AppliesTheTempiOfAllTracks) {
    // Track 0: notes at ticks 0, 96, 192; track 1: 1 s a quarter from tick 96 on; track 2: at the same tick 2 s, which
    // is later in the order and wins; track 1 again from tick 144 on: a quarter of a second.
    const std::string file = midi_header(1, 3, 96) + chunk("MTrk", hex("00 90 3c 40 60 3c 00 60 3e 40" + kEnd)) +
                             chunk("MTrk", hex("60 ff 51 03 0f 42 40 30 ff 51 03 03 d0 90" + kEnd)) +
                             chunk("MTrk", hex("60 ff 51 03 1e 84 80" + kEnd));
    const MidiFile midi = read(file, MidiMode::strict).file;
    std::vector<std::pair<int64_t, double>> notes;
    for (const MidiMoment& moment : play(midi))
        if (moment.event.status == 0x90) notes.push_back({moment.event.tick, moment.seconds});
    ASSERT_EQ(notes.size(), 3u);
    EXPECT_EQ(notes[0], (std::pair<int64_t, double>{0, 0.0}));
    EXPECT_EQ(notes[1].first, 96);
    EXPECT_DOUBLE_EQ(notes[1].second, 0.5);
    EXPECT_EQ(notes[2].first, 192);
    EXPECT_DOUBLE_EQ(notes[2].second, 0.5 + 1.0 + 0.125);
    EXPECT_DOUBLE_EQ(midi.seconds, 1.625);
}

TEST(Midi, TakesOneTickInTheOrderOfTheTracks) {
    const std::string file = midi_header(1, 3, 96) + chunk("MTrk", hex("05 90 01 01 00 90 02 01" + kEnd)) +
                             chunk("MTrk", hex("00 91 03 01 05 91 04 01" + kEnd)) +
                             chunk("MTrk", hex("05 92 05 01 01 92 06 01" + kEnd));
    std::string order;
    const MidiFile midi = read(file, MidiMode::strict).file;
    for (const MidiMoment& moment : play(midi))
        order += moment.event.status == kMetaStatus ? "." : std::to_string(moment.event.data[0]);
    EXPECT_EQ(order, "312456.");
}

TEST(Midi, GivesTheTicksOfEndsOfTrackToTheNextEvent) {
    // As the study's reader does: the track's own end at tick 10 is no event; the last end, at tick 40, closes.
    const std::string file = midi_header(1, 2, 100) + chunk("MTrk", hex("05 90 01 01 05 ff 2f 00")) +
                             chunk("MTrk", hex("14 91 02 01 14 ff 2f 00"));
    const MidiFile midi = read(file, MidiMode::strict).file;
    const std::vector<MidiMoment> moments = play(midi);
    ASSERT_EQ(moments.size(), 3u);
    EXPECT_EQ(moments[0].event.tick, 5);
    EXPECT_EQ(moments[1].event.tick, 20);
    EXPECT_EQ(moments[1].delta, 15 * (500000 * 1e-6 / 100));
    EXPECT_EQ(moments[2].event.tick, 40);
    EXPECT_EQ(moments[2].event.type, kMetaEndOfTrack);
}

TEST(Midi, CountsFramesWhereTicksAreFrames) {
    for (const auto& [frames, per_second] :
         std::vector<std::pair<int, double>>{{24, 24}, {25, 25}, {29, 30000.0 / 1001.0}, {30, 30}}) {
        // A tempo has no say here.
        const std::string file =
            midi_header(1, 1, -frames * 256 + 80) + chunk("MTrk", hex("00 ff 51 03 00 00 01 8f 50 90 3c 40" + kEnd));
        const MidiFile midi = read(file, MidiMode::lenient).file;
        EXPECT_NEAR(midi.seconds, 2000 / (per_second * 80), 1e-12) << frames;
    }
}

TEST(Midi, DoesNotMergeFormat2) {
    const MidiFile midi =
        read(midi_header(2, 2, 96) + chunk("MTrk", hex(kNote + kEnd)) + chunk("MTrk", hex("60 90 3c 40" + kEnd)),
             MidiMode::lenient)
            .file;
    EXPECT_EQ(midi.tracks.size(), 2u);
    EXPECT_DOUBLE_EQ(midi.seconds, 0.5);
    try {
        begin_playback(midi, "a.mid");
        FAIL();
    } catch (const Error& error) {
        EXPECT_STREQ(error.what(), "a.mid: format 2: its 2 tracks are pieces of their own, which are not merged");
    }
}

TEST(Midi, TheWriterRefusesWhatCannotBeWritten) {
    MidiFile midi;
    midi.ticks_per_quarter = 96;
    midi.tracks.resize(1);
    append_midi_event(midi.tracks[0], int64_t{1} << 28, 0x90, bytes_of(hex("3c 40")));
    EXPECT_THROW(write_midi(midi, "b.mid"), Error);
    midi.tracks.assign(65536, {});
    EXPECT_THROW(write_midi(midi, "b.mid"), Error);
}

// ---------------------------------------------------------------------------------------------------------------
// Real files

std::map<std::string, std::string> real_files() {
    std::map<std::string, std::string> files;
    for (const char* name : {"musicnet_midis.tar.gz", "maestro_sample.zip"}) {
        const std::filesystem::path path = test::shared_folder() / "data" / "midi" / name;
        read_archive(
            read_file(path), path, uint64_t{1} << 30, [](const std::string& file) { return !file.ends_with(".csv"); },
            [&](ArchiveFile file) { files[file.path] = std::move(file.contents); });
    }
    return files;
}

TEST(Midi, RefusesTheSevenDamagedFilesOfMusicNetAndReadsAllOthers) {
    NEEDS_SHARED();
    // The faults as ../shared/data/README.md lists them; the offsets as the study's reader stands when it gives up.
    const std::map<std::string, std::string> damaged = {
        {"2194", "byte 2789: a data byte over 127"},
        {"2227", "byte 2901: a data byte over 127"},
        {"2230", "byte 5025: a data byte over 127"},
        {"2310", "byte 2832: a data byte over 127"},
        {"2211", "byte 6114: no MTrk header where a track should start"},
        {"2305", "byte 3605: no MTrk header where a track should start"},
        {"2292", "byte 5024: the file ends early"},
    };
    int refused = 0, files = 0;
    for (const auto& [name, bytes] : real_files()) {
        SCOPED_TRACE(name);
        const std::string base = std::filesystem::path(name).filename();
        const auto fault = damaged.find(base.substr(0, base.find('_')));
        const Outcome strict = read(bytes, MidiMode::strict), lenient = read(bytes, MidiMode::lenient);
        files++;
        EXPECT_EQ(lenient.error, "OK");
        if (fault == damaged.end()) {
            EXPECT_EQ(strict.error, "OK");
        } else {
            EXPECT_NE(strict.error.find(fault->second), std::string::npos) << strict.error;
            // All seven have nothing but a chunk length that is too long, in the track where the study's reader loses
            // its way.
            EXPECT_EQ(repairs_of(lenient.file), "long=1");
            refused++;
        }
        for (const Outcome* outcome : {&strict, &lenient}) {
            if (outcome->error != "OK") continue;
            const MidiMode mode = outcome == &strict ? MidiMode::strict : MidiMode::lenient;
            const Outcome again = read(write_midi(outcome->file, name), mode);
            ASSERT_EQ(again.error, "OK");
            ASSERT_EQ(again.file.tracks.size(), outcome->file.tracks.size());
            for (size_t i = 0; i < outcome->file.tracks.size(); i++)
                EXPECT_EQ(again.file.tracks[i].bytes, outcome->file.tracks[i].bytes);
        }
    }
    EXPECT_EQ(refused, 7);
    EXPECT_EQ(files, 340);
}

// Whatever a real file is turned into: no crash, no hang, and what is read can be written and read again.
TEST(Midi, SurvivesMutations) {
    std::mt19937 engine(1);
    std::vector<std::string> seeds;
    for (const Case& c : cases())
        if (c.bytes.size() < 1000) seeds.push_back(c.bytes);
    int good = 0;
    for (int round = 0; round < 20000; round++) {
        std::string bytes = seeds[engine() % seeds.size()];
        for (int edits = 1 + static_cast<int>(engine() % 4); edits > 0 && !bytes.empty(); edits--) {
            const size_t at = engine() % bytes.size();
            switch (engine() % 4) {
                case 0:
                    bytes[at] = static_cast<char>(engine());
                    break;
                case 1:
                    bytes.erase(at, 1 + engine() % 4);
                    break;
                case 2:
                    bytes.insert(at, bytes.substr(engine() % bytes.size(), engine() % 16));
                    break;
                default:
                    bytes.insert(at, 1, static_cast<char>(engine()));
            }
        }
        for (const MidiMode mode : {MidiMode::strict, MidiMode::lenient}) {
            const Outcome outcome = read(bytes, mode);
            if (outcome.error != "OK") continue;
            good++;
            std::string written;
            try {
                written = write_midi(outcome.file, "b.mid");
            } catch (const Error& error) {
                // Where events were dropped, more ticks than can be written may lie between two others.
                ASSERT_NE(std::string(error.what()).find("ticks between two events"), std::string::npos);
                ASSERT_NE(repairs_of(outcome.file), "");
                continue;
            }
            const Outcome again = read(written, mode);
            ASSERT_EQ(again.error, "OK");
            ASSERT_EQ(events_of(again.file), events_of(outcome.file));
        }
    }
    EXPECT_GT(good, 1000);
}

}  // namespace
}  // namespace jetlag

// MIDI as token streams: the two formats, their way back, and the programs prepare_midi and midi_from_tokens.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "data_prep/midi_tokens.h"
#include "src/csv.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"
#include "src/random.h"
#include "test/midi_support.h"
#include "test/support.h"

namespace jetlag {
namespace {

using test::bytes_of;
using test::chunk;
using test::expect_error;
using test::hex;
using test::lines_of;
using test::midi_header;
using test::one_track;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;
using test::zip_of;

const std::string kEnd = "00 ff 2f 00";

std::string text_of(const std::string& midi, const TokenOptions& options, TokenCounts* counts = nullptr) {
    TokenCounts ignored;
    const MidiFile file = read_midi(bytes_of(midi), "a.mid", MidiMode::lenient);
    std::string text = encode_piece("", stream_events(file, "a.mid", options, counts != nullptr ? *counts : ignored),
                                    TokenFormat::text);
    text.pop_back();
    return text;
}

// 100 ticks per quarter note of half a second: a tick is 5 ms.
std::string ticks_of_5_ms(const std::string& events) {
    return midi_header(1, 1, 100) + chunk("MTrk", hex(events + kEnd));
}

TEST(MidiTokens, WritesEveryKindOfEvent) {
    const std::string midi =
        ticks_of_5_ms("00 c2 07 04 92 3c 40 08 b2 40 7f 04 92 3c 00 04 82 05 11 04 e2 00 40 04 d2 10 04 99 7f 7f");
    TokenOptions options;
    TokenCounts counts;
    EXPECT_EQ(text_of(midi, options, &counts), "d001.on060.v064.c2 d003.off060.c2 d001.off005.c2 d003.on127.v127.c9");
    EXPECT_EQ(counts.events, 4);
    EXPECT_EQ(counts.note_on, 2);
    EXPECT_EQ(counts.note_off, 2);
    EXPECT_EQ(counts.control, 0);
    EXPECT_EQ(counts.program, 0);
    EXPECT_EQ(counts.skipped_messages, 5);  // the last End of Track is one
    options.controls = options.programs = true;
    EXPECT_EQ(text_of(midi, options),
              "d000.pg007.c2 d001.on060.v064.c2 d002.cc064.v127.c2 d001.off060.c2 d001.off005.c2 d003.on127.v127.c9");
}

TEST(MidiTokens, RoundsEachMessageByItselfHalfToEven) {
    // Ticks of 5 ms on a grid of 20 ms: 2 ticks are half a step and round to 0, 6 to 2, 10 to 2, 14 to 4.
    TokenOptions options;
    EXPECT_EQ(text_of(ticks_of_5_ms("02 90 01 01 06 90 02 01 0a 90 03 01 0e 90 04 01"), options),
              "d000.on001.v001.c0 d002.on002.v001.c0 d002.on003.v001.c0 d004.on004.v001.c0");
    // What is not written still counts, and is rounded by itself: two of half a step make none, of 6 ticks 4.
    EXPECT_EQ(text_of(ticks_of_5_ms("02 b0 01 01 02 90 02 01"), options), "d000.on002.v001.c0");
    EXPECT_EQ(text_of(ticks_of_5_ms("06 b0 01 01 06 90 02 01"), options), "d004.on002.v001.c0");
    // The rest that a cap cuts off is gone.
    options.max_delta = 3;
    EXPECT_EQ(text_of(ticks_of_5_ms("7f 90 02 01 04 90 03 01"), options), "d003.on002.v001.c0 d001.on003.v001.c0");
    options.max_delta = 999;
    options.grid_ms = 5;
    options.max_events = 1;
    TokenCounts counts;
    EXPECT_EQ(text_of(ticks_of_5_ms("02 b0 01 01 7f 90 02 01 04 90 03 01"), options, &counts), "d129.on002.v001.c0");
    EXPECT_EQ(counts.skipped_messages, 1);
}

TEST(MidiTokens, WritesHeaderFields) {
    EXPECT_EQ(header_field("Piano Quintet in A major"), "Piano_Quintet_in_A_major");
    EXPECT_EQ(header_field("2. Andante/Presto: (a+b), c-d"), "2._Andante/Presto:_(a+b),_c-d");
    EXPECT_EQ(header_field("Dvo\xc5\x99\xc3\xa1k"), "Dvo_k");
    EXPECT_EQ(header_field("a & b"), "a___b");
    EXPECT_EQ(header_field("a   b|c\n\td"), "a_b_c_d");
    EXPECT_EQ(header_field(""), "NA");
    EXPECT_EQ(header_field(std::string(100, 'x')), std::string(80, 'x'));
}

TEST(MidiTokens, TheBinaryVocabularyIsAsDocumented) {
    const std::vector<StreamEvent> events = {
        {.delta = 0, .kind = StreamEventKind::note_on, .channel = 0, .number = 60, .value = 64},
        {.delta = 31, .kind = StreamEventKind::note_off, .channel = 0, .number = 60, .value = 0},
        {.delta = 32, .kind = StreamEventKind::control, .channel = 3, .number = 64, .value = 127},
        {.delta = 999, .kind = StreamEventKind::program, .channel = 3, .number = 5, .value = 0},
        {.delta = 2049, .kind = StreamEventKind::note_on, .channel = 15, .number = 0, .value = 127},
    };
    const std::vector<int> wanted = {163, 144, 60,  210, 160, 60,  211, 167, 161, 64, 127,
                                     241, 186, 162, 5,   242, 242, 180, 179, 159, 0};
    const std::string binary = encode_piece("PIECE=0000|", events, TokenFormat::binary);
    EXPECT_EQ(std::vector<int>(bytes_of(binary).begin(), bytes_of(binary).end()), wanted);
}

// Random events of all kinds, with deltas of all sizes.
std::vector<StreamEvent> random_events(std::mt19937& engine, int count) {
    std::vector<StreamEvent> events;
    for (int i = 0; i < count; i++) {
        StreamEvent event;
        event.kind = static_cast<StreamEventKind>(engine() % 4);
        event.delta = engine() % 3 == 0 ? 0 : engine() % (engine() % 4 == 0 ? kLargestDelta + 1 : 100);
        event.channel = engine() % 16;
        event.number = engine() % 128;
        if (event.kind == StreamEventKind::note_on) event.value = 1 + engine() % 127;
        if (event.kind == StreamEventKind::control) event.value = engine() % 128;
        events.push_back(event);
    }
    return events;
}

void expect_same(const std::vector<StreamEvent>& found, const std::vector<StreamEvent>& wanted, bool velocity_bins) {
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < wanted.size(); i++) {
        EXPECT_EQ(found[i].delta, wanted[i].delta);
        EXPECT_EQ(found[i].kind, wanted[i].kind);
        EXPECT_EQ(found[i].channel, wanted[i].channel);
        EXPECT_EQ(found[i].number, wanted[i].number);
        const bool in_bin = velocity_bins && wanted[i].kind == StreamEventKind::note_on;
        EXPECT_EQ(found[i].value, in_bin ? wanted[i].value / 4 * 4 + 2 : wanted[i].value);
    }
}

TEST(MidiTokens, BothFormatsComeBack) {
    std::mt19937 engine(1);
    for (const TokenFormat format : {TokenFormat::text, TokenFormat::binary})
        for (int round = 0; round < 50; round++) {
            std::vector<std::vector<StreamEvent>> pieces;
            std::string stream = format == TokenFormat::text ? stream_header({}) : "";
            for (int p = 0; p < 3; p++) {
                pieces.push_back(random_events(engine, static_cast<int>(engine() % 50)));
                stream += encode_piece(fmt::format("PIECE={:04}|COMP=x|", p), pieces.back(), format);
            }
            const DecodedStream decoded = decode_stream(stream, format);
            EXPECT_EQ(decoded.dropped, 0) << decoded.first_dropped;
            ASSERT_EQ(decoded.pieces.size(), 3u);
            for (int p = 0; p < 3; p++) {
                EXPECT_EQ(decoded.pieces[p].header,
                          format == TokenFormat::text ? fmt::format("PIECE={:04}|COMP=x|", p) : "");
                expect_same(decoded.pieces[p].events, pieces[p], format == TokenFormat::binary);
            }
        }
}

TEST(MidiTokens, MidiComesBackAsTheSameTokens) {
    std::mt19937 engine(2);
    for (const double grid_ms : {20.0, 10.0, 1.0, 0.5, 7.5, 33.0, 1000.0, 10000.0}) {
        // Pieces that end with all notes off and all pedals up, so that nothing is added.
        std::vector<StreamEvent> events;
        for (StreamEvent event : random_events(engine, 200)) {
            event.delta %= 1000;
            if (event.kind == StreamEventKind::note_on) {
                events.push_back(event);
                event.kind = StreamEventKind::note_off;
                event.value = 0;
            } else if (event.kind == StreamEventKind::control && event.number >= 64 && event.number <= 69) {
                continue;
            }
            events.push_back(event);
        }
        const MidiFile midi = pieces_to_midi({{"PIECE=0000|A=b|", events}}, grid_ms, "a");
        const MidiFile again = read_midi(bytes_of(write_midi(midi, "a")), "a", MidiMode::strict);
        TokenOptions options;
        options.grid_ms = grid_ms;
        options.controls = options.programs = true;
        TokenCounts counts;
        expect_same(stream_events(again, "a", options, counts), events, false);
        EXPECT_EQ(counts.skipped_messages, 3);  // tempo, marker, End of Track
    }
}

TEST(MidiTokens, EndsNotesAndLiftsPedalsAtTheEndOfAPiece) {
    const auto event = [](StreamEventKind kind, uint8_t number, uint8_t value) {
        return StreamEvent{.delta = 1, .kind = kind, .channel = 1, .number = number, .value = value};
    };
    const std::vector<StreamEvent> events = {
        event(StreamEventKind::note_on, 60, 1), event(StreamEventKind::note_on, 62, 1),
        event(StreamEventKind::control, 64, 9), event(StreamEventKind::note_off, 60, 0),
        event(StreamEventKind::control, 7, 9)};
    const MidiFile midi = pieces_to_midi({{"", events}, {"", events}}, 20, "a");
    TokenOptions options;
    options.controls = true;
    TokenCounts counts;
    std::string text = encode_piece("", stream_events(midi, "a", options, counts), TokenFormat::text);
    const std::string one =
        "d001.on060.v001.c1 d001.on062.v001.c1 d001.cc064.v009.c1 d001.off060.c1 d001.cc007.v009.c1 d000.off062.c1 "
        "d000.cc064.v000.c1";
    EXPECT_EQ(text, one + " " + one + "\n");
}

TEST(MidiTokens, DropsWhatIsMalformed) {
    const DecodedStream text = decode_stream(
        "0.on060.v064.c0 d001.on060.v064.c0 d01.on060.v064.c0 d001.on128.v064.c0 d001.on060.v000.c0\n"
        "d001.on060.v064.c16 d001.off060.c01 d001.off060 d001.cc064.v128.c0 d001.pg012.c3 xyz PIECE=0001|COMP=a|"
        "d002.off060.c15 PIECE=0002 d0000002.off060.c15 d001.off060.c0\n# a comment d001.off060.c0\n\x80\xff d001.on06",
        TokenFormat::text);
    ASSERT_EQ(text.pieces.size(), 2u);
    EXPECT_EQ(text.pieces[0].events.size(), 2u);
    EXPECT_EQ(text.pieces[1].header, "PIECE=0001|COMP=a|");
    EXPECT_EQ(text.pieces[1].events.size(), 2u);
    EXPECT_EQ(text.dropped, 13);
    EXPECT_EQ(text.first_dropped, "\"0.on060.v064.c0\" at byte 0");

    // A pitch without its velocity, a velocity without its pitch, a control without its value, tokens that are none.
    const std::string binary = hex("3c a3 90 3c 90 b4 90 3c a1 40 90 3e ff a0 3c a1 40");
    const DecodedStream decoded = decode_stream(binary, TokenFormat::binary);
    ASSERT_EQ(decoded.pieces.size(), 1u);
    ASSERT_EQ(decoded.pieces[0].events.size(), 4u);
    EXPECT_EQ(decoded.pieces[0].events[1].delta, 1);
    EXPECT_EQ(decoded.dropped, 7);
    EXPECT_EQ(decoded.first_dropped, "\"<\" at byte 0");
    EXPECT_TRUE(decode_stream("", TokenFormat::text).pieces.empty());
    EXPECT_TRUE(decode_stream("", TokenFormat::binary).pieces.empty());
}

// ---------------------------------------------------------------------------------------------------------------
// What the programs stand on

TEST(PythonRandom, DrawsAsPythonDoes) {
    NEEDS_SHARED();
    const nlohmann::json golden =
        nlohmann::json::parse(read_file(test::shared_folder() / "golden" / "midi" / "python_random.json"));
    EXPECT_GE(golden.size(), 4u);
    for (const auto& [seed, draws] : golden.items()) {
        SCOPED_TRACE(seed);
        std::mt19937 engine = make_python_random(std::stoull(seed));
        for (const auto& word : draws.at("getrandbits_32_x4")) EXPECT_EQ(engine(), word.get<uint32_t>());
        engine = make_python_random(std::stoull(seed));
        for (const auto& value : draws.at("random_5")) {
            const double a = static_cast<double>(engine() >> 5), b = static_cast<double>(engine() >> 6);
            EXPECT_EQ((a * 67108864 + b) / 9007199254740992, value.get<double>());
        }
        engine = make_python_random(std::stoull(seed));
        EXPECT_EQ(python_shuffled(engine, 20), draws.at("shuffle_range20").get<std::vector<size_t>>());
    }
}

// By Python 3.11: random.Random(s).getrandbits(32), then shuffle of range(5).
TEST(PythonRandom, TakesSeedsOfOneAndTwoWords) {
    std::mt19937 engine = make_python_random(4294967295);
    EXPECT_EQ(engine(), 2728839433);
    engine = make_python_random(4294967296);
    EXPECT_EQ(engine(), 485306839);
    engine = make_python_random(9223372036854775807);
    EXPECT_EQ(engine(), 1359979423);
    EXPECT_EQ(python_shuffled(engine, 5), (std::vector<size_t>{2, 0, 4, 3, 1}));
    EXPECT_TRUE(python_shuffled(engine, 0).empty());
    EXPECT_EQ(python_shuffled(engine, 1), (std::vector<size_t>{0}));
}

TEST(Csv, ReadsQuotedFields) {
    const CsvTable table = read_csv(
        "\xef\xbb\xbf"
        "a,b\r\n\"x, \"\"y\"\"\",\" two\nlines \"\n  z ,\n",
        "t.csv");
    EXPECT_EQ(table.columns, (std::vector<std::string>{"a", "b"}));
    ASSERT_EQ(table.rows.size(), 2u);
    EXPECT_EQ(table.rows[0], (std::vector<std::string>{"x, \"y\"", " two\nlines "}));
    EXPECT_EQ(table.rows[1], (std::vector<std::string>{"  z ", ""}));
    EXPECT_EQ(csv_column(table, "b"), 1u);
    const auto error_of = [](const std::string& text) -> std::string {
        try {
            csv_column(read_csv(text, "t.csv"), "c");
        } catch (const Error& error) {
            return error.what();
        }
        return "";
    };
    EXPECT_EQ(error_of("a,b\n1,2\n"), "t.csv: has no column c, found a, b");
    EXPECT_EQ(error_of("a,b\n1,2,3\n"), "t.csv: row 2 has 3 fields, wanted 2 (a, b)");
    EXPECT_NE(error_of("a,b\n1,\"2\n").find("t.csv: row 2: cannot be read"), std::string::npos)
        << error_of("a,b\n1,\"2\n");
    EXPECT_NE(error_of("").find("t.csv: is empty"), std::string::npos);
}

// ---------------------------------------------------------------------------------------------------------------
// The programs

std::filesystem::path midi_data(const std::string& name) {
    return test::shared_folder() / "data" / "midi" / name;
}

// Everything from the first piece on.
std::string from_first_piece(const std::string& stream) {
    return stream.substr(std::min(stream.find("PIECE="), stream.size()));
}

std::vector<std::string> musicnet_arguments(const TemporaryFolder& folder, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"musicnet",
                                          "--archive",
                                          midi_data("musicnet_midis.tar.gz"),
                                          "--metadata",
                                          midi_data("musicnet_metadata.csv"),
                                          "--out",
                                          folder.path / "out.txt"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

std::vector<std::string> maestro_arguments(const TemporaryFolder& folder, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"maestro", "--archive", midi_data("maestro_sample.zip"), "--out",
                                          folder.path / "out.txt"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

TEST(PrepareMidi, MakesThePublishedCorpora) {
    NEEDS_SHARED();
    const nlohmann::json golden =
        nlohmann::json::parse(read_file(test::shared_folder() / "golden" / "midi" / "corpora.json"));
    for (const auto& [name, wanted] : golden.items()) {
        SCOPED_TRACE(name);
        const TemporaryFolder folder;
        const std::vector<std::string> arguments =
            name == "maestro_controls"
                ? maestro_arguments(folder, {"--split", "train", "--selection", "random", "--seed", "5", "--max-files",
                                             "6", "--include-controls"})
                : musicnet_arguments(folder, {"--selection", "random", "--seed", name.substr(name.size() - 2),
                                              "--max-files", "64", "--include-programs"});
        const ProgramResult result = run_program("prepare_midi", arguments);
        ASSERT_EQ(result.exit_code, 0) << result.err;
        const std::string stream = read_file(folder.path / "out.txt"), pieces = from_first_piece(stream);
        EXPECT_EQ(pieces.size(), wanted.at("bytes").get<size_t>());
        EXPECT_EQ(sha256_hex(pieces), wanted.at("sha256").get<std::string>());
        EXPECT_TRUE(pieces.starts_with(wanted.at("first_300").get<std::string>()));
        for (const std::string& line : lines_of(stream.substr(0, stream.size() - pieces.size())))
            EXPECT_TRUE(line.starts_with("#")) << line;
        const nlohmann::json manifest = *read_manifest(folder.path / "out.txt");
        for (const auto& [count, value] : wanted.at("stats").items())
            EXPECT_EQ(manifest.at("counts").at(count), value) << count;
        std::vector<std::string> order;
        for (const auto& piece : manifest.at("pieces"))
            order.push_back(piece.at(piece.contains("id") ? "id" : "file").get<std::string>());
        EXPECT_EQ(order, wanted.at("pieces_in_order").get<std::vector<std::string>>());
        EXPECT_EQ(manifest.at("skipped").size(), manifest.at("counts").at("skipped_pieces"));
    }
}

// Sizes and SHA-256 by a reader and tokeniser of its own in Python, on mido 1.2.10.
TEST(PrepareMidi, MakesOtherSelections) {
    NEEDS_SHARED();
    struct Selection {
        bool is_maestro;
        std::vector<std::string> options;
        size_t pieces, bytes;
        std::string sha256;
    };
    const std::vector<Selection> selections = {
        {false,
         {"--selection", "shortest", "--max-files", "20"},
         20,
         512073,
         "83fa3c09bb08158f6027759f83b179b0b452e3f0d6a32fd7e7cc59b511a888ba"},
        {false,
         {"--selection", "longest", "--max-files", "5", "--max-events-per-piece", "1000", "--grid-ms", "10",
          "--max-delta", "99"},
         5,
         85675,
         "cf84468b392438518045f43722a1ae14b7ae2bbcd2c3a25df15b0f7ad2505ce6"},
        {false,
         {"--composer", "bach", "--include-controls", "--include-programs", "--max-events-per-piece", "300"},
         60,
         313034,
         "cb734b61b4051a8bd3d0f01c2010c5d253ca2ce11d828277677627a5cbac77d1"},
        {false,
         {"--ensemble", "String Quartet", "--selection", "random", "--seed", "7", "--max-files", "8", "--grid-ms",
          "12.5", "--max-delta", "2000", "--max-events-per-piece", "700"},
         8,
         96283,
         "794485e50f3a416e60cba037ece4e30d05e2491d815b7b35c4769f60703ff0b6"},
        {true,
         {"--selection", "longest", "--max-files", "3", "--include-controls", "--include-programs", "--grid-ms", "1",
          "--max-events-per-piece", "2000"},
         3,
         107041,
         "f310f5e5f98cd6e7898a1a89e8ac72cd9f35d999ed68edc7f684a0b4f2798195"},
        {true,
         {"--split", "validation"},
         2,
         469329,
         "4aa81cf02ae4001c1f9bc7f7ecfda0674751384b12f9b37af3cf6fa006abd57d"},
    };
    for (const Selection& selection : selections) {
        SCOPED_TRACE(fmt::format("{}", fmt::join(selection.options, " ")));
        const TemporaryFolder folder;
        const ProgramResult result =
            run_program("prepare_midi", selection.is_maestro ? maestro_arguments(folder, selection.options)
                                                             : musicnet_arguments(folder, selection.options));
        ASSERT_EQ(result.exit_code, 0) << result.err;
        const std::string pieces = from_first_piece(read_file(folder.path / "out.txt"));
        EXPECT_EQ(static_cast<size_t>(std::count(pieces.begin(), pieces.end(), '\n')), selection.pieces);
        EXPECT_EQ(pieces.size(), selection.bytes);
        EXPECT_EQ(sha256_hex(pieces), selection.sha256);
    }
}

TEST(PrepareMidi, TokenisesTheWholeOfMusicNetInUnderFiveSeconds) {
    NEEDS_SHARED();
    const TemporaryFolder folder;
    const ProgramResult result = run_program("prepare_midi", musicnet_arguments(folder, {}), {"OMP_NUM_THREADS=1"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("323 pieces"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("skipped: 7 files"), std::string::npos) << result.out;
    EXPECT_NE(
        result.err.find("skipped ID 2292: musicnet_midis/Bach/2292_prelude19.mid: byte 5024: the file ends early"),
        std::string::npos)
        << result.err;
    if (!test::is_fast_build()) GTEST_SKIP() << "the emulator, or a build without optimisation or with a sanitizer";
    EXPECT_LT(result.cpu_seconds, 5);
}

TEST(PrepareMidi, ReadsFilesAndFoldersOfOnesOwn) {
    const TemporaryFolder folder;
    const std::string note = "00 90 3c 40 60 80 3c 00";
    std::filesystem::create_directories(folder.path / "in" / "b");
    const auto put = [&](const std::string& name, const std::string& bytes) {
        write_file_atomically(folder.path / "in" / name, bytes);
    };
    put("b/long one.MID", one_track(hex("00 90 3c 40 81 40 80 3c 00" + kEnd)));
    put("c.midi", one_track(hex(note)));                             // no End of Track
    put("a.mid", one_track(hex("00 90 3c c8 30 80 3c 00" + kEnd)));  // a data byte over 127
    put("bad.mid", "nothing");
    put("two.kar", midi_header(2, 1, 96) + chunk("MTrk", hex(note + kEnd)));
    put("read me.txt", "text");
    const std::string out = folder.path / "out.txt";
    const auto run = [&](std::vector<std::string> more) {
        more.insert(more.begin(), {"files", folder.path / "in", "--out", out});
        return run_program("prepare_midi", more);
    };
    const auto pieces = [&]() { return from_first_piece(read_file(out)); };

    ProgramResult result = run({});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(pieces(),
              "PIECE=0000|DUR=0.25|FILE=a|d000.on060.v127.c0 d012.off060.c0\n"
              "PIECE=0001|DUR=1.00|FILE=long_one|d000.on060.v064.c0 d050.off060.c0\n"
              "PIECE=0002|DUR=0.50|FILE=c|d000.on060.v064.c0 d025.off060.c0\n");
    EXPECT_NE(result.err.find("bad.mid: byte 7: the file ends early, inside the header"), std::string::npos)
        << result.err;
    EXPECT_NE(result.err.find("two.kar: format 2"), std::string::npos) << result.err;
    EXPECT_NE(result.out.find("repaired: 1 data bytes over 127 clamped"), std::string::npos) << result.out;
    const nlohmann::json manifest = *read_manifest(out);
    EXPECT_EQ(manifest.at("repairs"),
              nlohmann::json::parse(R"({"data bytes over 127 clamped": 1, "missing Ends of Track": 1})"));
    EXPECT_EQ(manifest.at("skipped").size(), 2u);
    EXPECT_EQ(manifest.at("counts").at("skipped_pieces"), 2);
    EXPECT_TRUE(stream_matches(out, *read_manifest(out)));

    result = run({"--selection", "longest", "--max-files", "1"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(pieces(), "PIECE=0000|DUR=1.00|FILE=long_one|d000.on060.v064.c0 d050.off060.c0\n");
    result = run({"--selection", "shortest", "--max-files", "5", "--max-events-per-piece", "1"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.out.find("--max-files 5: there are no more than 3"), std::string::npos) << result.out;
    EXPECT_EQ(lines_of(pieces())[0], "PIECE=0000|DUR=0.25|FILE=a|d000.on060.v127.c0");
    result = run({"--mode", "strict"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NE(result.err.find("a.mid: byte 25: a data byte over 127 (0xc8)"), std::string::npos) << result.err;

    // Binary, and back to MIDI by the manifest alone.
    result = run({"--format", "binary", "--grid-ms", "10"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(read_file(out), hex("a3 9f 3c cc a0 3c  a3 90 3c d5 b7 a0 3c  a3 90 3c d3 c5 a0 3c"));
    const std::string back = folder.path / "back.mid";
    result = run_program("midi_from_tokens", {out, back});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    const MidiFile midi = read_midi(bytes_of(read_file(back)), "back.mid", MidiMode::strict);
    EXPECT_DOUBLE_EQ(midi.seconds, 1.75);
    result = run_program("midi_from_tokens", {out, back, "--piece", "1", "--grid-ms", "20"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_DOUBLE_EQ(read_midi(bytes_of(read_file(back)), "back.mid", MidiMode::strict).seconds, 2);
    expect_error(run_program("midi_from_tokens", {out, back, "--piece", "3"}), "midi_from_tokens", 1,
                 {"has 3 pieces, wanted piece 3"});
    EXPECT_TRUE(std::filesystem::exists(back));
}

TEST(PrepareMidi, RefusesWrongInput) {
    const TemporaryFolder folder;
    const std::string out = folder.path / "out.txt", good = folder.path / "good.mid", bad = folder.path / "bad.mid";
    write_file_atomically(good, one_track(hex("00 90 3c 40" + kEnd)));
    write_file_atomically(bad, "nothing");
    const auto refuses = [&](std::vector<std::string> arguments, int exit_code, const std::vector<std::string>& parts) {
        SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
        expect_error(run_program("prepare_midi", arguments), "prepare_midi", exit_code, parts);
        EXPECT_FALSE(std::filesystem::exists(out));
    };
    refuses({}, 2, {"subcommand"});
    refuses({"files", "--out", out}, 2, {"PATH"});
    refuses({"files", folder.path / "absent", "--out", out}, 1, {"absent", "no such file or folder"});
    std::filesystem::create_directory(folder.path / "empty");
    refuses({"files", folder.path / "empty", "--out", out}, 1, {"empty", "holds no .mid"});
    refuses({"files", good, "--out", out, "--selection", "longets"}, 2,
            {"--selection longets: wanted one of shortest, longest, random, metadata (did you mean longest?)"});
    refuses({"files", good, "--out", out, "--format", "json"}, 2, {"--format json: wanted one of text, binary"});
    refuses({"files", good, "--out", out, "--mode", "loose"}, 2, {"--mode loose"});
    refuses({"files", good, "--out", out, "--grid-ms", "0"}, 2,
            {"--grid-ms: found 0, wanted milliseconds from 0.1 to 10000"});
    refuses({"files", good, "--out", out, "--grid-ms", "nan"}, 2, {"--grid-ms"});
    refuses({"files", good, "--out", out, "--max-delta", "0"}, 2,
            {"--max-delta: found 0, wanted a whole number from 1 to 999999"});
    refuses({"files", good, "--out", out, "--max-files", "0"}, 2, {"--max-files: found 0"});
    refuses({"files", good, "--out", out, "--max-events-per-piece", "-1"}, 2, {"--max-events-per-piece: found -1"});
    refuses({"files", good, "--out", out, "--seed", "99999999999999999999"}, 2, {"--seed: found 99999999999999999999"});
    refuses({"files", "", "--out", out}, 2, {"PATH: is empty"});
    refuses({"files", good, "--out", ""}, 2, {"--out: is empty"});
    refuses({"files", "/dev/zero", "--out", out}, 1, {"/dev/zero: is a device or a pipe"});
    refuses({"files", good, "--out", out, "--seed", "-1"}, 2, {"--seed: found -1"});
    refuses({"files", good, "--out", out, "--split", "train"}, 2, {"--split"});
    refuses({"files", good, "--out", good}, 2, {"--out", "would replace", "good.mid"});
    refuses({"files", good, "--out", folder.path / "empty"}, 2, {"is a folder"});
    refuses({"maestro", "--archive", folder.path / "absent.zip", "--out", out}, 1, {"--archive", "no such file"});
    const ProgramResult nothing = run_program("prepare_midi", {"files", bad, "--out", out});
    EXPECT_EQ(nothing.exit_code, 1);
    EXPECT_NE(nothing.err.find("prepare_midi: error: none of 1 files could be read"), std::string::npos) << nothing.err;
    EXPECT_FALSE(std::filesystem::exists(out));

    // A file that data_prep did not write is not replaced.
    write_file_atomically(out, "mine");
    expect_error(run_program("prepare_midi", {"files", good, "--out", out}), "prepare_midi", 2,
                 {"--force replaces it"});
    EXPECT_EQ(read_file(out), "mine");
}

TEST(PrepareMidi, RefusesArchivesWithoutTheirMetadata) {
    NEEDS_SHARED();
    const TemporaryFolder folder;
    const std::string csv = folder.path / "m.csv";
    write_file_atomically(csv, "id,composer\n1,Bach\n");
    const auto refuses = [&](std::vector<std::string> arguments, const std::vector<std::string>& parts) {
        SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
        arguments.insert(arguments.end(), {"--out", folder.path / "out.txt"});
        const ProgramResult result = run_program("prepare_midi", arguments);
        EXPECT_EQ(result.exit_code, 1);
        for (const std::string& part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    };
    const std::string archive = midi_data("musicnet_midis.tar.gz");
    refuses({"musicnet", "--archive", archive, "--metadata", csv}, {csv + ": has no column composition"});
    write_file_atomically(csv, "id,composer,composition,movement,ensemble,seconds\n17x,a,b,c,d,1\n");
    refuses({"musicnet", "--archive", archive, "--metadata", csv}, {"row 2: the id is \"17x\", wanted a number"});
    write_file_atomically(csv, "id,composer,composition,movement,ensemble,seconds\n17,a,b,c,d,long\n");
    refuses({"musicnet", "--archive", archive, "--metadata", csv}, {"row 2: the duration is \"long\", wanted seconds"});
    write_file_atomically(csv, "id,composer,composition,movement,ensemble,seconds\n17,a,b,c,d,1\n");
    refuses({"musicnet", "--archive", archive, "--metadata", csv},
            {"skipped ID 17: is not in the archive", "none of 1 files could be read"});
    refuses({"musicnet", "--archive", archive, "--metadata", csv, "--composer", "Satie"}, {"no file of", "--composer"});
    refuses({"maestro", "--archive", csv}, {csv + ": cannot be read as an archive"});
    refuses({"maestro", "--archive", archive}, {"holds 0 CSV files, wanted one with the metadata"});
}

std::string maestro_csv(const std::vector<std::string>& files) {
    std::string csv = "canonical_composer,canonical_title,split,year,midi_filename,audio_filename,duration\n";
    for (const std::string& file : files) csv += "A,B,train,2018," + file + ",x.wav,1\n";
    return csv;
}

TEST(PrepareMidi, SkipsWhatCannotBeReadFromAnArchiveAndTakesTheNext) {
    const TemporaryFolder folder;
    const std::string out = folder.path / "out.txt", archive = folder.path / "a.zip";
    const auto run = [&](const std::string& zip, const std::vector<std::string>& more) {
        write_file_atomically(archive, zip);
        std::vector<std::string> arguments = {"maestro", "--archive", archive, "--out", out, "--force"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return run_program("prepare_midi", arguments);
    };
    const auto note = [](uint8_t pitch) {
        return one_track(hex("00 90") + static_cast<char>(pitch) + hex("40 00 ff 2f 00")) + std::string(2000, 'x');
    };
    const std::string header = "|SPLIT=train|DUR=1.00|COMP=A|TITLE=B|";
    std::string zip = zip_of({{"m/m.csv", maestro_csv({"1.midi", "2.midi", "gone.midi", "M\u00e9.midi", "2.midi"})},
                              {"m/1.midi", note(1)},
                              {"m/2.midi", note(2)},
                              {"m/M\u00e9.midi", note(3)}});
    // A byte of the first file; its checksum no longer fits.
    const size_t at = zip.find("1.midi") + 40;
    zip[at] = static_cast<char>(zip[at] ^ 1);
    ProgramResult result = run(zip, {});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(from_first_piece(read_file(out)), "PIECE=0000" + header + "d000.on002.v064.c0\nPIECE=0001" + header +
                                                    "d000.on002.v064.c0\nPIECE=0002" + header + "d000.on003.v064.c0\n");
    EXPECT_NE(result.err.find("skipped m/1.midi: cannot be read from the archive: "), std::string::npos) << result.err;
    EXPECT_NE(result.err.find("skipped gone.midi: is not in the archive"), std::string::npos) << result.err;
    result = run(zip, {"--max-files", "1"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(from_first_piece(read_file(out)), "PIECE=0000" + header + "d000.on002.v064.c0\n");
}

TEST(MidiFromTokens, ReadsTextWithItsHeaderLineAndSaysWhatItDrops) {
    const TemporaryFolder folder;
    const std::string stream = folder.path / "s.txt", midi = folder.path / "s.mid";
    TokenOptions options;
    options.grid_ms = 40;
    write_file_atomically(stream, stream_header(options) + "PIECE=0000|A=b|d000.on060.v064.c0 oops d025.off060.c0\n");
    ProgramResult result = run_program("midi_from_tokens", {stream, midi});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err, fmt::format("midi_from_tokens: dropped 1 malformed tokens, the first \"oops\" at byte {}\n",
                                      read_file(stream).find("oops")));
    EXPECT_DOUBLE_EQ(read_midi(bytes_of(read_file(midi)), "s.mid", MidiMode::strict).seconds, 1);

    const auto refuses = [&](std::vector<std::string> arguments, int exit_code, const std::vector<std::string>& parts) {
        SCOPED_TRACE(fmt::format("{}", fmt::join(arguments, " ")));
        const std::string before = read_file(midi);
        const ProgramResult refused = run_program("midi_from_tokens", arguments);
        EXPECT_EQ(refused.exit_code, exit_code);
        for (const std::string& part : parts) EXPECT_NE(refused.err.find(part), std::string::npos) << refused.err;
        EXPECT_EQ(read_file(midi), before);
    };
    refuses({}, 2, {"STREAM"});
    refuses({folder.path / "absent.txt", midi}, 1, {"absent.txt"});
    refuses({stream, stream}, 2, {"is the stream itself"});
    refuses({stream, stream + ".json"}, 2, {"is the manifest of the stream"});
    refuses({"/dev/zero", midi}, 1, {"is a device"});
    refuses({stream, folder.path / "absent" / "s.mid"}, 2, {"absent"});
    refuses({stream, midi, "--format", "midi"}, 2, {"--format midi: wanted text or binary"});
    refuses({stream, midi, "--grid-ms", "0"}, 2, {"--grid-ms: found 0"});
    refuses({stream, midi, "--piece", "-1"}, 2, {"--piece: found -1"});
    write_file_atomically(stream, "");
    refuses({stream, midi}, 1, {"is empty"});
    write_file_atomically(stream, "no events here");
    refuses({stream, midi}, 1, {"holds no event that can be read as text"});
}

// Another program reads what midi_from_tokens writes, and hears something.
TEST(MidiFromTokens, WritesWhatASynthesizerPlays) {
    const TemporaryFolder folder;
    const std::string stream = folder.path / "s.txt", midi = folder.path / "s.mid";
    write_file_atomically(stream,
                          "PIECE=0000|A=b|d000.pg040.c3 d000.on060.v100.c3 d050.off060.c3 d000.on067.v100.c3\n");
    ASSERT_EQ(run_program("midi_from_tokens", {stream, midi}).exit_code, 0);
    const std::optional<int> loudest = test::loudest_sample_played(midi);
    if (!loudest) GTEST_SKIP() << "fluidsynth or its sounds (timgm6mb-soundfont) are not installed";
    EXPECT_GT(*loudest, 500);
}

}  // namespace
}  // namespace jetlag

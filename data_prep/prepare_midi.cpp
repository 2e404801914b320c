// prepare_midi maestro|musicnet|files: makes a token stream from MIDI files (data_prep/midi_tokens.h). The two corpora
// are read from their archives as published, file by file, without unpacking them to disk.
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <tuple>

#include "data_prep/archive.h"
#include "data_prep/midi_tokens.h"
#include "data_prep/source.h"
#include "src/command_line.h"
#include "src/config.h"
#include "src/csv.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"
#include "src/midi.h"
#include "src/progress.h"
#include "src/random.h"

using namespace jetlag;

namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;  // of an archive

const PublishedFile kMaestro = {
    .address = "https://storage.googleapis.com/magentadata/datasets/maestro/v3.0.0/maestro-v3.0.0-midi.zip",
    .size = 58416533,
    .sha256 = "70470ee253295c8d2c71e6d9d4a815189e35c89624b76d22fce5a019d5dde12c"};
const PublishedFile kMusicnetMidi = {.address = "https://zenodo.org/records/5120004/files/musicnet_midis.tar.gz",
                                     .size = 2601302,
                                     .sha256 = "943cc47731ec5f397bd6fbab4dff78342472890cd484bd30ffb2e16047eef908"};
const PublishedFile kMusicnetMetadata = {.address = "https://zenodo.org/records/5120004/files/musicnet_metadata.csv",
                                         .size = 43775,
                                         .sha256 = "1308d938bafb594e3b0471f2bdda3630da352f881857f265f92114cf398de7ca"};

// What the command line says; numbers are texts until they are checked.
struct Request {
    std::string corpus;  // maestro, musicnet, files
    std::string archive, metadata;
    std::vector<std::string> paths;  // files
    std::string split = "all", composer, ensemble;
    std::string selection = "metadata";
    std::optional<int64_t> max_files;
    int64_t seed = 0;
    std::string max_files_text, seed_text, grid_text, max_delta_text, max_events_text;
    std::string mode;
    std::string format = "text";
    TokenOptions tokens;
    std::string out;
    bool force = false;
};

// A file that may become a piece.
struct Candidate {
    std::string file;          // where it is in the archive, or on disk; "" if it is not there
    std::string path;          // for the order: as the metadata gives it
    int64_t id = 0;            // MusicNet's number; 0 elsewhere
    double seconds = 0;        // as the metadata gives it, or of the file
    std::string header;        // the fields after PIECE=NNNN|
    std::string why_not = "";  // why it cannot be read, if that is known already
};

struct Piece {
    Candidate candidate;
    std::string events;  // encoded, without the piece's header
    TokenCounts counts;
    std::array<int64_t, kMidiRepairs> repairs = {};
};

struct Corpus {
    std::vector<Candidate> candidates;  // in the order of the metadata
    std::optional<Source> archive, metadata;
};

double parse_seconds(const std::string& text, const CsvTable& table, size_t row) {
    double seconds = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error != std::errc() || end != text.data() + text.size() || !(seconds >= 0 && seconds <= kMaxMidiSeconds))
        fail("{}: row {}: the duration is \"{}\", wanted seconds", table.label, row + 2, text);
    return seconds;
}

std::string lower(std::string text) {
    for (char& c : text)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return text;
}

bool is_midi_name(const std::string& path) {
    const std::string extension = lower(std::filesystem::path(path).extension().string());
    return extension == ".mid" || extension == ".midi" || extension == ".rmi" || extension == ".kar";
}

// --composer Bach finds "Johann Sebastian Bach".
bool mentions(const std::string& text, const std::string& part) {
    return lower(text).find(lower(part)) != std::string::npos;
}

std::vector<std::string> archive_files(const Source& archive) {
    std::vector<std::string> files;
    read_archive(
        archive.bytes, archive.from, kMaxFileBytes,
        [&](const std::string& path) {
            files.push_back(path);
            return false;
        },
        [](ArchiveFile) {});
    return files;
}

Corpus open_maestro(const Request& request) {
    Corpus corpus;
    corpus.archive = read_source("--archive", request.archive.empty() ? kMaestro.address : request.archive);
    check_source(*corpus.archive, kMaestro, "MAESTRO v3.0.0", "--archive PATH takes other content");
    const std::string& label = corpus.archive->from;
    std::string text;
    if (!request.metadata.empty()) {
        corpus.metadata = read_source("--metadata", request.metadata);
        text = corpus.metadata->bytes;
    } else {
        std::vector<std::string> names;
        const auto is_table = [](const std::string& path) { return lower(path).ends_with(".csv"); };
        read_archive(corpus.archive->bytes, label, kMaxFileBytes, is_table, [&](ArchiveFile file) {
            if (!file.fault.empty()) fail("{}: {} {}", label, file.path, file.fault);
            names.push_back(file.path);
            text = std::move(file.contents);
        });
        if (names.size() != 1)
            fail("{}: holds {} CSV files{}, wanted one with the metadata (or give --metadata)", label, names.size(),
                 names.empty() ? "" : fmt::format(" ({})", fmt::join(names, ", ")));
    }
    const CsvTable table = read_csv(text, corpus.metadata ? corpus.metadata->from : label + " (its CSV)");
    const size_t composer = csv_column(table, "canonical_composer"), title = csv_column(table, "canonical_title"),
                 split = csv_column(table, "split"), path = csv_column(table, "midi_filename"),
                 duration = csv_column(table, "duration");
    const std::vector<std::string> files = archive_files(*corpus.archive);
    for (size_t i = 0; i < table.rows.size(); i++) {
        const std::vector<std::string>& row = table.rows[i];
        if (request.split != "all" && row[split] != request.split) continue;
        if (!mentions(row[composer], request.composer)) continue;
        Candidate candidate;
        candidate.path = row[path];
        candidate.seconds = parse_seconds(row[duration], table, i);
        const auto is_it = [&](const std::string& file) {
            return file == row[path] || file.ends_with("/" + row[path]);
        };
        if (const auto at = std::find_if(files.begin(), files.end(), is_it); at != files.end()) candidate.file = *at;
        candidate.header = fmt::format("SPLIT={}|DUR={:.2f}|COMP={}|TITLE={}|", header_field(row[split]),
                                       candidate.seconds, header_field(row[composer]), header_field(row[title]));
        corpus.candidates.push_back(candidate);
    }
    return corpus;
}

Corpus open_musicnet(const Request& request) {
    Corpus corpus;
    corpus.archive = read_source("--archive", request.archive.empty() ? kMusicnetMidi.address : request.archive);
    check_source(*corpus.archive, kMusicnetMidi, "MusicNet MIDI archive", "--archive PATH takes other content");
    corpus.metadata =
        read_source("--metadata", request.metadata.empty() ? kMusicnetMetadata.address : request.metadata);
    check_source(*corpus.metadata, kMusicnetMetadata, "MusicNet metadata", "--metadata PATH takes other content");
    const CsvTable table = read_csv(corpus.metadata->bytes, corpus.metadata->from);
    const size_t id = csv_column(table, "id"), composer = csv_column(table, "composer"),
                 composition = csv_column(table, "composition"), movement = csv_column(table, "movement"),
                 ensemble = csv_column(table, "ensemble"), seconds = csv_column(table, "seconds");
    const std::vector<std::string> files = archive_files(*corpus.archive);
    for (size_t i = 0; i < table.rows.size(); i++) {
        const std::vector<std::string>& row = table.rows[i];
        if (!mentions(row[composer], request.composer) || !mentions(row[ensemble], request.ensemble)) continue;
        Candidate candidate;
        const auto [end, error] = std::from_chars(row[id].data(), row[id].data() + row[id].size(), candidate.id);
        if (error != std::errc() || end != row[id].data() + row[id].size())
            fail("{}: row {}: the id is \"{}\", wanted a number", table.label, i + 2, row[id]);
        candidate.seconds = parse_seconds(row[seconds], table, i);
        // The archive's files are COMPOSER/ID_NAME.mid.
        const auto is_it = [&](const std::string& file) {
            return std::filesystem::path(file).filename().string().starts_with(row[id] + "_") && is_midi_name(file);
        };
        if (const auto at = std::find_if(files.begin(), files.end(), is_it); at != files.end()) candidate.file = *at;
        candidate.path = candidate.file;
        candidate.header = fmt::format("ID={}|SEC={:.2f}|COMP={}|ENS={}|WORK={}|MOVE={}|", header_field(row[id]),
                                       candidate.seconds, header_field(row[composer]), header_field(row[ensemble]),
                                       header_field(row[composition]), header_field(row[movement]));
        corpus.candidates.push_back(candidate);
    }
    return corpus;
}

// The MIDI files that the paths name: files as they are, folders with all below them, in the order of their names.
std::vector<std::string> list_files(const std::vector<std::string>& paths) {
    std::vector<std::string> files;
    for (const std::string& path : paths) {
        if (!std::filesystem::exists(path)) fail("{}: no such file or folder", path);
        if (!std::filesystem::is_directory(path)) {
            if (!std::filesystem::is_regular_file(path)) fail("{}: is a device or a pipe, wanted a file", path);
            files.push_back(path);
            continue;
        }
        std::vector<std::string> found;
        // What cannot be looked at, a link to nowhere or to itself, is no file.
        std::error_code fault;
        const auto options = std::filesystem::directory_options::skip_permission_denied;
        std::filesystem::recursive_directory_iterator entry(path, options, fault), end;
        for (; entry != end; entry.increment(fault))
            if (entry->is_regular_file(fault) && is_midi_name(entry->path().string()))
                found.push_back(entry->path().string());
        if (found.empty()) fail("{}: holds no .mid, .midi, .rmi or .kar file", path);
        std::sort(found.begin(), found.end());
        files.insert(files.end(), found.begin(), found.end());
    }
    return files;
}

MidiMode reading_mode(const Request& request) {
    return request.mode == "strict" ? MidiMode::strict : MidiMode::lenient;
}

std::span<const uint8_t> bytes_of(const std::string& text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

Corpus open_files(const Request& request) {
    Corpus corpus;
    // Durations are in no table here; only two orders need them.
    const bool needs_seconds = request.selection == "shortest" || request.selection == "longest";
    for (const std::string& file : list_files(request.paths)) {
        if (same_place(file, request.out) || same_place(file, manifest_path(request.out)))
            fail_usage("--out {}: would replace {}", request.out, file);
        Candidate candidate;
        candidate.file = candidate.path = file;
        if (needs_seconds) try {
                candidate.seconds = read_midi(bytes_of(read_file(file)), file, reading_mode(request)).seconds;
            } catch (const Error& error) {
                candidate.why_not = error.what();
            }
        corpus.candidates.push_back(candidate);
    }
    return corpus;
}

// The candidates in the order of the selection.
std::vector<Candidate> in_order(const Request& request, std::vector<Candidate> candidates) {
    if (request.selection == "random") {
        std::mt19937 engine = make_python_random(static_cast<uint64_t>(request.seed));
        std::vector<Candidate> shuffled;
        for (size_t i : python_shuffled(engine, candidates.size())) shuffled.push_back(candidates[i]);
        return shuffled;
    }
    const double sign = request.selection == "shortest" ? 1 : request.selection == "longest" ? -1 : 0;
    std::stable_sort(candidates.begin(), candidates.end(), [&](const Candidate& a, const Candidate& b) {
        return std::tuple(sign * a.seconds, a.id, a.path) < std::tuple(sign * b.seconds, b.id, b.path);
    });
    return candidates;
}

struct Prepared {
    std::vector<Piece> pieces;
    std::vector<std::pair<Candidate, std::string>> skipped;  // with the reason
};

Piece make_piece(const Request& request, const Candidate& candidate, const std::string& bytes) {
    Piece piece;
    piece.candidate = candidate;
    const MidiFile midi = read_midi(bytes_of(bytes), candidate.file, reading_mode(request));
    piece.repairs = midi.repairs;
    piece.events =
        encode_piece("", stream_events(midi, candidate.file, request.tokens, piece.counts), request.tokens.format);
    if (request.corpus == "files" && piece.counts.events == 0) fail("{}: holds no event to write", candidate.file);
    if (request.corpus == "files")
        piece.candidate.header = fmt::format("DUR={:.2f}|FILE={}|", midi.seconds,
                                             header_field(std::filesystem::path(candidate.file).stem().string()));
    return piece;
}

// Takes candidates in order until `max_files` could be read. An archive is gone through once for as many candidates as
// are still wanted, and again for those that take the places of files that could not be read.
Prepared prepare_pieces(const Request& request, const Corpus& corpus, const std::vector<Candidate>& candidates) {
    Prepared prepared;
    Progress progress = make_progress();
    const size_t wanted =
        request.max_files ? std::min(candidates.size(), static_cast<size_t>(*request.max_files)) : candidates.size();
    int64_t events = 0;
    const auto show = [&](size_t done) {
        draw_progress(progress, request.corpus, static_cast<double>(done) / static_cast<double>(wanted),
                      fmt::format("{} of {} pieces, {} events", done, wanted, events));
    };
    for (size_t next = 0; prepared.pieces.size() < wanted && next < candidates.size();) {
        const size_t first = next, count = std::min(wanted - prepared.pieces.size(), candidates.size() - next);
        std::vector<std::optional<Piece>> pieces(count);
        std::vector<std::string> reasons(count, "is not in the archive");
        size_t done = 0;
        const auto take = [&](size_t i, const std::string& bytes) {
            try {
                pieces[i] = make_piece(request, candidates[first + i], bytes);
                events += pieces[i]->counts.events;
            } catch (const Error& error) {
                reasons[i] = error.what();
            }
            show(prepared.pieces.size() + ++done);
        };
        if (corpus.archive) {
            std::multimap<std::string, size_t> places;  // two rows of the metadata may name one file
            for (size_t i = 0; i < count; i++)
                if (!candidates[first + i].file.empty()) places.insert({candidates[first + i].file, i});
            const auto take_file = [&](ArchiveFile file) {
                const auto [begin, end] = places.equal_range(file.path);
                for (auto place = begin; place != end; ++place)
                    if (file.fault.empty())
                        take(place->second, file.contents);
                    else
                        reasons[place->second] = file.fault;
            };
            if (!places.empty())
                read_archive(
                    corpus.archive->bytes, corpus.archive->from, kMaxFileBytes,
                    [&](const std::string& path) { return places.contains(path); }, take_file);
        } else {
            for (size_t i = 0; i < count; i++) {
                reasons[i] = candidates[first + i].why_not;
                if (!reasons[i].empty()) continue;
                std::string bytes;
                try {
                    bytes = read_file(candidates[first + i].file);
                } catch (const Error& error) {
                    reasons[i] = error.what();
                    continue;
                }
                take(i, bytes);
            }
        }
        for (size_t i = 0; i < count; i++)
            if (pieces[i])
                prepared.pieces.push_back(std::move(*pieces[i]));
            else
                prepared.skipped.push_back({candidates[first + i], reasons[i]});
        next += count;
    }
    clear_progress(progress);
    return prepared;
}

void add(TokenCounts& sum, const TokenCounts& counts) {
    sum.events += counts.events;
    sum.note_on += counts.note_on;
    sum.note_off += counts.note_off;
    sum.control += counts.control;
    sum.program += counts.program;
    sum.skipped_messages += counts.skipped_messages;
}

nlohmann::ordered_json repairs_json(const std::array<int64_t, kMidiRepairs>& repairs) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    for (int i = 0; i < kMidiRepairs; i++)
        if (repairs[i] > 0) json[midi_repair_name(static_cast<MidiRepair>(i))] = repairs[i];
    return json;
}

std::string label_of(const Candidate& candidate) {
    if (candidate.id == 0) return candidate.file.empty() ? candidate.path : candidate.file;
    return candidate.file.empty() ? fmt::format("ID {}", candidate.id)
                                  : fmt::format("ID {} ({})", candidate.id, candidate.file);
}

int prepare(const Request& request, const std::vector<std::string>& arguments) {
    const bool needs_network =
        request.corpus == "maestro" ? request.archive.empty() : request.archive.empty() || request.metadata.empty();
    if (const auto old = read_manifest(request.out);
        request.corpus != "files" && needs_network && !request.force && old && old->contains("arguments") &&
        old->at("arguments") == arguments && stream_matches(request.out, *old)) {
        fmt::print("{}: up to date, {} bytes, sha256 {} (--force makes it anew)\n", request.out,
                   old->at("size").get<uint64_t>(), old->at("sha256").get<std::string>());
        return kExitGood;
    }
    const Corpus corpus = request.corpus == "maestro"    ? open_maestro(request)
                          : request.corpus == "musicnet" ? open_musicnet(request)
                                                         : open_files(request);
    if (corpus.candidates.empty())
        fail("no file of {} has what {} want", corpus.metadata ? corpus.metadata->from : corpus.archive->from,
             request.corpus == "maestro" ? "--split and --composer" : "--composer and --ensemble");
    const Prepared prepared = prepare_pieces(request, corpus, in_order(request, corpus.candidates));
    for (const auto& [candidate, reason] : prepared.skipped)
        print_note("skipped {}\n",
                   one_line(reason.starts_with(candidate.file) && !candidate.file.empty()
                                ? (candidate.id != 0 ? fmt::format("ID {}: ", candidate.id) : "") + reason
                                : label_of(candidate) + ": " + reason));
    if (prepared.pieces.empty()) fail("none of {} files could be read", prepared.skipped.size());

    std::string stream = request.tokens.format == TokenFormat::text ? stream_header(request.tokens) : "";
    TokenCounts counts;
    std::array<int64_t, kMidiRepairs> repairs = {};
    nlohmann::ordered_json pieces = nlohmann::ordered_json::array(), skipped = nlohmann::ordered_json::array();
    for (size_t i = 0; i < prepared.pieces.size(); i++) {
        const Piece& piece = prepared.pieces[i];
        if (request.tokens.format == TokenFormat::text)
            stream += fmt::format("PIECE={:04}|{}", i, piece.candidate.header);
        stream += piece.events;
        add(counts, piece.counts);
        nlohmann::ordered_json json;
        json["piece"] = i;
        if (piece.candidate.id != 0) json["id"] = fmt::format("{}", piece.candidate.id);
        json["file"] = piece.candidate.file;
        json["events"] = piece.counts.events;
        if (const nlohmann::ordered_json own = repairs_json(piece.repairs); !own.empty()) json["repairs"] = own;
        for (int kind = 0; kind < kMidiRepairs; kind++) repairs[kind] += piece.repairs[kind];
        pieces.push_back(json);
    }
    for (const auto& [candidate, reason] : prepared.skipped) {
        nlohmann::ordered_json json;
        if (candidate.id != 0) json["id"] = fmt::format("{}", candidate.id);
        json["file"] = candidate.file.empty() ? candidate.path : candidate.file;
        json["reason"] = reason;
        skipped.push_back(json);
    }

    const TokenOptions& tokens = request.tokens;
    nlohmann::ordered_json manifest;
    manifest["name"] = std::filesystem::path(request.out).stem().string();
    manifest["size"] = nullptr;  // these two are filled in by write_stream; here they keep their place
    manifest["sha256"] = nullptr;
    manifest["corpus"] = request.corpus;
    if (corpus.archive) {
        manifest["source"] = source_json(*corpus.archive);
        manifest["checked"] = corpus.archive->is_checked;
        manifest["licence"] = request.corpus == "maestro" ? "CC BY-NC-SA 4.0" : "CC BY 4.0";
    }
    if (corpus.metadata) manifest["metadata"] = source_json(*corpus.metadata);
    manifest["options"] = {{"selection", request.selection},
                           {"max_files", request.max_files ? nlohmann::ordered_json(*request.max_files) : nullptr},
                           {"seed", request.seed},
                           {"split", request.split},
                           {"composer", request.composer},
                           {"ensemble", request.ensemble},
                           {"mode", request.mode},
                           {"format", request.format},
                           {"grid_ms", tokens.grid_ms},
                           {"max_delta", tokens.max_delta},
                           {"max_events_per_piece", tokens.max_events},
                           {"include_controls", tokens.controls},
                           {"include_programs", tokens.programs}};
    manifest["counts"] = {{"pieces", prepared.pieces.size()},
                          {"events", counts.events},
                          {"note_on", counts.note_on},
                          {"note_off", counts.note_off},
                          {"control", counts.control},
                          {"program", counts.program},
                          {"skipped_messages", counts.skipped_messages},
                          {"skipped_pieces", prepared.skipped.size()}};
    manifest["repairs"] = repairs_json(repairs);
    manifest["pieces"] = pieces;
    manifest["skipped"] = skipped;
    manifest["retrieved"] = time_text();
    manifest["program"] = "prepare_midi";
    manifest["arguments"] = arguments;
    write_stream(request.out, stream, manifest, request.force);

    fmt::print("{}: {} pieces, {} events ({} note on, {} note off, {} control, {} program), {} messages left out\n",
               request.out, prepared.pieces.size(), counts.events, counts.note_on, counts.note_off, counts.control,
               counts.program, counts.skipped_messages);
    for (int kind = 0; kind < kMidiRepairs; kind++)
        if (repairs[kind] > 0)
            fmt::print("repaired: {} {}\n", repairs[kind], midi_repair_name(static_cast<MidiRepair>(kind)));
    if (!prepared.skipped.empty()) fmt::print("skipped: {} files\n", prepared.skipped.size());
    if (request.max_files && std::ssize(prepared.pieces) < *request.max_files)
        fmt::print("--max-files {}: there are no more than {}\n", *request.max_files, prepared.pieces.size());
    fmt::print("{} bytes, sha256 {}\n", stream.size(), sha256_hex(stream));
    return kExitGood;
}

// What CLI11 cannot check, and what depends on the corpus.
void resolve(Request& request) {
    const auto check_choice = [](const std::string& option, const std::string& value,
                                 const std::vector<std::string>& choices) {
        if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
        const std::string near = nearest(value, choices);
        fail_usage("{} {}: wanted one of {}{}", option, value, fmt::join(choices, ", "),
                   near.empty() ? "" : fmt::format(" (did you mean {}?)", near));
    };
    check_choice("--split", request.split, {"train", "validation", "test", "all"});
    check_choice("--selection", request.selection, {"shortest", "longest", "random", "metadata"});
    check_choice("--format", request.format, {"text", "binary"});
    if (request.mode.empty()) request.mode = request.corpus == "files" ? "lenient" : "strict";
    check_choice("--mode", request.mode, {"strict", "lenient"});
    const auto whole = [](const std::string& option, const std::string& text, int64_t least, int64_t most,
                          int64_t otherwise) {
        return text.empty() ? otherwise : parse_whole(option, text, least, most);
    };
    TokenOptions& tokens = request.tokens;
    if (!request.max_files_text.empty())
        request.max_files = parse_whole("--max-files", request.max_files_text, 1, INT64_MAX);
    request.seed = whole("--seed", request.seed_text, 0, INT64_MAX, request.seed);
    tokens.max_delta = whole("--max-delta", request.max_delta_text, 1, kLargestDelta, tokens.max_delta);
    tokens.max_events = whole("--max-events-per-piece", request.max_events_text, 1, INT64_MAX, tokens.max_events);
    if (!request.grid_text.empty()) tokens.grid_ms = parse_grid(request.grid_text);
    request.tokens.format = request.format == "text" ? TokenFormat::text : TokenFormat::binary;
    if (request.out.empty())
        request.out = fmt::format("data/{}.{}", request.corpus == "files" ? "midi" : request.corpus,
                                  request.tokens.format == TokenFormat::text ? "txt" : "bin");
    if (std::filesystem::is_directory(request.out)) fail_usage("--out {}: is a folder, wanted a file", request.out);
    for (const std::string& source : {request.archive, request.metadata})
        if (!source.empty() && (same_place(source, request.out) || same_place(source, manifest_path(request.out))))
            fail_usage("--out {}: would replace {}", request.out, source);
    for (const std::string& path : request.paths)
        if (same_place(path, request.out) || same_place(path, manifest_path(request.out)))
            fail_usage("--out {}: would replace {}", request.out, path);
}

void add_common_options(CLI::App& app, Request& request) {
    app.add_option("--selection", request.selection,
                   "the order in which files are taken: shortest, longest, random, metadata (by path or number)")
        ->capture_default_str();
    const TokenOptions& defaults = request.tokens;
    app.add_option("--max-files", request.max_files_text, "stop at so many pieces (default: all)");
    app.add_option("--seed", request.seed_text, fmt::format("of the random selection (default: {})", request.seed));
    app.add_option("--grid-ms", request.grid_text,
                   fmt::format("step of time, in milliseconds (default: {})", defaults.grid_ms));
    app.add_option("--max-delta", request.max_delta_text,
                   fmt::format("longest time between two events, in steps (default: {})", defaults.max_delta));
    app.add_option("--max-events-per-piece", request.max_events_text,
                   fmt::format("cut a piece after so many events (default: {})", defaults.max_events));
    app.add_flag("--include-controls", request.tokens.controls, "write control changes, pedals among them");
    app.add_flag("--include-programs", request.tokens.programs, "write program changes (instruments)");
    app.add_option("--format", request.format, "text (events as words) or binary (one byte a token)")
        ->capture_default_str();
    app.add_option("--mode", request.mode,
                   "strict refuses what the study's reader refuses, lenient repairs (default: strict for the published "
                   "corpora, lenient for files)");
    app.add_option("--out", request.out,
                   "the stream to write (default: data/CORPUS.txt or .bin); the manifest is OUT.json");
    app.add_flag("--force", request.force, "make it anew even if it is up to date, or if the file there is not ours");
}

}  // namespace

int main(int argc, char** argv) {
    return run_main("prepare_midi", [&]() {
        CLI::App app{"Makes a token stream from MIDI files, and its JSON manifest."};
        app.require_subcommand(1);
        Request request;
        CLI::App* maestro = app.add_subcommand("maestro", "MAESTRO v3.0.0: piano performances, with pedals");
        CLI::App* musicnet = app.add_subcommand("musicnet", "MusicNet's reference MIDI files");
        CLI::App* files = app.add_subcommand("files", "MIDI files of your own");
        for (CLI::App* corpus : {maestro, musicnet}) {
            corpus->add_option("--archive", request.archive,
                               "take this file or http(s) address instead of the official address");
            corpus->add_option("--metadata", request.metadata,
                               corpus == maestro ? "take the CSV from here (default: the one in the archive)"
                                                 : "take the CSV from here instead of the official address");
            corpus->add_option("--composer", request.composer, "only composers whose name holds this, in any case");
        }
        maestro->add_option("--split", request.split, "train, validation, test or all")->capture_default_str();
        musicnet->add_option("--ensemble", request.ensemble, "only ensembles whose name holds this, in any case");
        files->add_option("PATH", request.paths, "MIDI files, or folders with all .mid, .midi, .rmi, .kar below them")
            ->required();
        for (CLI::App* corpus : {maestro, musicnet, files}) add_common_options(*corpus, request);
        if (!parse_command_line(app, argc, argv)) return kExitGood;
        CLI::App* chosen = app.get_subcommands().front();
        request.corpus = chosen->get_name();
        for (const CLI::Option* option : chosen->get_options())
            if (option->count() > 0 && option->get_items_expected_max() > 0)
                for (const std::string& value : option->results())
                    if (value.empty()) fail_usage("{}: is empty", option->get_name());
        resolve(request);
        return prepare(request, std::vector<std::string>(argv + 1, argv + argc));
    });
}

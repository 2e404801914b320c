// midi_from_tokens STREAM OUT: turns a token stream of either format (data_prep/midi_tokens.h) back into a MIDI file.
#include <fmt/ranges.h>
#include <algorithm>

#include "data_prep/midi_tokens.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"

using namespace jetlag;

namespace {

int convert(const std::string& stream_path, const std::string& out, std::string format_name, double grid_ms,
            int64_t only_piece) {
    check_input_path("STREAM", stream_path, kExitFailed);
    const std::string stream = read_file(stream_path);
    if (stream.empty()) fail("{}: is empty", stream_path);

    const TokenOptions known = stream_options(stream_path, stream);
    const TokenFormat format = format_name.empty()     ? known.format
                               : format_name == "text" ? TokenFormat::text
                                                       : TokenFormat::binary;
    DecodedStream decoded = decode_stream(stream, format);
    if (grid_ms == 0) grid_ms = known.grid_ms;
    if (decoded.dropped > 0)
        print_note("midi_from_tokens: dropped {} malformed tokens, the first {}\n", decoded.dropped,
                   decoded.first_dropped);
    if (only_piece >= 0) {
        if (only_piece >= std::ssize(decoded.pieces))
            fail("{}: has {} pieces, wanted piece {} (they count from 0)", stream_path, decoded.pieces.size(),
                 only_piece);
        decoded.pieces = {decoded.pieces[static_cast<size_t>(only_piece)]};
    }
    const int64_t events = event_count(decoded);
    if (events == 0)
        fail("{}: holds no event that can be read as {}", stream_path, format == TokenFormat::text ? "text" : "binary");
    const MidiFile midi = pieces_to_midi(decoded.pieces, grid_ms, stream_path);
    write_file_atomically(out, write_midi(midi, stream_path));
    fmt::print("{}: {} pieces, {} events, {:.0f} s\n", out, decoded.pieces.size(), events,
               static_cast<double>(midi.tracks[0].last_tick) * grid_ms / 1000);
    return kExitGood;
}

}  // namespace

int main(int argc, char** argv) {
    return run_main("midi_from_tokens", [&]() {
        CLI::App app{
            "Turns a token stream, text or binary, back into a MIDI file: all its pieces, one after the other."};
        std::string stream, out, format;
        std::string grid, piece;
        app.add_option("STREAM", stream, "a stream that prepare_midi or generate wrote")->required();
        app.add_option("OUT", out, "the MIDI file to write")->required();
        app.add_option("--format", format, "text or binary (default: as the manifest says, or as it looks)");
        app.add_option("--grid-ms", grid, "step of time (default: as the stream or its manifest says, or 20)");
        app.add_option("--piece", piece, "only this piece, counted from 0 (default: all)");
        if (!parse_command_line(app, argc, argv)) return kExitGood;
        if (!format.empty() && format != "text" && format != "binary")
            fail_usage("--format {}: wanted text or binary", format);
        const double grid_ms = app.count("--grid-ms") > 0 ? parse_grid(grid) : 0;
        const int64_t only_piece = app.count("--piece") > 0 ? parse_whole("--piece", piece, 0, INT64_MAX) : -1;
        check_output_path("OUT", out);
        if (same_place(stream, out)) fail_usage("OUT {}: is the stream itself", out);
        if (same_place(manifest_path(stream), out)) fail_usage("OUT {}: is the manifest of the stream", out);
        return convert(stream, out, format, grid_ms, only_piece);
    });
}

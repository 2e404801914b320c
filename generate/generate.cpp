// generate: continues a prompt with tokens drawn from a trained model, one at a time.
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <optional>

#include "data_prep/midi_tokens.h"
#include "generate/sampling.h"
#include "models/checkpoint.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/interrupt.h"
#include "src/manifest.h"
#include "src/midi.h"
#include "train/run_folder.h"

namespace jetlag {
namespace {

constexpr int64_t kMaxTokens = 32768;  // of prompt and continuation together

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// ---------------------------------------------------------------------------------------------------------------
// Options

// Where the prompt comes from: one of the three.
struct PromptSource {
    std::string text, file, midi;
    std::optional<int64_t> tokens;  // only so many, from the first on
};

void check_prompt(const CLI::App& app, const PromptSource& source) {
    const std::array<const char*, 3> options = {"--prompt", "--prompt-file", "--prompt-midi"};
    std::vector<std::string> given;
    for (const char* option : options)
        if (app.count(option) > 0) given.push_back(option);
    if (given.size() != 1)
        fail_usage("wanted one of --prompt, --prompt-file and --prompt-midi, found {}",
                   given.empty() ? "none" : fmt::format("{}", fmt::join(given, " and ")));
    if (given[0] == "--prompt") return;
    check_input_path(given[0], given[0] == "--prompt-file" ? source.file : source.midi, kExitUsage);
}

// The events of a MIDI file, as many as `room` tokens hold, in the format of the model's corpus.
std::string midi_prompt(const std::string& path, TokenOptions options, int64_t room) {
    const std::string bytes = read_file(path);
    const MidiFile midi =
        read_midi({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, path, MidiMode::lenient);
    for (int i = 0; i < kMidiRepairs; i++)
        if (const MidiRepair repair = static_cast<MidiRepair>(i); midi.repairs[repair] > 0)
            print_note("generate: {}: repaired: {} {}\n", path, midi.repairs[repair], midi_repair_name(repair));
    options.max_events = room;  // an event has a token or more
    TokenCounts counts;
    std::vector<StreamEvent> events = stream_events(midi, path, options, counts);
    const size_t all = events.size();
    // The piece goes on: no line break after the last event, but what stands between two.
    const auto encode = [&](size_t count) {
        std::string text =
            encode_piece("", {events.begin(), events.begin() + static_cast<ptrdiff_t>(count)}, options.format);
        if (options.format == TokenFormat::text) text.back() = ' ';
        return text;
    };
    size_t fits = 0;
    for (size_t step = std::bit_floor(all); step > 0; step /= 2)
        if (fits + step <= all && std::ssize(encode(fits + step)) <= room) fits += step;
    if (all == 0) fail("--prompt-midi {}: holds no event of the kinds that the corpus has", path);
    if (fits == 0) fail_usage("--prompt-midi {}: its first event does not fit into {} tokens", path, room);
    std::string prompt = encode(fits);
    print_note("generate: the prompt is the first {} events of {}, {} tokens\n", fits, path, prompt.size());
    return prompt;
}

// The bytes of the prompt; at most `room` of a MIDI file's.
std::string read_prompt(const PromptSource& source, const TokenOptions& options, int64_t room) {
    if (!source.midi.empty()) return midi_prompt(source.midi, options, std::min(room, source.tokens.value_or(room)));
    std::string bytes = source.file.empty() ? source.text : read_file(source.file);
    if (bytes.empty())
        fail_usage("{}: is empty (wanted at least one byte)",
                   source.file.empty() ? "--prompt" : "--prompt-file " + source.file);
    if (source.tokens && *source.tokens < std::ssize(bytes)) bytes.resize(static_cast<size_t>(*source.tokens));
    return bytes;
}

// How the model's stream writes MIDI: as the corpus that it was trained on does, if that is still there and begins with
// events.
std::optional<TokenOptions> corpus_options(const std::string& corpus) {
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(corpus, ignored)) return std::nullopt;
    std::ifstream file(corpus, std::ios::binary);
    std::string beginning(1 << 16, '\0');
    file.read(beginning.data(), std::ssize(beginning));
    beginning.resize(static_cast<size_t>(file.gcount()));
    const TokenOptions options = stream_options(corpus, beginning);
    return event_count(decode_stream(beginning, options.format)) > 0 ? std::optional(options) : std::nullopt;
}

// ---------------------------------------------------------------------------------------------------------------
// Generating

// Whether the rotary table of T positions turns otherwise than that of the training length.
bool depends_on_length(const RotarySpec& rotary, int64_t T) {
    if (rotary.module == nullptr) return false;
    for (int64_t pair = 0; pair < rotary.head_dim / 2; pair++) {
        const Rotation a = rotary.module->rotation(rotary, T, 1, pair);
        const Rotation b = rotary.module->rotation(rotary, rotary.train_len, 1, pair);
        if (a.angle != b.angle || a.query_gain != b.query_gain || a.key_gain != b.key_gain) return true;
    }
    return false;
}

struct Continuation {
    std::string bytes;
    std::string fault;  // why it ended early; "" if it did not
    double prompt_seconds = 0, seconds = 0;
};

// Draws `count` tokens after the prompt and writes each to stdout as it comes.
Continuation continue_prompt(const Checkpoint& checkpoint, const std::string& prompt, int64_t count,
                             const Sampling& sampling, uint64_t seed) {
    const Model& model = checkpoint.model;
    Continuation result;
    std::mt19937 engine = make_generator(seed).engine;
    // A reader of a terminal or a pipe sees each token; a file may wait.
    struct stat status;
    const bool is_file = fstat(STDOUT_FILENO, &status) == 0 && S_ISREG(status.st_mode);

    const auto start = std::chrono::steady_clock::now();
    KeyValueCache cache = make_key_value_cache(model, std::ssize(prompt) + count);
    std::vector<int32_t> tokens;
    for (const char byte : prompt) tokens.push_back(static_cast<uint8_t>(byte));
    std::vector<float> logits = extend_sequence(model, cache, tokens);
    result.prompt_seconds = seconds_since(start);
    while (true) {
        if (caught_signal != 0) {
            result.fault = fmt::format("interrupted by {}", strsignal(caught_signal));
            break;
        }
        if (std::ssize(result.bytes) == count) break;
        if (!std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); })) {
            result.fault = fmt::format("{}: the logits hold a NaN or infinity", checkpoint.path.string());
            break;
        }
        const int32_t token = pick_candidate(sampling_candidates(logits, sampling), draw_uniform(engine));
        const char byte = static_cast<char>(token);
        result.bytes += byte;
        if (std::fwrite(&byte, 1, 1, stdout) != 1 || (!is_file && std::fflush(stdout) != 0)) {
            result.fault = fmt::format("cannot write to standard output ({})", std::strerror(errno));
            break;
        }
        if (std::ssize(result.bytes) < count) logits = extend_sequence(model, cache, {&token, 1});
    }
    std::fflush(stdout);
    result.seconds = seconds_since(start) - result.prompt_seconds;
    return result;
}

// Writes what the tokens mean as a MIDI file.
void write_midi_file(const std::string& path, const std::string& tokens, const TokenOptions& options) {
    const DecodedStream decoded = decode_stream(tokens, options.format);
    const int64_t events = event_count(decoded);
    if (decoded.dropped > 0)
        print_note("generate: --midi: dropped {} malformed tokens, the first {}\n", decoded.dropped,
                   decoded.first_dropped);
    if (events == 0) fail("--midi {}: not written, the tokens hold no event", path);
    const MidiFile midi = pieces_to_midi(decoded.pieces, options.grid_ms, path);
    write_file_atomically(path, write_midi(midi, path));
    print_note("generate: {}: {} events, {:.1f} s at {} ms a step\n", path, events,
               static_cast<double>(midi.tracks[0].last_tick) * options.grid_ms / 1000, options.grid_ms);
}

int run(int argc, char** argv) {
    CLI::App app{"Continues a prompt with tokens (bytes) drawn from a trained model."};
    Config defaults;
    PromptSource source;
    std::string path, prompt_tokens, tokens = "256", temperature = "1", top_k, top_p = "1", seed = "0", out, midi;
    std::vector<std::string> overrides;
    app.add_option("RUN_OR_CHECKPOINT", path, "run folder or safetensors file")->required();
    app.add_option("--prompt", source.text, "the text to continue");
    app.add_option("--prompt-file", source.file, "a file with the text to continue");
    app.add_option("--prompt-midi", source.midi,
                   "a MIDI file to continue, for a model of a corpus that prepare_midi made: as many events as fit");
    app.add_option("--prompt-tokens", prompt_tokens, "take only so many tokens of the prompt, from its beginning");
    app.add_option("--tokens", tokens,
                   fmt::format("how many tokens to draw; with the prompt at most {} (default: 256)", kMaxTokens));
    app.add_option("--temperature", temperature,
                   "logits are divided by this; 0: always the likeliest token (default: 1)");
    app.add_option("--top-k", top_k, "draw from the K likeliest tokens only (default: all)");
    app.add_option("--top-p", top_p, "draw from the likeliest tokens that together have this probability (default: 1)");
    app.add_option("--seed", seed, "seed of the draws (default: 0)");
    app.add_option("--out", out, "at the end also write prompt and continuation to this file");
    app.add_option("--midi", midi, "at the end also write prompt and continuation as a MIDI file");
    app.add_option(
           "--set", overrides,
           "KEY=VALUE over the checkpoint's configuration; repeatable. A VALUE {...} replaces the whole section KEY")
        ->allow_extra_args(false);
    app.footer("The prompt is not printed. Keys:\n" + help_text(config_keys(defaults)));
    if (!parse_command_line(app, argc, argv)) return kExitGood;

    constexpr int64_t kMany = 4294967295;
    const int64_t count = parse_whole("--tokens", tokens, 1, kMaxTokens);
    Sampling sampling;
    sampling.temperature = parse_real(
        "--temperature", temperature, [](double x) { return x >= 0 && std::isfinite(x); },
        "a finite number of at least 0");
    sampling.top_p = parse_real(
        "--top-p", top_p, [](double x) { return x > 0 && x <= 1; }, "a number above 0 and at most 1");
    if (app.count("--top-k") > 0) sampling.top_k = parse_whole("--top-k", top_k, 1, kMany);
    const uint64_t seed_value = static_cast<uint64_t>(parse_whole("--seed", seed, 0, kMany));
    if (app.count("--prompt-tokens") > 0) source.tokens = parse_whole("--prompt-tokens", prompt_tokens, 1, kMaxTokens);
    check_prompt(app, source);
    std::vector<std::string> taken = {path, source.file, source.midi};
    for (const auto& [option, output] : {std::pair("--out", out), std::pair("--midi", midi)}) {
        if (app.count(option) > 0 && output.empty()) fail_usage("{}: is empty (wanted a file)", option);
        if (!output.empty()) check_output_not_taken(option, output, taken);
        taken.push_back(output);
    }
    const Checkpoint checkpoint = load_checkpoint(path, overrides);
    const std::string& corpus = checkpoint.config.data.corpus;
    for (const auto& [option, output] : {std::pair("--out", out), std::pair("--midi", midi)})
        if (!output.empty() && !corpus.empty())
            check_output_not_taken(option, output, {corpus, manifest_path(corpus).string()});
    const std::optional<TokenOptions> options = corpus_options(corpus);
    if (!options && (!source.midi.empty() || !midi.empty()))
        print_note(
            "generate: note: no corpus of MIDI events at {} (--set data.corpus=PATH): {} ms a step, a MIDI prompt as "
            "text, "
            "tokens as what they look like\n",
            corpus, TokenOptions().grid_ms);
    if (!source.midi.empty() && count == kMaxTokens)
        fail_usage("--tokens {} leave no room for a prompt (wanted at most {} tokens with it)", count, kMaxTokens);
    const std::string prompt = read_prompt(source, options.value_or(TokenOptions()), kMaxTokens - count);
    const int64_t total = std::ssize(prompt) + count;
    if (total > kMaxTokens)
        fail_usage("a prompt of {} tokens and --tokens {} make {} tokens (wanted at most {})", prompt.size(), count,
                   total, kMaxTokens);
    const ModelShape& shape = checkpoint.model.shape;
    if (depends_on_length(shape.rotary, total))
        print_note("generate: note: rotary kind {} depends on the total length, fixed ahead at {} tokens\n",
                   shape.rotary.module->name, total);

    catch_signals();
    const Continuation result = continue_prompt(checkpoint, prompt, count, sampling, seed_value);
    const std::string all = prompt + result.bytes;
    if (isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && !all.ends_with('\n')) print_note("\n");
    // Nothing drawn is no reason to replace a file.
    const bool writes = !result.bytes.empty();
    std::string output_faults;
    const auto attempt = [&](const std::function<void()>& write) {
        try {
            write();
        } catch (const Error& error) {
            output_faults += (output_faults.empty() ? "" : "; ") + std::string(error.what());
        }
    };
    if (writes && !out.empty()) attempt([&] { write_file_atomically(out, all); });
    const bool is_out_written = writes && !out.empty() && output_faults.empty();
    if (writes && !midi.empty())
        attempt([&] { write_midi_file(midi, all, options.value_or(stream_options("", all))); });
    if (!result.fault.empty())
        fail("{} after {} of {} tokens{}{}", result.fault, result.bytes.size(), count,
             is_out_written ? "; prompt and tokens are in " + out : "",
             output_faults.empty() ? "" : "; " + output_faults);
    print_note("generate: {} tokens, {:.0f} tokens/s, after a prompt of {} tokens in {:.2f} s\n", result.bytes.size(),
               static_cast<double>(result.bytes.size()) / result.seconds, prompt.size(), result.prompt_seconds);
    if (!output_faults.empty()) fail("{}", output_faults);
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("generate", [&] { return jetlag::run(argc, argv); });
}

// generate: continues a prompt with tokens drawn from a trained model, one at a time.
#include <unistd.h>

#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "generate/sampling.h"
#include "models/checkpoint.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"

namespace jetlag {
namespace {

constexpr int64_t kMaxTokens = 32768;  // of prompt and continuation together

volatile std::sig_atomic_t caught_signal = 0;

// The first signal asks the loop to stop and keep what there is; a second one has its default action. A broken pipe
// (the output went to `head`) shows as a failed write, every time.
void on_signal(int signal) {
    caught_signal = signal;
}

void catch_signals() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
        struct sigaction action = {};
        action.sa_handler = on_signal;
        action.sa_flags = (signal == SIGPIPE ? 0 : static_cast<int>(SA_RESETHAND)) | SA_RESTART;
        sigaction(signal, &action, nullptr);
    }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// ---------------------------------------------------------------------------------------------------------------
// Options

int64_t parse_whole(const char* option, const std::string& text, int64_t min, int64_t max) {
    int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end || value < min || value > max)
        fail_usage("{}: found {}, wanted a whole number from {} to {}", option, text, min, max);
    return value;
}

// `wanted` says what `is_good` asks for.
double parse_real(const char* option, const std::string& text, bool (*is_good)(double), const char* wanted) {
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end || !is_good(value))
        fail_usage("{}: found {}, wanted {}", option, text, wanted);
    return value;
}

// The bytes of the one prompt option that was given.
std::string read_prompt(const CLI::App& app, const std::string& text, const std::string& file) {
    if (app.count("--prompt") + app.count("--prompt-file") != 1)
        fail_usage("wanted one of --prompt and --prompt-file, found {}",
                   app.count("--prompt") == 0 ? "neither" : "both");
    const bool is_file = app.count("--prompt-file") > 0;
    if (is_file && (!std::filesystem::exists(file) || std::filesystem::is_directory(file)))
        fail_usage("--prompt-file {}: {}", file,
                   std::filesystem::exists(file) ? "is a folder (wanted a file)" : "no such file");
    const std::string bytes = is_file ? read_file(file) : text;
    if (bytes.empty())
        fail_usage("{}: is empty (wanted at least one byte)", is_file ? "--prompt-file " + file : "--prompt");
    return bytes;
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

int run(int argc, char** argv) {
    CLI::App app{"Continues a prompt with tokens (bytes) drawn from a trained model."};
    Config defaults;
    std::string path, prompt_text, prompt_file, tokens = "256", temperature = "1", top_k, top_p = "1", seed = "0", out;
    std::vector<std::string> overrides;
    app.add_option("RUN_OR_CHECKPOINT", path, "run folder or safetensors file")->required();
    app.add_option("--prompt", prompt_text, "the text to continue");
    app.add_option("--prompt-file", prompt_file, "a file with the text to continue");
    app.add_option("--tokens", tokens,
                   fmt::format("how many tokens to draw; with the prompt at most {} (default: 256)", kMaxTokens));
    app.add_option("--temperature", temperature,
                   "logits are divided by this; 0: always the likeliest token (default: 1)");
    app.add_option("--top-k", top_k, "draw from the K likeliest tokens only (default: all)");
    app.add_option("--top-p", top_p, "draw from the likeliest tokens that together have this probability (default: 1)");
    app.add_option("--seed", seed, "seed of the draws (default: 0)");
    app.add_option("--out", out, "at the end also write prompt and continuation to this file");
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
    if (app.count("--out") > 0 && out.empty()) fail_usage("--out: is empty (wanted a file)");
    if (!out.empty()) check_output_not_taken("--out", out, {path});
    const std::string prompt = read_prompt(app, prompt_text, prompt_file);
    const int64_t total = std::ssize(prompt) + count;
    if (total > kMaxTokens)
        fail_usage("a prompt of {} tokens and --tokens {} make {} tokens (wanted at most {})", prompt.size(), count,
                   total, kMaxTokens);
    const Checkpoint checkpoint = load_checkpoint(path, overrides);
    const ModelShape& shape = checkpoint.model.shape;
    if (depends_on_length(shape.rotary, total))
        fmt::print(stderr, "generate: note: rotary kind {} depends on the total length, fixed ahead at {} tokens\n",
                   shape.rotary.module->name, total);

    catch_signals();
    const Continuation result = continue_prompt(checkpoint, prompt, count, sampling, seed_value);
    const std::string all = prompt + result.bytes;
    // Nothing drawn is no reason to replace a file.
    const bool writes = !out.empty() && !result.bytes.empty();
    if (writes) write_file_atomically(out, all);
    if (isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && !all.ends_with('\n')) fmt::print(stderr, "\n");
    if (!result.fault.empty())
        fail("{} after {} of {} tokens{}", result.fault, result.bytes.size(), count,
             writes ? "; prompt and tokens are in " + out : "");
    fmt::print(stderr, "generate: {} tokens, {:.0f} tokens/s, after a prompt of {} tokens in {:.2f} s\n",
               result.bytes.size(), static_cast<double>(result.bytes.size()) / result.seconds, prompt.size(),
               result.prompt_seconds);
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("generate", [&] { return jetlag::run(argc, argv); });
}

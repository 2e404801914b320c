// make_motif_corpus --bars N --seed S: writes a motif corpus (data_prep/motif.h) and, if asked, its shuffled control.
#include <charconv>
#include <filesystem>

#include "data_prep/motif.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/manifest.h"

using namespace jetlag;

namespace {

// CLI11 would take -1 and 10^30 as numbers near 2^64.
uint64_t parse_seed(const std::string& text) {
    uint64_t seed = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, seed);
    if (error != std::errc() || rest != end)
        fail_usage("--seed: found {}, wanted a whole number from 0 to 2^64-1", text);
    return seed;
}

struct Stream {
    std::filesystem::path path;
    std::string text;
    bool shuffled;
};

void write(const Stream& stream, const MotifOptions& options, const std::array<int64_t, 4>& copied,
           const std::vector<std::string>& arguments, bool force) {
    const std::array<int64_t, 4> returning = count_returns(stream.text);
    nlohmann::ordered_json lags = nlohmann::ordered_json::array();
    nlohmann::ordered_json option_values = {{"bars", options.bars}, {"seed", options.seed}};
    std::string shares;
    for (size_t i = 0; i < kReturnLags.size(); ++i) {
        nlohmann::ordered_json lag = {{"bars", kReturnLags[i]}, {"bytes", kReturnLags[i] * kBarBytes}};
        // In the shuffled stream nothing is a copy of the bar at the lag; what returns does so by chance.
        lag["copied"] = stream.shuffled ? 0 : copied[i];
        lag["returning"] = returning[i];
        lags.push_back(lag);
        option_values[fmt::format("return_{}", kReturnLags[i])] = options.returns[i];
        shares +=
            fmt::format("{}{:.2f}% after {}", i == 0 ? "" : ", ",
                        100.0 * static_cast<double>(returning[i]) / static_cast<double>(options.bars), kReturnLags[i]);
    }
    option_values["variation"] = options.variation;
    option_values["modulation"] = options.modulation;

    nlohmann::ordered_json manifest;
    manifest["name"] = stream.path.stem().string();
    manifest["size"] = nullptr;  // these two are filled in by write_stream; here they keep their place
    manifest["sha256"] = nullptr;
    manifest["order"] = stream.shuffled ? "shuffled" : "composed";
    manifest["bar_bytes"] = kBarBytes;
    manifest["options"] = option_values;
    manifest["lags"] = lags;
    manifest["program"] = "make_motif_corpus";
    manifest["arguments"] = arguments;
    write_stream(stream.path, stream.text, manifest, force);
    fmt::print("{}: {} bars{}, {} bytes, sha256 {}; bars that return: {}\n", stream.path.string(), options.bars,
               stream.shuffled ? " shuffled" : "", stream.text.size(), sha256_hex(stream.text), shares);
}

}  // namespace

int main(int argc, char** argv) {
    return run_main("make_motif_corpus", [&]() {
        CLI::App app{
            "Makes music-like text in which bars return exactly after 8, 16, 32 and 64 bars, and its JSON manifest.\n"
            "A bar is a line of 27 bytes: a chord and eight steps. The same options give the same bytes everywhere."};
        MotifOptions options;
        std::string seed, out, control;
        bool shuffle = false, force = false;
        app.add_option("--bars", options.bars, fmt::format("how many bars, 1 to {}", kMaxBars))->required();
        app.add_option("--seed", seed, "seed of the generator, a whole number below 2^64")->required();
        app.add_option("--out", out,
                       "the stream to write (default: data/motif.txt, with --shuffle "
                       "data/motif_shuffled.txt); the manifest is OUT.json");
        app.add_option("--control", control, "also write the same bars in random order to this path");
        app.add_flag("--shuffle", shuffle, "write the bars in random order only")->excludes("--control");
        for (size_t i = 0; i < kReturnLags.size(); ++i)
            app.add_option(fmt::format("--return-{}", kReturnLags[i]), options.returns[i],
                           fmt::format("probability that a phrase of eight bars returns after {} bars", kReturnLags[i]))
                ->capture_default_str();
        app.add_option("--variation", options.variation,
                       "probability that a bar of a returning phrase gets a new melody")
            ->capture_default_str();
        app.add_option("--modulation", options.modulation, "probability that a fresh phrase changes the key")
            ->capture_default_str();
        app.add_flag("--force", force, "replace a file that has no manifest and other content");
        if (!parse_command_line(app, argc, argv)) return kExitGood;
        options.seed = parse_seed(seed);
        if (out.empty()) out = shuffle ? "data/motif_shuffled.txt" : "data/motif.txt";
        if (!control.empty() && (same_place(out, control) || same_place(out, manifest_path(control)) ||
                                 same_place(manifest_path(out), control)))
            fail_usage("--control {}: is the path of the corpus itself or of its manifest, wanted another", control);

        const std::vector<std::string> arguments(argv + 1, argv + argc);
        const MotifCorpus corpus = make_motif_corpus(options);
        if (!shuffle) write({out, corpus.text, false}, options, corpus.copied, arguments, force);
        const std::string control_path = shuffle ? out : control;
        if (!control_path.empty())
            write({control_path, shuffle_bars(corpus.text, options.seed), true}, options, corpus.copied, arguments,
                  force);
        return kExitGood;
    });
}

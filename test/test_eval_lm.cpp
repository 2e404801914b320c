// eval_lm as its user meets it: errors, damaged and foreign checkpoints, tables and files, protocols.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "data_prep/motif.h"
#include "eval/evaluate.h"
#include "models/checkpoint.h"
#include "models/windows.h"
#include "src/error.h"
#include "src/files.h"
#include "test/kernel_support.h"
#include "test/support.h"

namespace jetlag {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;
using test::Floats;
using test::lines_of;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;
using Texts = std::vector<std::string>;

const int64_t kTrainLength = 64;

// A folder with a corpus of 21600 tokens (2160 held out) and checkpoints of small models at their initial weights.
struct Workshop {
    TemporaryFolder folder;
    fs::path corpus = folder.path / "corpus.txt";
    std::string corpus_sha256;

    Workshop() {
        const std::string text = make_motif_corpus({.bars = 800, .seed = 1}).text;
        write_file_atomically(corpus, text);
        corpus_sha256 = sha256_hex(text);
    }

    fs::path path(const std::string& name) const { return folder.path / name; }

    Config config(const Texts& overrides) const {
        std::vector<Setting> settings;
        Texts all = {"data.corpus=" + corpus.string(),
                     "model.embed_dim=16",
                     "model.heads=2",
                     fmt::format("train.context={}", kTrainLength),
                     "train.seed=5",
                     "eval.contexts=32,64,128",
                     "eval.batches=3"};
        all.insert(all.end(), overrides.begin(), overrides.end());
        add_overrides(settings, all);
        return make_config(settings);
    }

    // `change` may edit the parameters before they are saved.
    fs::path save(const std::string& name, const Texts& overrides,
                  const std::function<void(Model&)>& change = {}) const {
        const Config c = config(overrides);
        Model model = make_model(model_shape(c));
        TorchGenerator generator = make_generator(static_cast<uint64_t>(c.train.seed));
        initialize_model(model, generator);
        if (change) change(model);
        save_checkpoint(path(name), model, config_json(c), 0, corpus_sha256);
        return path(name);
    }

    // Runs eval_lm and returns what --json wrote; a failure ends the test.
    json evaluate(Texts arguments) const {
        const fs::path file = path("evaluation.json");
        arguments.insert(arguments.end(), {"--json", file});
        const ProgramResult result = run_program("eval_lm", arguments);
        if (result.exit_code != kExitGood)
            throw std::runtime_error(fmt::format("exit code {}: {}", result.exit_code, result.err));
        return json::parse(read_file(file));
    }
};

// Makes the fourth value of a parameter a NaN.
void spoil(Model& model, const std::string& name) {
    test::change_parameters(model, name, [](Floats& values) { values[3] = test::kNan; });
}

// A CSV file as one map per row, from column to cell. No cell of these files has a comma in it.
std::vector<std::map<std::string, std::string>> read_csv(const fs::path& file) {
    const auto split = [](const std::string& line) {
        Texts cells = {""};
        for (char c : line)
            if (c == ',')
                cells.emplace_back();
            else
                cells.back() += c;
        return cells;
    };
    const Texts lines = lines_of(read_file(file));
    const Texts header = split(lines.at(0));
    std::vector<std::map<std::string, std::string>> rows;
    for (size_t i = 1; i < lines.size(); i++) {
        const Texts cells = split(lines[i]);
        EXPECT_EQ(cells.size(), header.size()) << lines[i];
        std::map<std::string, std::string> row;
        for (size_t c = 0; c < std::min(cells.size(), header.size()); c++) row[header[c]] = cells[c];
        rows.push_back(row);
    }
    return rows;
}

// ------------------------------------------------------------------------------------------------ bad usage

TEST(EvalLmErrors, Usage) {
    Workshop w;
    const std::string good = w.save("good.safetensors", {}), other = w.save("other.safetensors", {"eval.seed=4"});
    const std::string folder = w.folder.path;
    const struct {
        Texts arguments;
        Texts parts;
    } cases[] = {
        {{}, {"RUN_OR_CHECKPOINT", "see --help"}},
        {{good, "--frobnicate"}, {"--frobnicate", "see --help"}},
        {{good, "--windows", "most"}, {"--windows most: wanted random or sequential"}},
        {{good, "--targets", "first:3"}, {"--targets first:3: wanted all, or last:N with N at least 1"}},
        {{good, "--targets", "last:0"}, {"--targets last:0: wanted all, or last:N with N at least 1"}},
        {{good, "--targets", "last:"}, {"--targets last:: wanted all, or last:N"}},
        {{good, "--contexts", "long"}, {"eval.contexts: 'long' is not an integer"}},
        {{good, "--contexts", "64,0"}, {"eval.contexts: 0 is out of range (wanted >= 1"}},
        {{good, "--batches", "0"}, {"eval.batches: 0 is out of range (wanted >= 1"}},
        {{good, "--batch", "many"}, {"eval.batch: 'many' is not an integer"}},
        {{good, "--seed", "-1"}, {"eval.seed: -1 is out of range (wanted >= 0"}},
        {{good, "--contexts", "64,2159"},
         {good + ": context: windows of 2159 tokens do not fit the held-out part of ",
          " of 2160 tokens (wanted at least 2161)"}},
        {{good, "--contexts", "16,64", "--targets", "last:32"},
         {"--targets last:32 wants at least as many tokens, and a context is 16"}},
        {{good, "--csv", good}, {"--csv " + good + ": is taken by " + good}},
        {{good, "--csv", folder + "/same", "--json", folder + "/./same"}, {"/./same: is taken by " + folder + "/same"}},
        {{good, "--set", "model.heads=1"}, {"model.heads: 1 is another model than that of " + good}},
        {{good, "--csv", folder + "/no/file.csv"}, {"--csv " + folder + "/no/file.csv: there is no folder ", "/no"}},
        {{good, "--json", folder}, {"--json " + folder + ": is a folder (wanted a file)"}},
        {{good, "--set", "model.positio=rope"}, {"model.positio: unknown key; did you mean model.position?"}},
        {{good, "--set", "data.corpus=\"\""}, {good + ": data.corpus: not given (give --set data.corpus=PATH)"}},
        {{good, "--set", "data.corpus=" + folder + "/none"},
         {"data.corpus: cannot open token stream " + folder + "/none: No such file or directory"}},
        {{good, other}, {good + " and " + other + " have different eval settings: give --contexts, --batches, "}},
        {{folder + "/none"}, {folder + "/none: no such file or folder (wanted a run folder, or a safetensors file)"}},
        {{folder}, {folder + ": a folder without checkpoint.safetensors (wanted a run folder, or a safetensors file)"}},
    };
    for (const auto& c : cases) {
        SCOPED_TRACE(c.parts[0]);
        expect_error(run_program("eval_lm", c.arguments), "eval_lm", kExitUsage, c.parts);
    }
    expect_error(run_program("eval_lm", {good, "--plot", w.path("p.svg")}, {"PATH=/nonexistent"}), "eval_lm",
                 kExitFailed, {w.path("p.svg").string() + ": gnuplot, which draws it, is not installed"});
    if (fs::exists("/dev/full"))
        expect_error(run_program("eval_lm", {good, "--csv", "/dev/full"}), "eval_lm", kExitFailed,
                     {"cannot write /dev/full: No space left on device"});
}

TEST(EvalLmErrors, AnotherCorpusThanThatOfTheTraining) {
    Workshop w;
    const std::string good = w.save("good.safetensors", {});
    write_file_atomically(w.corpus, read_file(w.corpus) + "x");
    expect_error(run_program("eval_lm", {good}), "eval_lm", kExitFailed,
                 {good + ": was trained on a corpus with SHA-256 " + w.corpus_sha256 + ", but " + w.corpus.string() +
                      " has " + sha256_hex(read_file(w.corpus)) + " now",
                  "give --set data.corpus=PATH"});
    const ProgramResult result = run_program("eval_lm", {good, "--set", "data.corpus=" + w.corpus.string()});
    EXPECT_EQ(result.exit_code, kExitGood);
    EXPECT_TRUE(result.err.starts_with("eval_lm: note: " + good + " was trained on another corpus than " +
                                       w.corpus.string() + "\n"))
        << result.err;
}

TEST(EvalLmErrors, DamagedCheckpoints) {
    Workshop w;
    const std::string good = read_file(w.save("good.safetensors", {}));
    const fs::path path = w.path("bad.safetensors");
    const auto expect_refused = [&](const std::string& bytes, const std::string& message) {
        write_file_atomically(path, bytes);
        expect_error(run_program("eval_lm", {path}), "eval_lm", kExitFailed, {path.string(), message});
    };
    const auto flipped = [&good](size_t at) {
        std::string bytes = good;
        bytes[at] = static_cast<char>(bytes[at] ^ 1);
        return bytes;
    };
    expect_refused("", "is empty, wanted a safetensors file");
    expect_refused(good.substr(0, 5), "truncated: 5 bytes found");
    expect_refused(good.substr(0, 300), "is truncated: 300 bytes found");
    expect_refused(good.substr(0, good.size() / 2), "is truncated: ");
    expect_refused(good.substr(0, good.size() - 1), "is truncated: ");
    expect_refused(good + std::string(1, '\0'), "has bytes too many: ");
    expect_refused(flipped(good.find("\"step\":\"0\"") + 8), "is damaged");  // its value
    expect_refused(flipped(good.find("corpus_sha256\":\"") + 20), "is damaged");
    expect_refused(flipped(good.find("max_order") + 3), "is damaged");       // a key
    expect_refused(flipped(good.find("\"sha256\":\"") + 12), "is damaged");  // the checksum itself
    expect_refused(flipped(good.size() - 2000), "is damaged");
    expect_refused(flipped(good.size() - 1), "is damaged");
    expect_refused(flipped(7), "is not a safetensors file");  // the header length
}

TEST(EvalLmErrors, ForeignAndMismatchedCheckpoints) {
    Workshop w;
    const fs::path path = w.path("bad.safetensors");
    const auto expect_refused = [&](const std::string& message) {
        expect_error(run_program("eval_lm", {path}), "eval_lm", kExitFailed, {path.string(), message});
    };
    write_file_atomically(path, "This is a letter, and no checkpoint. It goes on for a while.\n");
    expect_refused("is not a safetensors file");
    write_file_atomically(path, std::string("PK\x03\x04\x14\0\0\0\x08\0", 10) + std::string(200, 'z'));
    expect_refused("is not a safetensors file");
    write_file_atomically(path, std::string(1000, '\0'));
    expect_refused("is not a safetensors file");

    const SafetensorsFile good = read_safetensors(w.save("good.safetensors", {}));
    SafetensorsFile file;
    const std::vector<float> values(6, 0.5f);
    file.tensors = {make_f32_tensor("transformer.wte.weight", {2, 3}, values)};
    write_safetensors(path, file);
    expect_refused(
        "neither a jetlag checkpoint nor a state dict of the published code: no tensor embedding.weight of two "
        "dimensions");

    file = good;
    file.metadata[kMetadataConfig] = config_json(w.config({"model.embed_dim=32"}));
    write_safetensors(path, file);
    expect_refused("tensor embedding.weight has shape (256, 16), wanted (256, 32)");
    file.metadata[kMetadataConfig] = config_json(w.config({"model.layers=3"}));
    write_safetensors(path, file);
    expect_refused("no tensor blocks.2.norm1.weight, which a model with position full and 3 layers has");
    file.metadata[kMetadataConfig] = config_json(w.config({"model.position=rope"}));
    write_safetensors(path, file);
    expect_refused("tensor blocks.0.attn.pj_bias.omega is no part of a model with position rope and 2 layers");
    file.metadata[kMetadataConfig] = "{\"model\": ";
    write_safetensors(path, file);
    expect_refused("malformed JSON");

    file = good;
    for (Tensor& tensor : file.tensors)
        if (tensor.name == "head.bias") {
            tensor.dtype = "F16";
            tensor.bytes.resize(tensor.bytes.size() / 2);
        }
    write_safetensors(path, file);
    expect_refused("tensor \"head.bias\" has dtype \"F16\", wanted F32");
    file.tensors.pop_back();
    write_safetensors(path, file);
    expect_refused("no tensor head.bias, which a model with position full and 2 layers has");

    w.save("bad.safetensors", {}, [](Model& m) { spoil(m, "blocks.1.norm2.weight"); });
    expect_refused(
        "the loss at context 32 is nan: the first tensor with a NaN or infinity is parameter blocks.1.norm2.weight");
}

// ------------------------------------------------------------------------------------------------ checkpoints

// The initial weights of a golden file as the published code saves them: names without "init.", nothing of jetlag's.
// The reader of safetensors does not ask for a checksum, and this writer adds none.
void write_published(const fs::path& path, const SafetensorsFile& golden, bool with_metadata) {
    json header = json::object();
    std::string data;
    if (with_metadata) header["__metadata__"] = golden.metadata;
    for (const Tensor& tensor : golden.tensors) {
        if (!tensor.name.starts_with("init.")) continue;
        header[tensor.name.substr(5)] = {{"dtype", tensor.dtype},
                                         {"shape", tensor.shape},
                                         {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
        data.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    }
    const std::string text = header.dump();
    const uint64_t size = text.size();
    std::string contents(8, '\0');
    std::memcpy(contents.data(), &size, 8);
    write_file_atomically(path, contents + text + data);
}

TEST(EvalLm, ReadsCheckpointsOfThePublishedCode) {
    NEEDS_SHARED();
    Workshop w;
    const std::string corpus = "data.corpus=" + (test::shared_folder() / "data/text/tiny_shakespeare.txt").string();
    for (const std::string method : {"full", "rope", "pj_rotary", "rope_ntk_affine", "none"}) {
        SCOPED_TRACE(method);
        const SafetensorsFile golden =
            read_safetensors(test::shared_folder() / "golden" / "lm_parity" / (method + ".safetensors"));
        const fs::path path = w.path(method + ".safetensors"), bare = w.path(method + "_bare.safetensors");
        write_published(path, golden, true);
        write_published(bare, golden, false);
        const Texts protocol = {"--contexts", "64,256", "--batches", "2", "--set", corpus};

        Texts arguments = {path};
        arguments.insert(arguments.end(), protocol.begin(), protocol.end());
        const json known = w.evaluate(arguments);
        ASSERT_EQ(known.size(), 2u);
        for (const json& e : known) {
            EXPECT_EQ(e["position"], method);
            EXPECT_EQ(e["train_len"], 64);
            EXPECT_GT(e["loss"], 5.4);  // log 256 is 5.55
            EXPECT_LT(e["loss"], 6.1);
        }

        const bool shows_heads = method == "full" || method == "rope_ntk_affine";
        arguments[0] = bare;
        expect_error(run_program("eval_lm", arguments), "eval_lm", kExitUsage,
                     {bare.string() + ": has no jetlag metadata, and its tensors do not show model.position, " +
                      (shows_heads ? "" : "model.heads, ") + "train.context: give each with --set KEY=VALUE"});
        for (const std::string& setting :
             {"model.position=" + method, std::string("model.heads=2"), std::string("train.context=64")})
            arguments.insert(arguments.end(), {"--set", setting});
        const json given = w.evaluate(arguments);
        ASSERT_EQ(given.size(), 2u);
        for (size_t i = 0; i < 2; i++) EXPECT_EQ(given[i]["loss"], known[i]["loss"]);

        arguments = {path, "--contexts", "64"};
        expect_error(run_program("eval_lm", arguments), "eval_lm", kExitUsage,
                     {path.string() + ": data.corpus: not given (give --set data.corpus=PATH)"});
    }
}

TEST(EvalLm, AnotherPositionMethodThanThatOfTheTraining) {
    Workshop w;
    const std::string rope = w.save("rope.safetensors", {"model.position=rope"});
    const json trained = w.evaluate({rope});
    const json yarn = w.evaluate({rope, "--set", "model.position=rope_yarn"});
    ASSERT_EQ(trained.size(), 3u);
    ASSERT_EQ(yarn.size(), 3u);
    for (size_t i = 0; i < 3; i++) {
        EXPECT_EQ(trained[i]["position"], "rope");
        EXPECT_EQ(yarn[i]["position"], "rope_yarn");
        const double difference = std::fabs(yarn[i]["loss"].get<double>() - trained[i]["loss"].get<double>());
        if (trained[i]["context"] <= kTrainLength)
            EXPECT_EQ(difference, 0);
        else
            EXPECT_GT(difference, 1e-7);
    }
    expect_error(run_program("eval_lm", {rope, "--set", "model.position=full"}), "eval_lm", kExitFailed,
                 {rope + ": no tensor blocks.0.attn.pj_bias.omega, which a model with position full and 2 layers has"});
}

TEST(EvalLm, ReadsWhatTrainLmWrites) {
    Workshop w;
    const ProgramResult trained = [&] {
        write_file_atomically(w.path("c.yaml"), config_yaml(w.config({"train.steps=3", "train.batch=2"})));
        return run_program("train_lm", {w.path("c.yaml"), "--out", w.path("run")});
    }();
    ASSERT_EQ(trained.exit_code, kExitGood) << trained.err;
    const json by_folder = w.evaluate({w.path("run")});
    const json by_file = w.evaluate({w.path("run") / "checkpoint.safetensors"});
    ASSERT_EQ(by_folder.size(), 3u);
    for (size_t i = 0; i < 3; i++) {
        EXPECT_EQ(by_folder[i]["loss"], by_file[i]["loss"]);
        EXPECT_EQ(by_folder[i]["checkpoint"], (w.path("run") / "checkpoint.safetensors").string());
    }
}

// ------------------------------------------------------------------------------------------------ reports

TEST(EvalLm, TableAndFilesSideBySide) {
    Workshop w;
    const Texts names = {"full", "rope", "lc_affine"};
    Texts arguments;
    for (const std::string& name : names)
        arguments.push_back(w.save(name + ".safetensors", {"model.position=" + name}));
    arguments.insert(arguments.end(), {"--attention-stats", "--csv", w.path("e.csv"), "--json", w.path("e.json"),
                                       "--plot", w.path("e.svg"), "--seed", "9"});
    const ProgramResult result = run_program("eval_lm", arguments);
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;

    const Texts table = lines_of(result.out);
    ASSERT_GE(table.size(), 2 + 9 + 4u) << result.out;
    EXPECT_EQ(table[0], "protocol: 3 random windows (seed 9), batches of 1, every target scored");
    for (const char* column : {"checkpoint", "position", "context", "loss", "ppl", "delta", "entropy", "support",
                               "mean lag", "windows", "targets", "disjoint", "seconds"})
        EXPECT_NE(table[1].find(column), std::string::npos) << table[1];
    for (size_t i = 1; i <= 10; i++) EXPECT_EQ(table[i].size(), table[1].size()) << "not aligned: " << table[i];
    for (const char* column : {"gate_fj", "gate_affine", "gate_lc", "affine_slope_mean", "fj_mass_r0", "lc_mass_r3"})
        EXPECT_NE(table[12].find(column), std::string::npos) << table[12];

    EXPECT_TRUE(lines_of(read_file(w.path("e.csv")))[0].starts_with(
        "method,seed,train_len,eval_len,max_order,train_eval_loss,loss,ppl,delta_loss,attention_entropy,"
        "attention_effective_support,average_attention_distance,logit_std,logit_abs_max,gate_fj,gate_affine,gate_lc,"
        "affine_slope_mean,fj_mass_r0,fj_mass_r1,fj_mass_r2,fj_mass_r3,lc_mass_r0,lc_mass_r1,lc_mass_r2,lc_mass_r3,"));
    const auto rows = read_csv(w.path("e.csv"));
    const json list = json::parse(read_file(w.path("e.json")));
    ASSERT_EQ(rows.size(), 9u);
    ASSERT_EQ(list.size(), 9u);
    const int64_t contexts[] = {32, 64, 128};
    for (size_t i = 0; i < 9; i++) {
        const auto& row = rows[i];
        const json& e = list[i];
        SCOPED_TRACE(e.dump());
        const auto cell = [&row](const char* column) { return std::stod(row.at(column)); };
        EXPECT_EQ(e["position"], names[i / 3]);
        EXPECT_EQ(e["context"], contexts[i % 3]);
        EXPECT_EQ(e["checkpoint"], arguments[i / 3]);
        const double loss = e["loss"];
        EXPECT_GT(loss, 5.0);
        EXPECT_LT(loss, 6.5);
        EXPECT_DOUBLE_EQ(e["perplexity"].get<double>(), std::exp(loss));
        EXPECT_DOUBLE_EQ(e["delta_loss"].get<double>(), loss - list[i / 3 * 3 + 1]["loss"].get<double>());
        EXPECT_EQ(e["train_len_loss"], list[i / 3 * 3 + 1]["loss"]);
        if (e["context"] == kTrainLength) {
            EXPECT_EQ(e["delta_loss"], 0);
        }
        EXPECT_GE(e["seconds"], 0);
        EXPECT_GT(e["logit_abs_max"], e["logit_std"]);
        EXPECT_LE(e["entropy"], std::log(e["context"].get<double>()));
        EXPECT_GE(e["effective_support"], std::exp(e["entropy"].get<double>()));  // Jensen
        EXPECT_LT(e["mean_lag"], e["context"]);
        EXPECT_GT(e["mean_lag"], 0);
        const json& p = e["protocol"];
        EXPECT_EQ(p["windows"], "random");
        EXPECT_EQ(p["seed"], 9);
        EXPECT_EQ(p["targets"], "all");
        EXPECT_EQ(p["window_count"], 3);
        EXPECT_EQ(p["targets_scored"], 3 * e["context"].get<int64_t>());
        EXPECT_EQ(p["disjoint_windows"], 2159 / e["context"].get<int64_t>());

        EXPECT_EQ(row.at("method"), names[i / 3]);
        EXPECT_EQ(row.at("seed"), "5");  // of the training
        EXPECT_EQ(row.at("train_len"), "64");
        EXPECT_EQ(row.at("eval_seed"), "9");
        EXPECT_EQ(row.at("windows"), "random");
        EXPECT_EQ(row.at("targets"), "all");
        EXPECT_EQ(cell("eval_len"), e["context"]);
        EXPECT_EQ(cell("max_order"), e["max_order"]);
        const std::pair<const char*, const char*> same[] = {{"loss", "loss"},
                                                            {"ppl", "perplexity"},
                                                            {"delta_loss", "delta_loss"},
                                                            {"train_eval_loss", "train_len_loss"},
                                                            {"attention_entropy", "entropy"},
                                                            {"attention_effective_support", "effective_support"},
                                                            {"average_attention_distance", "mean_lag"},
                                                            {"logit_std", "logit_std"},
                                                            {"logit_abs_max", "logit_abs_max"}};
        for (const auto& [column, key] : same) EXPECT_DOUBLE_EQ(cell(column), e[key].get<double>()) << column;
        for (const char* bias : {"gate_fj", "gate_affine", "gate_lc", "affine_slope_mean", "fj_mass_r2", "lc_mass_r0"})
            if (names[i / 3] == "rope") {
                EXPECT_EQ(row.at(bias), "");
                EXPECT_FALSE(e.contains(bias));
            } else {
                EXPECT_DOUBLE_EQ(cell(bias), e[bias].get<double>()) << bias;
            }
        if (names[i / 3] != "rope") {
            EXPECT_NEAR(cell("gate_fj") + cell("gate_affine") + cell("gate_lc"), 1, 1e-6);
        }
        if (names[i / 3] == "lc_affine") {
            EXPECT_EQ(cell("gate_fj"), 0);
        }
    }

    const std::string svg = read_file(w.path("e.svg"));
    EXPECT_TRUE(svg.starts_with("<?xml"));
    EXPECT_NE(svg.find("</svg>"), std::string::npos);
    EXPECT_NE(svg.find("3 random windows (seed 9)"), std::string::npos);
    for (size_t i = 0; i < 3; i++) {
        EXPECT_NE(svg.find(fmt::format("id=\"gnuplot_plot_{}\"", i + 1)), std::string::npos);
        EXPECT_NE(svg.find(">" + names[i] + "<"), std::string::npos) << names[i];
    }
    EXPECT_EQ(svg.find("id=\"gnuplot_plot_4\""), std::string::npos);
    for (const char* context : {">32<", ">64<", ">128<"}) EXPECT_NE(svg.find(context), std::string::npos);
}

TEST(EvalLm, AttentionStatisticsOnlyWhenAsked) {
    Workshop w;
    const std::string full = w.save("full.safetensors", {});
    const json without = w.evaluate({full, "--csv", w.path("e.csv")}), with = w.evaluate({full, "--attention-stats"});
    ASSERT_EQ(without.size(), 3u);
    for (size_t i = 0; i < 3; i++) {
        for (const char* key : {"entropy", "effective_support", "mean_lag"}) {
            EXPECT_FALSE(without[i].contains(key));
            EXPECT_TRUE(with[i].contains(key));
        }
        EXPECT_EQ(without[i]["loss"], with[i]["loss"]);
    }
    for (const auto& row : read_csv(w.path("e.csv"))) EXPECT_EQ(row.at("attention_entropy"), "");
}

TEST(EvalLm, DeltaRefersToTheTrainingLengthInAnyCase) {
    Workshop w;
    const std::string full = w.save("full.safetensors", {});
    const json with = w.evaluate({full, "--contexts", "64,128"}), without = w.evaluate({full, "--contexts", "128"});
    ASSERT_EQ(with.size(), 2u);
    ASSERT_EQ(without.size(), 1u);  // evaluated, not reported
    EXPECT_EQ(with[0]["delta_loss"], 0);
    EXPECT_NE(with[1]["delta_loss"], 0);
    EXPECT_EQ(without[0]["delta_loss"], with[1]["delta_loss"]);
    EXPECT_EQ(without[0]["train_len_loss"], with[0]["loss"]);
}

TEST(EvalLm, HelpListsOptionsAndKeys) {
    const ProgramResult help = run_program("eval_lm", {"--help"});
    EXPECT_EQ(help.exit_code, kExitGood);
    Config defaults;
    EXPECT_NE(help.out.find(help_text(config_keys(defaults))), std::string::npos);
    for (const char* option : {"--contexts", "--batches", "--seed", "--attention-stats", "--csv", "--json", "--windows",
                               "--loss-by-position", "--plot", "--targets", "--set"})
        EXPECT_NE(help.out.find(option), std::string::npos) << option;
}

// ------------------------------------------------------------------------------------------------ protocols

// The mean over `starts` of the loss of single windows, computed with the library.
double mean_loss(const Workshop& w, const fs::path& checkpoint_path, const std::vector<int64_t>& starts, int64_t T,
                 int64_t scored) {
    const Checkpoint checkpoint = load_checkpoint(checkpoint_path, {});
    const TokenStream corpus = open_token_stream(w.corpus);
    const auto part = split_corpus(corpus.tokens, 0.9).eval;
    Activations acts = make_activations(checkpoint.model.shape, 1, T, Mode::inference, false);
    double sum = 0;
    for (int64_t start : starts) {
        const Batch batch = make_batch(part, std::vector<int64_t>{start}, T);
        sum += evaluate_batch(checkpoint.model, acts, batch.tokens, batch.targets, 1, T, scored).loss;
    }
    return sum / static_cast<double>(starts.size());
}

TEST(EvalLm, SequentialWindowsAreTheWholeHeldOutPart) {
    Workshop w;
    const fs::path full = w.save("full.safetensors", {});
    const json list = w.evaluate({full, "--windows", "sequential", "--contexts", "64,100,2100", "--batch", "1"});
    ASSERT_EQ(list.size(), 3u);
    for (const json& e : list) {
        const int64_t T = e["context"], count = 2159 / T;
        std::vector<int64_t> starts;
        for (int64_t n = 0; n < count; n++) starts.push_back(n * T);
        EXPECT_EQ(e["protocol"]["windows"], "sequential");
        EXPECT_EQ(e["protocol"]["window_count"], count);
        EXPECT_EQ(e["protocol"]["disjoint_windows"], count);
        EXPECT_EQ(e["protocol"]["targets_scored"], count * T);
        EXPECT_NEAR(e["loss"], mean_loss(w, full, starts, T, T), 1e-12);
    }
    // A last batch with fewer windows than the others is evaluated too.
    const json ragged = w.evaluate({full, "--windows", "sequential", "--contexts", "100", "--batch", "4"});
    EXPECT_EQ(ragged[0]["protocol"]["window_count"], 21);
    EXPECT_EQ(ragged[0]["protocol"]["batches"], 6);
    EXPECT_NEAR(ragged[0]["loss"], list[1]["loss"].get<double>(), 1e-6);
    // The last token is the target of the last input: a window of all tokens but one fits.
    EXPECT_EQ(w.evaluate({full, "--windows", "sequential", "--contexts", "2159"})[0]["protocol"]["window_count"], 1);
}

TEST(EvalLm, LastTargetsAreTheSameForCheckpointsOfEveryTrainingLength) {
    Workshop w;
    const fs::path near = w.save("near.safetensors", {"model.position=none", "train.context=32"});
    const fs::path far = w.save("far.safetensors", {"model.position=none", "train.context=400"});
    const json list = w.evaluate({near, far, "--contexts", "32,64", "--targets", "last:16", "--batches", "2"});
    ASSERT_EQ(list.size(), 4u);
    EXPECT_EQ(list[0]["loss"], list[2]["loss"]);
    EXPECT_EQ(list[1]["loss"], list[3]["loss"]);
}

TEST(EvalLm, ATrainingLengthThatDoesNotFitLeavesNoDelta) {
    Workshop w;
    const fs::path far = w.save("far.safetensors", {"train.context=4096"});
    const json list = w.evaluate({far, "--contexts", "64", "--batches", "1"});
    EXPECT_FALSE(list[0].contains("delta_loss"));
    EXPECT_FALSE(list[0].contains("train_len_loss"));
    EXPECT_GT(list[0]["loss"], 0);
}

TEST(EvalLm, AResultThatCannotBeWrittenIsAFailure) {
    Workshop w;
    const std::string command = test::program_path("eval_lm").string() + " " + w.save("m.safetensors", {}).string() +
                                " --contexts 32 --batches 1 2>/dev/null >/dev/full";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), kExitFailed);
}

TEST(EvalLm, EarlierCheckpointsAreNotLostWhenALaterOneFails) {
    Workshop w;
    const fs::path good = w.save("good.safetensors", {});
    const fs::path bad = w.save("bad.safetensors", {}, [](Model& m) { spoil(m, "norm.weight"); });
    const fs::path csv = w.path("table.csv");
    const ProgramResult result = run_program("eval_lm", {good, bad, "--contexts", "32", "--csv", csv});
    EXPECT_EQ(result.exit_code, kExitFailed);
    EXPECT_NE(result.err.find("parameter norm.weight"), std::string::npos) << result.err;
    EXPECT_EQ(read_csv(csv).size(), 1u);
}

TEST(EvalLm, LastTargetsAreTheSameUnderEachLength) {
    Workshop w;
    // Logits that are the head's bias alone: the loss is then a function of the targets alone.
    const fs::path blind = w.save("blind.safetensors", {"model.position=none"}, [](Model& m) {
        device_zero(m.parameters.data, m.parameters.bytes());
        test::change_parameters(m, "head.bias", [](Floats& values) {
            for (size_t v = 0; v < values.size(); v++) values[v] = static_cast<float>(v % 37) * 0.1f;
        });
    });
    for (const char* windows : {"random", "sequential"}) {
        SCOPED_TRACE(windows);
        const Texts common = {blind, "--contexts", "32,64,300", "--windows", windows, "--batches", "4"};
        Texts fixed = common;
        fixed.insert(fixed.end(), {"--targets", "last:16"});
        const json same = w.evaluate(fixed), all = w.evaluate(common);
        ASSERT_EQ(same.size(), 3u);
        for (const json& e : same) {
            EXPECT_NEAR(e["loss"], same[0]["loss"].get<double>(), 1e-12);
            EXPECT_EQ(e["protocol"]["targets"], "last:16");
            EXPECT_EQ(e["protocol"]["window_count"], same[0]["protocol"]["window_count"]);
            EXPECT_EQ(e["protocol"]["targets_scored"], 16 * e["protocol"]["window_count"].get<int64_t>());
        }
        EXPECT_GT(std::fabs(all[0]["loss"].get<double>() - all[2]["loss"].get<double>()), 1e-4);
    }

    // A model that sees: windows drawn for the longest length, and their ends.
    const fs::path full = w.save("full.safetensors", {});
    const json list =
        w.evaluate({full, "--contexts", "32,64,300", "--targets", "last:16", "--batches", "4", "--seed", "2"});
    std::vector<int64_t> ends;
    for (uint64_t n = 0; n < 4; n++) {
        TorchGenerator generator = make_indexed_generator(2, kEvalWindows, n);
        ends.push_back(draw_windows(generator, 2160, 300, 1)[0] + 300);
    }
    for (const json& e : list) {
        const int64_t T = e["context"];
        std::vector<int64_t> starts;
        for (int64_t end : ends) starts.push_back(end - T);
        EXPECT_NEAR(e["loss"], mean_loss(w, full, starts, T, 16), 1e-12) << T;
    }
}

TEST(EvalLm, TheSameSeedGivesTheSameWindowsAndAnotherOthers) {
    Workshop w;
    const std::string full = w.save("full.safetensors", {});
    const json one = w.evaluate({full, "--seed", "1"}), again = w.evaluate({full, "--seed", "1"});
    const json two = w.evaluate({full, "--seed", "2"});
    for (size_t i = 0; i < 3; i++) {
        EXPECT_EQ(one[i]["loss"], again[i]["loss"]);
        EXPECT_NE(one[i]["loss"], two[i]["loss"]);
    }
}

TEST(EvalLm, LossByPositionAddsUpToTheLoss) {
    Workshop w;
    const std::string full = w.save("full.safetensors", {}), rope = w.save("rope.safetensors", {"model.position=rope"});
    for (const Texts& extra : {Texts{}, Texts{"--targets", "last:20"}}) {
        Texts arguments = {full,      rope, "--contexts",         "33,64,100",
                           "--batch", "2",  "--loss-by-position", w.path("p.csv")};
        arguments.insert(arguments.end(), extra.begin(), extra.end());
        const json list = w.evaluate(arguments);
        const auto rows = read_csv(w.path("p.csv"));
        ASSERT_EQ(list.size(), 6u);
        for (const json& e : list) {
            double sum = 0;
            int64_t count = 0, reached = 0;
            for (const auto& row : rows) {
                if (row.at("checkpoint") != e["checkpoint"] || std::stoll(row.at("context")) != e["context"]) continue;
                const int64_t begin = std::stoll(row.at("begin")), end = std::stoll(row.at("end"));
                if (extra.empty()) {
                    EXPECT_EQ(begin, reached);
                }
                EXPECT_LT(begin, end);
                reached = end;
                sum += std::stod(row.at("loss")) * std::stod(row.at("targets"));
                count += std::stoll(row.at("targets"));
            }
            EXPECT_EQ(reached, e["context"]);
            EXPECT_EQ(count, e["protocol"]["targets_scored"]);
            EXPECT_NEAR(sum / static_cast<double>(count), e["loss"], 1e-6);
        }
    }
}

// ------------------------------------------------------------------------------------------------ speed and memory

TEST(EvalLmSpeed, PublishedSizeAt32768) {
    if (!test::is_fast_build()) GTEST_SKIP() << "the emulator, or a build without optimisation or with a sanitizer";
    if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "the demand is for two cores";
    Workshop w;
    write_file_atomically(w.corpus, make_motif_corpus({.bars = 12800, .seed = 1}).text);
    w.corpus_sha256 = sha256_hex(read_file(w.corpus));
    const fs::path full = w.save("full.safetensors", {"model={position: full}", "train={context: 1024}"});
    double best_seconds = 1e9, peak = 0;
    for (int attempt = 0; attempt < 2 && best_seconds >= 30; attempt++) {  // other programs may be busy
        const auto start = std::chrono::steady_clock::now();
        test::RunningProgram program = test::start_program(
            "eval_lm", {full, "--contexts", "32768", "--batches", "1", "--attention-stats", "--json", w.path("e.json")},
            {"OMP_NUM_THREADS=2"});
        while (test::is_running(program)) {
            peak = std::max(peak, static_cast<double>(test::peak_resident_bytes(program)));
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        const ProgramResult result = test::wait_for_program(program);
        ASSERT_EQ(result.exit_code, kExitGood) << result.err;
        best_seconds =
            std::min(best_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    EXPECT_TRUE(json::parse(read_file(w.path("e.json")))[0].contains("effective_support"));
    EXPECT_LT(best_seconds, 30);
    EXPECT_GT(peak, 10e6);
    EXPECT_LT(peak, 400e6);
    RecordProperty("seconds", std::to_string(best_seconds));
    RecordProperty("peak_resident_bytes", std::to_string(peak));
}

// ------------------------------------------------------------------------------------------------ attention

// Attention through cuDNN is no property of a model: what was trained with it loads in every build, and so does what
// was saved before there was the key.
TEST(EvalLm, HowACheckpointWasTrainedDoesNotBind) {
    const Workshop w;
    const fs::path path = w.save("trained.safetensors", {"model.position=rope"});
    const Texts arguments = {path, "--contexts", "64", "--batches", "1"};
    const json want = w.evaluate(arguments);
    SafetensorsFile file = read_safetensors(path);
    json config = json::parse(file.metadata[kMetadataConfig]);
    EXPECT_EQ(config["model"]["attention"], "fused");
    const auto save = [&] {
        file.metadata[kMetadataConfig] = config.dump();
        write_safetensors(path, file);
    };
    config["model"]["attention"] = "cudnn";
    save();
    EXPECT_EQ(w.evaluate(arguments)[0]["loss"], want[0]["loss"]);
    config["model"].erase("attention");
    save();
    EXPECT_EQ(w.evaluate(arguments)[0]["loss"], want[0]["loss"]);
    if (!kHasCudnn)
        expect_error(run_program("eval_lm", {path, "--set", "model.attention=cudnn"}), "eval_lm", kExitUsage,
                     {"--set model.attention=cudnn: model.attention: cudnn in a program built with BACKEND="});
}

// ------------------------------------------------------------------------------------------------ exact skipping

TEST(EvalLm, ReportsWhatItSkippedAndSkipsNothingOnRequest) {
    Workshop w;
    // Steep enough that at 1024 tokens most tiles cannot count.
    const fs::path steep = w.save("steep.safetensors", {"model.position=affine", "model.init_affine_slope=60"});
    const fs::path none = w.save("none.safetensors", {"model.position=none"});
    const Texts arguments = {steep, none, "--contexts", "1024", "--batches", "1", "--attention-stats"};
    Texts every = arguments;
    every.insert(every.end(), {"--set", "model.exact_skipping=false", "--csv", w.path("every.csv")});
    Texts skipping = arguments;
    skipping.insert(skipping.end(), {"--csv", w.path("skipping.csv")});
    const json with = w.evaluate(skipping), without = w.evaluate(every);
    EXPECT_GT(with[0]["attention_skipped"].get<double>(), 0.3);
    EXPECT_EQ(with[1]["attention_skipped"], 0.0);
    EXPECT_EQ(without[0]["attention_skipped"], 0.0);
    EXPECT_EQ(with[1]["loss"], without[1]["loss"]);
    for (const char* figure : {"loss", "logit_std", "logit_abs_max", "entropy", "effective_support", "mean_lag"}) {
        const double a = with[0][figure], b = without[0][figure];
        EXPECT_NEAR(a, b, test::by_precision(1e-5, 1e-3) * std::fabs(b)) << figure;
    }
    EXPECT_EQ(std::stod(read_csv(w.path("skipping.csv"))[0].at("attention_skipped")), with[0]["attention_skipped"]);
    EXPECT_EQ(std::stod(read_csv(w.path("every.csv"))[0].at("attention_skipped")), 0.0);
    const Texts table = lines_of(run_program("eval_lm", arguments).out);
    EXPECT_NE(table[1].find("skipped"), std::string::npos);
    EXPECT_NE(table[2].find(fmt::format(" {:.0f}% ", 100 * with[0]["attention_skipped"].get<double>())),
              std::string::npos)
        << table[2];
}

}  // namespace
}  // namespace jetlag

#include "train/run_folder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"
#include "src/error.h"
#include "src/files.h"

namespace jetlag {

using nlohmann::json;
using nlohmann::ordered_json;

static const char* const kLogHeader = "step,loss,heldout_loss,grad_norm,lr,tokens_per_second,percent_of_peak,seconds\n";
static const char* const kMetadataGenerator = "generator";

std::filesystem::path config_path(const std::filesystem::path& folder) {
    return folder / "config.yaml";
}
std::filesystem::path state_path(const std::filesystem::path& folder) {
    return folder / "state.safetensors";
}
std::filesystem::path initial_eval_path(const std::filesystem::path& folder) {
    return folder / "initial_eval.json";
}
std::filesystem::path evaluation_path(const std::filesystem::path& folder) {
    return folder / "evaluation.json";
}
std::filesystem::path evaluation_csv_path(const std::filesystem::path& folder) {
    return folder / "evaluation.csv";
}
static std::filesystem::path csv_path(const std::filesystem::path& folder) {
    return folder / "log.csv";
}
static std::filesystem::path jsonl_path(const std::filesystem::path& folder) {
    return folder / "log.jsonl";
}

void check_output_not_taken(const std::string& option, const std::filesystem::path& path,
                            const std::vector<std::string>& taken) {
    check_output_path(option, path);
    if (std::filesystem::is_character_file(path)) return;
    for (const std::string& other : taken) {
        if (other.empty()) continue;
        std::vector<std::filesystem::path> files = {other};
        if (std::filesystem::is_directory(other))
            files = {config_path(other),     initial_eval_path(other),  csv_path(other),
                     jsonl_path(other),      checkpoint_file(other),    state_path(other),
                     evaluation_path(other), evaluation_csv_path(other)};
        for (const std::filesystem::path& file : files)
            if (same_place(path, file)) fail_usage("{} {}: is taken by {}", option, path.string(), other);
    }
}

bool holds_a_run(const std::filesystem::path& folder) {
    for (const auto& path : {state_path(folder), checkpoint_file(folder)})
        if (std::filesystem::exists(path)) return true;
    return std::filesystem::exists(csv_path(folder)) && read_file(csv_path(folder)).size() > std::strlen(kLogHeader);
}

void save_run(const std::filesystem::path& folder, const Model& model, const TrainingState& state,
              const RunIdentity& identity) {
    SafetensorsFile file;
    file.metadata[kMetadataConfig] = identity.config;
    file.metadata[kMetadataStep] = std::to_string(state.step);
    file.metadata[kMetadataCorpus] = identity.corpus_sha256;
    file.metadata[kMetadataPrecision] = kPrecision;
    file.metadata[kMetadataGenerator] = generator_state(state.generator);
    file.tensors = parameter_tensors(model, model.parameters.data, "");
    for (const auto& [prefix, values] : {std::pair("adam.m.", state.m.data), std::pair("adam.v.", state.v.data)})
        for (Tensor& tensor : parameter_tensors(model, values, prefix)) file.tensors.push_back(std::move(tensor));
    try {
        // The logs first: a state never claims a step whose row could still be lost.
        sync_file(csv_path(folder));
        sync_file(jsonl_path(folder));
        write_safetensors(state_path(folder), file);
        save_checkpoint(checkpoint_file(folder), model, identity.config, state.step, identity.corpus_sha256);
    } catch (const Error& e) {
        const int64_t good = saved_step(folder);
        fail("{}; {}", e.what(),
             good >= 0 ? fmt::format("the last good state, of step {}, is in {}", good, state_path(folder).string())
                       : "no state was saved before");
    }
}

static std::string metadata_of(const SafetensorsFile& file, const char* key, const std::string& name) {
    const auto found = file.metadata.find(key);
    if (found == file.metadata.end()) fail("{}: no {} in its metadata: not a jetlag training state", name, key);
    return found->second;
}

static int64_t step_of(const SafetensorsFile& file, const std::string& name) {
    const std::string text = metadata_of(file, kMetadataStep, name);
    if (text.empty() || text.size() > 12 || text.find_first_not_of("0123456789") != std::string::npos)
        fail("{}: step '{}' in its metadata is not a number", name, text);
    return std::stoll(text);
}

int64_t saved_step(const std::filesystem::path& folder) {
    try {
        return step_of(read_safetensors(state_path(folder)), "");
    } catch (const Error&) {
        return -1;
    }
}

bool is_free_training_key(const std::string& key, const TrainSettings& train) {
    if (key == "train.steps") return train.schedule == "constant";
    for (const char* free : {"train.log_every", "train.eval_every", "train.eval_batches", "train.save_every",
                             "train.initial_eval_batches", "train.recompute"})
        if (key == free) return true;
    return false;
}

static void check_same_config(const std::string& saved_json, const RunIdentity& identity, const std::string& name) {
    std::string resolved;
    try {
        resolved = identity.resolve(saved_json, name);
    } catch (const Error& e) {
        fail("{}", e.what());  // a damaged file, not a bad configuration
    }
    const json saved = json::parse(resolved).flatten(), now = json::parse(identity.config).flatten();
    std::vector<std::string> keys;
    for (const json* side : {&saved, &now})
        for (const auto& item : side->items()) keys.push_back(item.key());
    for (const std::string& pointer : keys) {
        const json was = saved.value(pointer, json()), is = now.value(pointer, json());
        std::string key = pointer.substr(1);
        std::replace(key.begin(), key.end(), '/', '.');
        if (was != is && !identity.may_change(key))
            fail_usage("{}: cannot resume: {} was {} and is {} now", name, key, was.dump(), is.dump());
    }
}

void load_run(const std::filesystem::path& folder, Model& model, TrainingState& state, const RunIdentity& identity) {
    if (!std::filesystem::exists(state_path(folder)) && std::filesystem::exists(checkpoint_file(folder)))
        fail_usage("{}: cannot resume: not there, but {} is, which starting again would replace; give another --out",
                   state_path(folder).string(), checkpoint_file(folder).string());
    const std::string name = state_path(folder).string();
    const SafetensorsFile file = read_safetensors(name);
    check_same_config(metadata_of(file, kMetadataConfig, name), identity, name);
    // States of before there were others do not say it.
    const auto found = file.metadata.find(kMetadataPrecision);
    const std::string precision = found != file.metadata.end() ? found->second : "fp32";
    if (precision != kPrecision)
        fail_usage("{}: cannot resume: the run was trained in {}, and this build computes in {} (make PRECISION={})",
                   name, precision, kPrecision, precision);
    const std::string corpus = metadata_of(file, kMetadataCorpus, name);
    if (corpus != identity.corpus_sha256)
        fail_usage("{}: cannot resume: the run was trained on a corpus with SHA-256 {}, but {} has {}", name, corpus,
                   identity.corpus, identity.corpus_sha256);
    read_parameter_tensors(model, model.parameters.data, file, "", name);
    read_parameter_tensors(model, state.m.data, file, "adam.m.", name);
    read_parameter_tensors(model, state.v.data, file, "adam.v.", name);
    state.step = step_of(file, name);
    state.generator = generator_from_state(metadata_of(file, kMetadataGenerator, name));
    if (state.step > identity.steps)
        fail_usage("{}: cannot resume: the run has taken {} steps already, and train.steps is {}", name, state.step,
                   identity.steps);
}

void start_logs(const std::filesystem::path& folder) {
    write_file_atomically(csv_path(folder), kLogHeader);
    write_file_atomically(jsonl_path(folder), std::string_view());
}

// Keeps the complete lines up to `step`; the last line may have been cut short by a kill or a full disk.
double truncate_logs(const std::filesystem::path& folder, int64_t step) {
    double seconds = 0;
    for (const auto& path : {csv_path(folder), jsonl_path(folder)}) {
        const bool is_csv = path == csv_path(folder);
        const std::string text = std::filesystem::exists(path) ? read_file(path) : "";
        std::string kept = is_csv ? kLogHeader : "";
        size_t begin = 0;
        for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
            const std::string line = text.substr(begin, end - begin);
            int64_t line_step = -1;
            if (is_csv) {
                if (!line.empty() && std::isdigit(static_cast<unsigned char>(line[0])))
                    line_step = std::atoll(line.c_str());
            } else {
                const json row = json::parse(line, nullptr, false);
                if (row.is_object() && row.contains("step") && row["step"].is_number_integer()) line_step = row["step"];
            }
            if (line_step < 0 || line_step > step) continue;
            kept += line + "\n";
            if (is_csv) seconds = std::atof(line.substr(line.rfind(',') + 1).c_str());
        }
        write_file_atomically(path, kept);
    }
    return seconds;
}

void append_log(const std::filesystem::path& folder, const LogRow& row) {
    append_file(csv_path(folder),
                fmt::format("{},{},{},{},{},{},{},{}\n", row.step, row.loss,
                            row.heldout_loss ? fmt::format("{}", *row.heldout_loss) : "", row.grad_norm, row.lr,
                            row.tokens_per_second, row.percent_of_peak, row.seconds));
    ordered_json object = {{"step", row.step}, {"loss", row.loss}};
    if (row.heldout_loss) object["heldout_loss"] = *row.heldout_loss;
    object["grad_norm"] = row.grad_norm;
    object["lr"] = row.lr;
    object["tokens_per_second"] = row.tokens_per_second;
    object["percent_of_peak"] = row.percent_of_peak;
    object["seconds"] = row.seconds;
    append_file(jsonl_path(folder), object.dump() + "\n");
}

}  // namespace jetlag

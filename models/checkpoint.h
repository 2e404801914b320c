// Checkpoints: one safetensors file with the parameters under their published names and the whole configuration
// as JSON in its metadata.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/model.h"
#include "src/safetensors.h"

namespace jetlag {

// Keys of a checkpoint's __metadata__.
inline constexpr const char* kMetadataConfig = "config";         // JSON
inline constexpr const char* kMetadataStep = "step";             // optimizer steps taken
inline constexpr const char* kMetadataCorpus = "corpus_sha256";  // of the stream that it was trained on
inline constexpr const char* kMetadataPrecision = "precision";   // kPrecision of the build that trained it

// The parameters of a model as tensors named PREFIX + name; `values` is laid out like the parameters.
std::vector<Tensor> parameter_tensors(const Model& model, const float* values, const std::string& prefix);

// The inverse: reads tensors named PREFIX + name into `values`. `file` names the file in errors: a tensor that is
// missing, of the wrong shape or dtype.
void read_parameter_tensors(const Model& model, float* values, const SafetensorsFile& file, const std::string& prefix,
                            const std::string& file_name);

// config: the resolved configuration as JSON; corpus_sha256: "" where there is no corpus.
void save_checkpoint(const std::filesystem::path& path, const Model& model, const std::string& config, int64_t step,
                     const std::string& corpus_sha256);

// The checkpoint of a run folder.
std::filesystem::path checkpoint_file(const std::filesystem::path& run_folder);

struct Checkpoint {
    std::filesystem::path path;
    std::vector<Setting> settings;  // what the configuration was made from
    Config config;
    Model model;
    std::string corpus_sha256;  // "" if the file does not say
};

// Reads a checkpoint file, or the checkpoint.safetensors of a run folder. `overrides` are KEY=VALUEs on top of its
// configuration: a model trained with rope can be evaluated with model.position=rope_yarn.
//
// A file without jetlag's metadata is taken for a state dict of the published PyTorch code: sizes are read from its
// tensors, and what tensors do not show (model.position, model.heads, train.context) from its metadata (method,
// num_heads, train_len, rope_base), or from the overrides; an error says which are missing. Every tensor of the model
// must be there with its shape, and no other. Nothing at the path is bad usage (exit code 2); so is a folder without
// a checkpoint; a file that is damaged or none of these has exit code 1.
Checkpoint load_checkpoint(const std::filesystem::path& path, const std::vector<std::string>& overrides);

}  // namespace jetlag

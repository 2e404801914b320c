#include "models/checkpoint.h"

#include <algorithm>
#include <set>

#include "src/error.h"

namespace jetlag {

std::vector<Tensor> parameter_tensors(const Model& model, const float* values, const std::string& prefix) {
    std::vector<float> host(static_cast<size_t>(model.parameters.size));
    copy_to_host(host.data(), values, host.size() * sizeof(float));
    std::vector<Tensor> tensors;
    for (const ParameterInfo& info : model.layout)
        tensors.push_back(make_f32_tensor(prefix + info.name, info.shape,
                                          {host.data() + info.offset, static_cast<size_t>(info.size)}));
    return tensors;
}

void read_parameter_tensors(const Model& model, float* values, const SafetensorsFile& file, const std::string& prefix,
                            const std::string& file_name) {
    std::vector<float> host(static_cast<size_t>(model.parameters.size));
    for (const ParameterInfo& info : model.layout) {
        const Tensor* tensor = find_tensor(file, prefix + info.name);
        if (tensor == nullptr)
            fail("{}: no tensor {}{}, which a model with position {} and {} layers has", file_name, prefix, info.name,
                 model.shape.position, model.shape.layers);
        if (tensor->shape != info.shape)
            fail("{}: tensor {} has shape {}, wanted {}", file_name, tensor->name, shape_text(tensor->shape),
                 shape_text(info.shape));
        const std::span<const float> from = f32_values(*tensor, file_name);
        std::copy(from.begin(), from.end(), host.begin() + info.offset);
    }
    copy_to_device(values, host.data(), host.size() * sizeof(float));
}

void save_checkpoint(const std::filesystem::path& path, const Model& model, const std::string& config, int64_t step,
                     const std::string& corpus_sha256) {
    SafetensorsFile file;
    file.metadata[kMetadataConfig] = config;
    file.metadata[kMetadataStep] = std::to_string(step);
    file.metadata[kMetadataCorpus] = corpus_sha256;
    file.metadata[kMetadataPrecision] = kPrecision;
    file.tensors = parameter_tensors(model, model.parameters.data, "");
    write_safetensors(path, file);
}

// The text of a setting; "" if it is not set.
static std::string value_of(const std::vector<Setting>& settings, const std::string& path) {
    for (const Setting& setting : settings)
        if (setting.path == path) return setting.value;
    return "";
}

static std::string metadata_value(const SafetensorsFile& file, const std::string& key) {
    const auto found = file.metadata.find(key);
    return found != file.metadata.end() ? found->second : "";
}

// What a state dict of the published PyTorch code says of its configuration, as KEY=VALUEs.
static std::vector<std::string> published_settings(const SafetensorsFile& file, const std::string& file_name) {
    const auto shape = [&](const std::string& name, size_t rank) -> std::vector<int64_t> {
        const Tensor* tensor = find_tensor(file, name);
        if (tensor == nullptr || tensor->shape.size() != rank) return {};
        return tensor->shape;
    };
    const std::vector<int64_t> embedding = shape("embedding.weight", 2);
    if (embedding.empty())
        fail(
            "{}: neither a jetlag checkpoint nor a state dict of the published code: no tensor embedding.weight of two "
            "dimensions",
            file_name);
    std::vector<std::string> settings = {"model.embed_dim=" + std::to_string(embedding[1])};
    int64_t layers = 0;
    while (find_tensor(file, "blocks." + std::to_string(layers) + ".norm1.weight") != nullptr) layers++;
    settings.push_back("model.layers=" + std::to_string(layers));
    if (const auto mlp = shape("blocks.0.mlp.0.weight", 2); !mlp.empty() && mlp[1] > 0)
        settings.push_back("model.mlp_ratio=" + std::to_string(mlp[0] / mlp[1]));
    if (const auto alpha = shape("blocks.0.attn.pj_bias.fj_alpha_logits", 2); !alpha.empty()) {
        settings.push_back("model.heads=" + std::to_string(alpha[0]));
        settings.push_back("model.max_order=" + std::to_string(alpha[1] - 1));
    }
    const std::pair<const char*, const char*> known[] = {{"method", "model.position"},
                                                         {"num_heads", "model.heads"},
                                                         {"train_len", "train.context"},
                                                         {"rope_base", "model.rope_base"}};
    for (const auto& [theirs, ours] : known)
        if (const std::string value = metadata_value(file, theirs); !value.empty())
            settings.push_back(std::string(ours) + "=" + value);
    return settings;
}

std::filesystem::path checkpoint_file(const std::filesystem::path& run_folder) {
    return run_folder / "checkpoint.safetensors";
}

Checkpoint load_checkpoint(const std::filesystem::path& given, const std::vector<std::string>& overrides) {
    Checkpoint checkpoint;
    checkpoint.path = std::filesystem::is_directory(given) ? checkpoint_file(given) : given;
    const std::string name = checkpoint.path.string();
    if (!std::filesystem::exists(checkpoint.path))
        fail_usage("{}: {} (wanted a run folder, or a safetensors file)", given.string(),
                   checkpoint.path == given ? "no such file or folder" : "a folder without checkpoint.safetensors");
    const SafetensorsFile file = read_safetensors(checkpoint.path);

    std::vector<Setting>& settings = checkpoint.settings;
    const std::string json = metadata_value(file, kMetadataConfig);
    if (!json.empty()) {
        try {
            settings = settings_from_json(json, name);
        } catch (const Error& e) {
            fail("{}", e.what());  // a damaged file, not a bad configuration
        }
        // How it was trained binds nobody who evaluates it, perhaps elsewhere: cuDNN only if asked for again.
        std::erase_if(settings, [](const Setting& setting) { return setting.path == "model.attention"; });
        const std::string heads = value_of(settings, "model.heads");
        add_overrides(settings, overrides);
        // Every other size shows in the tensors' shapes.
        if (value_of(settings, "model.heads") != heads)
            fail_usage("{}: model.heads: {} is another model than that of {}, which has {}",
                       where_set(settings, "model.heads"), value_of(settings, "model.heads"), name, heads);
    } else {
        add_overrides(settings, published_settings(file, name));
        for (Setting& setting : settings) setting.where = name;
        add_overrides(settings, overrides);
        std::string missing;
        for (const char* key : {"model.position", "model.heads", "train.context"}) {
            const bool composed = std::any_of(settings.begin(), settings.end(), [key](const Setting& setting) {
                return setting.path.starts_with(std::string(key) + ".");
            });
            if (where_set(settings, key) == "default" && !composed)
                missing += std::string(missing.empty() ? "" : ", ") + key;
        }
        if (!missing.empty())
            fail_usage("{}: has no jetlag metadata, and its tensors do not show {}: give each with --set KEY=VALUE",
                       name, missing);
    }
    checkpoint.config = make_config(settings);
    checkpoint.corpus_sha256 = metadata_value(file, kMetadataCorpus);
    checkpoint.model = make_model(model_shape(checkpoint.config));
    read_parameter_tensors(checkpoint.model, checkpoint.model.parameters.data, file, "", name);
    std::set<std::string> wanted;
    for (const ParameterInfo& info : checkpoint.model.layout) wanted.insert(info.name);
    for (const Tensor& tensor : file.tensors)
        if (!wanted.contains(tensor.name))
            fail("{}: tensor {} is no part of a model with position {} and {} layers", name, tensor.name,
                 checkpoint.model.shape.position, checkpoint.model.shape.layers);
    return checkpoint;
}

}  // namespace jetlag

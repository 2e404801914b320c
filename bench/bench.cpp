// bench: what the machine can do, and how near each op, a training step and an evaluation come to it.
//
// Two ceilings are measured first: multiply-adds per second on registers, and bytes copied per second between arrays
// that no cache holds. Each row then states its arithmetic and the bytes that it must read and write at least, so that
// both ceilings can be read off. An op takes turns on several sets of arrays, together larger than the private caches,
// since in use its activations come from memory or the last-level cache too; weights and workspaces are the same every
// time, as in use. A median is over --repeat samples; a sample runs the op as often as 10 ms need.
#include <regex.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "data_prep/motif.h"
#include "kernels/ops.h"
#include "kernels/position/registry.h"
#include "models/checkpoint.h"
#include "models/config.h"
#include "models/model.h"
#include "models/windows.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/progress.h"

namespace jetlag {
namespace {

constexpr double kSampleSeconds = 0.01;
constexpr double kLongRowSeconds = 5;        // after so many seconds of samples three are enough
constexpr int64_t kRotatedBytes = 64 << 20;  // arrays that take turns are so large together
constexpr int64_t kHeads = 4;                // of the published model, and of the single attention ops
constexpr int64_t kComparedLosses = 3;       // of a training row, for bench/compare
constexpr double kRealBytes = sizeof(real);

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------------------------------------------
// Rows

struct Row {
    std::string name;    // KIND/METHOD or op/sizes
    std::string kind;    // the name up to its first '/'
    std::string method;  // "" where none is involved
    int64_t T = 0, B = 0;
    int threads = 0;              // 0: as many as the program has
    double flops = 0, bytes = 0;  // of one run; 0: not stated
    std::vector<double> seconds;  // sorted
    double peak = 0;              // FLOP/s just before or after, the higher: clocks drift
    std::vector<double> losses;
    OpTimes shares;                            // seconds of each op over all samples
    std::optional<int64_t> peak_memory_bytes;  // resident, of the whole process, during this row
    std::optional<double> skipped;             // share of attention tiles
};

// What a row runs, made when its turn comes so that its memory lives no longer than it.
struct Work {
    std::function<void()> run;
    std::function<void(Row&)> finish = nullptr;  // adds what else the row reports
};
struct Case {
    Row row;
    std::function<Work()> make;
};

double median(const std::vector<double>& sorted) {
    const size_t n = sorted.size();
    return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

// Restarts the kernel's account of peak resident memory; false where the system has none.
bool reset_peak_memory() {
    std::ofstream file("/proc/self/clear_refs");
    file << "5" << std::flush;
    return file.good();
}
std::optional<int64_t> peak_memory() {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
    return std::nullopt;
}

Row measure(const Case& c, int64_t repeat) {
    Row row = c.row;
    const int threads_before = thread_count();
    if (row.threads > 0) set_thread_count(row.threads);
    row.peak = measure_peak_flops();
    const bool has_memory = reset_peak_memory();
    const Work work = c.make();
    const auto seconds_of = [&work](int64_t runs) {
        device_wait();
        const double start = now();
        for (int64_t i = 0; i < runs; i++) work.run();
        device_wait();
        return now() - start;
    };
    double once = seconds_of(1);
    if (once < 1) once = seconds_of(1);  // the first run of a short row is no measure
    const int64_t runs = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(kSampleSeconds / once)));
    const double begin = now();
    while (std::ssize(row.seconds) < repeat && (std::ssize(row.seconds) < 3 || now() - begin < kLongRowSeconds)) {
        row.seconds.push_back(seconds_of(runs) / static_cast<double>(runs));
    }
    row.peak = std::max(row.peak, measure_peak_flops());
    std::sort(row.seconds.begin(), row.seconds.end());
    if (has_memory) row.peak_memory_bytes = peak_memory();
    if (work.finish != nullptr) work.finish(row);
    set_thread_count(threads_before);
    return row;
}

// ---------------------------------------------------------------------------------------------------------------
// Single ops

// So many values of an array: of `real`, or of float32 where that is said.
struct Size {
    int64_t n;
    bool single = false;
    Size(int64_t n, bool single = false) : n(n), single(single) {}
    int64_t bytes() const { return n * static_cast<int64_t>(single ? sizeof(float) : sizeof(real)); }
};
Size floats(int64_t n) {
    return {n, true};
}
// An array on the device, whose `data` is a pointer of the type that an op asks for.
struct Array {
    struct Pointer {
        void* memory = nullptr;
        template <typename T>
        operator T*() const {
            return static_cast<T*>(memory);
        }
    };
    DeviceArray<uint8_t> memory;
    Pointer data;
};
using Arrays = std::vector<Array>;

Array random_array(Size n, float size) {
    Array array;
    array.memory = DeviceArray<uint8_t>(n.bytes());
    array.data.memory = array.memory.data;
    std::vector<float> values(static_cast<size_t>(n.n));
    TorchGenerator generator = make_generator(static_cast<uint64_t>(n.n));
    fill_uniform(generator, -size, size, values);
    std::vector<real> reals;
    for (size_t i = 0; !n.single && i < values.size(); i++) reals.push_back(to_real(values[i]));
    const void* from = n.single ? static_cast<const void*>(values.data()) : reals.data();
    copy_to_device(array.memory.data, from, array.memory.bytes());
    return array;
}

// Calls op with the arrays of the next set at each run. `prepare` is called once for each set.
std::function<void()> rotating(const std::vector<Size>& sizes, float size, const std::function<void(const Arrays&)>& op,
                               const std::function<void(const Arrays&)>& prepare = nullptr) {
    int64_t bytes = 0;
    for (const Size& n : sizes) bytes += n.bytes();
    const int64_t count = std::clamp<int64_t>(kRotatedBytes / bytes, 1, 64);
    auto sets = std::make_shared<std::vector<Arrays>>();
    for (int64_t i = 0; i < count; i++) {
        Arrays set;
        for (const Size& n : sizes) set.push_back(random_array(n, size));
        if (prepare != nullptr) prepare(set);
        sets->push_back(std::move(set));
    }
    return [sets, op, turn = size_t{0}]() mutable {
        op((*sets)[turn]);
        turn = (turn + 1) % sets->size();
    };
}

// An array that all runs share.
std::shared_ptr<Array> shared_array(Size n, float size) {
    return std::make_shared<Array>(random_array(n, size));
}

Row op_row(const std::string& name, double flops, double bytes) {
    Row row;
    row.name = name;
    row.kind = name.substr(0, name.find('/'));
    row.flops = flops;
    row.bytes = bytes;
    return row;
}

void add_dense(std::vector<Case>& cases, const std::string& layer, const std::string& rows_name, int64_t N, int64_t C,
               int64_t OC) {
    const double weights = static_cast<double>(C * OC), rows = static_cast<double>(N);
    const std::string sizes = layer + rows_name;
    cases.push_back(
        {op_row("linear_forward/" + sizes, 2 * weights * rows, kRealBytes * rows * static_cast<double>(C + OC)), [=] {
             const auto weight = shared_array(C * OC, 0.1f), bias = shared_array(OC, 0.1f);
             return Work{rotating({N * OC, N * C}, 1, [=](const Arrays& a) {
                 linear_forward(a[0].data, a[1].data, weight->data, bias->data, N, C, OC);
             })};
         }});
    cases.push_back(
        {op_row("linear_backward/" + sizes, 4 * weights * rows, kRealBytes * rows * static_cast<double>(2 * C + OC)),
         [=] {
             const auto weight = shared_array(C * OC, 0.1f), dweight = shared_array(floats(C * OC), 0.1f),
                        dbias = shared_array(floats(OC), 0.1f),
                        workspace = shared_array(floats(linear_workspace_floats(N, C, OC)), 1);
             return Work{rotating({N * C, N * OC, N * C}, 1e-3f, [=](const Arrays& a) {
                 linear_backward(a[0].data, dweight->data, dbias->data, a[1].data, a[2].data, weight->data,
                                 workspace->data, N, C, OC);
             })};
         }});
}

// The ops that are one pass over memory, for N rows of C channels.
void add_passes(std::vector<Case>& cases, const std::string& rows, int64_t N, const ModelShape& s) {
    const int64_t C = s.embed_dim, V = s.vocab, hidden = N * s.mlp_dim;
    const double bytes = kRealBytes * static_cast<double>(N * C),
                 hidden_bytes = kRealBytes * static_cast<double>(hidden);
    cases.push_back({op_row("layernorm_forward" + rows, 0, 2 * bytes), [=] {
                         const auto weight = shared_array(floats(C), 1), bias = shared_array(floats(C), 1);
                         return Work{rotating({N * C, floats(N), floats(N), N * C}, 1, [=](const Arrays& a) {
                             layernorm_forward(a[0].data, a[1].data, a[2].data, a[3].data, weight->data, bias->data, N,
                                               C);
                         })};
                     }});
    cases.push_back({op_row("residual_layernorm_forward" + rows, 0, 4 * bytes), [=] {
                         const auto weight = shared_array(floats(C), 1), bias = shared_array(floats(C), 1);
                         return Work{
                             rotating({N * C, N * C, N * C, N * C, floats(N), floats(N)}, 1, [=](const Arrays& a) {
                                 residual_layernorm_forward(a[0].data, a[1].data, a[4].data, a[5].data, a[2].data,
                                                            a[3].data, weight->data, bias->data, N, C);
                             })};
                     }});
    cases.push_back({op_row("layernorm_backward" + rows, 0, 4 * bytes), [=] {
                         const auto weight = shared_array(floats(C), 1), dweight = shared_array(floats(C), 1),
                                    dbias = shared_array(floats(C), 1),
                                    workspace = shared_array(floats(layernorm_workspace_floats(N, C)), 1);
                         return Work{rotating({N * C, N * C, N * C, floats(N), floats(N)}, 1e-3f, [=](const Arrays& a) {
                             layernorm_backward(a[0].data, dweight->data, dbias->data, a[1].data, a[2].data,
                                                weight->data, a[3].data, a[4].data, workspace->data, N, C);
                         })};
                     }});
    cases.push_back({op_row("gelu_forward" + rows, 0, 2 * hidden_bytes), [=] {
                         return Work{rotating({hidden, hidden}, 3,
                                              [=](const Arrays& a) { gelu_forward(a[0].data, a[1].data, hidden); })};
                     }});
    cases.push_back({op_row("gelu_backward" + rows, 0, 3 * hidden_bytes), [=] {
                         return Work{rotating({hidden, hidden, hidden}, 3, [=](const Arrays& a) {
                             gelu_backward(a[0].data, a[1].data, a[2].data, hidden);
                         })};
                     }});
    cases.push_back({op_row("residual_forward" + rows, 0, 3 * bytes), [=] {
                         return Work{rotating({N * C, N * C, N * C}, 1, [=](const Arrays& a) {
                             residual_forward(a[0].data, a[1].data, a[2].data, N * C);
                         })};
                     }});
    const auto tokens_of = [](int64_t n, int64_t limit) {
        TorchGenerator generator = make_generator(1);
        std::vector<int64_t> drawn(static_cast<size_t>(n));
        fill_randint(generator, 0, limit, drawn);
        const std::vector<int32_t> narrow(drawn.begin(), drawn.end());
        auto tokens = std::make_shared<DeviceArray<int32_t>>(n);
        copy_to_device(tokens->data, narrow.data(), tokens->bytes());
        return tokens;
    };
    cases.push_back({op_row("cross_entropy" + rows, 0, 2 * kRealBytes * static_cast<double>(N * V)), [=] {
                         const auto tokens = tokens_of(N, V);
                         return Work{rotating({floats(N), N * V}, 3, [=](const Arrays& a) {
                             cross_entropy(a[0].data, a[1].data, a[1].data, tokens->data, 1e-4f, N, V);
                         })};
                     }});
    cases.push_back({op_row("embedding_forward" + rows, 0, 2 * bytes), [=] {
                         const auto tokens = tokens_of(N, V);
                         const auto weight = shared_array(floats(V * C), 1);
                         return Work{rotating({N * C}, 1, [=](const Arrays& a) {
                             embedding_forward(a[0].data, weight->data, tokens->data, N, C);
                         })};
                     }});
    cases.push_back({op_row("embedding_backward" + rows, 0, bytes), [=] {
                         const auto tokens = tokens_of(N, V);
                         const auto dweight = shared_array(floats(V * C), 1);
                         return Work{rotating({N * C}, 1e-3f, [=](const Arrays& a) {
                             embedding_backward(dweight->data, a[0].data, tokens->data, N, V, C);
                         })};
                     }});
}

void add_optimizer(std::vector<Case>& cases, int64_t n) {
    cases.push_back(
        {op_row(fmt::format("adamw/n{}", n), 0, 7 * 4 * static_cast<double>(n)), [=] {
             const auto takes_part = std::make_shared<DeviceArray<uint8_t>>(n);
             const std::vector<uint8_t> ones(static_cast<size_t>(n), 1);
             copy_to_device(takes_part->data, ones.data(), ones.size());
             return Work{rotating({floats(n), floats(n), floats(n), floats(n)}, 1e-3f, [=](const Arrays& a) {
                 // Second moments are not negative.
                 adamw(a[0].data, a[1].data, a[1].data, a[2].data, takes_part->data, {0, 0.9, 0.999, 1e-8, 0, 1}, 1, n);
             })};
         }});
}

// ---------------------------------------------------------------------------------------------------------------
// Position methods: tables and attention

// The published configuration with one method, and `overrides` over it.
Config method_config(const std::string& method, std::vector<std::string> overrides) {
    std::vector<Setting> settings;
    overrides.insert(overrides.begin(), "model.position=" + method);
    add_overrides(settings, overrides);
    return make_config(settings);
}

// A model of that configuration, initialised from seed 0.
struct Subject {
    Config config;
    Model model;
};
Subject make_subject(const std::string& method, const std::vector<std::string>& overrides) {
    Subject subject;
    subject.config = method_config(method, overrides);
    subject.model = make_model(model_shape(subject.config));
    TorchGenerator generator = make_generator(0);
    initialize_model(subject.model, generator);
    return subject;
}

// The two tables of a method for T tokens, the lag bias as in the first block of an initial model.
struct Tables {
    ModelShape shape;
    DeviceArray<float> rotary_memory, parameters, lag_bias;
    RotaryTable rotary;
};
std::shared_ptr<Tables> make_tables(const std::string& method, int64_t T, int64_t head_dim, int64_t heads = kHeads) {
    const Subject subject = make_subject(
        method, {fmt::format("model.embed_dim={}", heads * head_dim), fmt::format("model.heads={}", heads)});
    auto tables = std::make_shared<Tables>();
    tables->shape = subject.model.shape;
    tables->rotary_memory = DeviceArray<float>(rotary_floats(tables->shape, T));
    tables->rotary = make_rotary_table(tables->shape, tables->rotary_memory.data, T);
    const LagBiasSpec& spec = tables->shape.lag_bias;
    if (spec.module == nullptr) return tables;
    tables->parameters = DeviceArray<float>(std::max<int64_t>(1, bias_parameter_count(spec)));
    for (const ParameterInfo& info : subject.model.layout)
        if (info.name.starts_with(fmt::format("blocks.0.attn.{}.", spec.module->state_name))) {
            std::vector<float> values(static_cast<size_t>(bias_parameter_count(spec)));
            copy_to_host(values.data(), subject.model.parameters.data + info.offset, values.size() * sizeof(float));
            copy_to_device(tables->parameters.data, values.data(), values.size() * sizeof(float));
            break;
        }
    tables->lag_bias = DeviceArray<float>(spec.heads * T);
    lag_bias_table(tables->lag_bias.data, spec, tables->parameters.data, T);
    return tables;
}

Row method_row(const std::string& kind, const std::string& method, int64_t T, int64_t B, const std::string& more,
               double flops, double bytes) {
    Row row = op_row(fmt::format("{}/{}/T{}/{}", kind, method, T, more), flops, bytes);
    row.method = method;
    row.T = T;
    row.B = B;
    return row;
}

// Attention, ours or cuDNN's. Nothing is skipped: the row shows what a tile costs.
void run_forward(bool cudnn, real* out, float* lse, const real* qkv, const Tables& tables, float* workspace, int64_t B,
                 int64_t T, int64_t H, int64_t D) {
    if constexpr (kHasCudnn) {
        if (cudnn) return attention_cudnn_forward(out, lse, qkv, tables.rotary, workspace, B, T, H, D);
    }
    attention_forward(out, lse, nullptr, qkv, tables.rotary, tables.lag_bias.data, workspace, B, T, H, D);
}
void run_backward(bool cudnn, real* dqkv, float* dlag_bias, const real* dout, const real* qkv, const real* out,
                  const float* lse, const Tables& tables, float* workspace, int64_t B, int64_t T, int64_t H,
                  int64_t D) {
    if constexpr (kHasCudnn) {
        if (cudnn) return attention_cudnn_backward(dqkv, dout, qkv, out, lse, tables.rotary, workspace, B, T, H, D);
    }
    attention_backward(dqkv, dlag_bias, dout, qkv, out, lse, tables.rotary, tables.lag_bias.data, workspace, B, T, H,
                       D);
}

void add_attention(std::vector<Case>& cases, const std::string& method, int64_t T, int64_t B, int64_t H, int64_t D,
                   bool cudnn = false) {
    const int64_t N = B * T, C = H * D;
    const double pairs = static_cast<double>(N) * static_cast<double>(T + 1) / 2,
                 bytes = kRealBytes * static_cast<double>(N * C);
    const std::string more =
        fmt::format("B{}/D{}{}{}", B, D, H == kHeads ? "" : fmt::format("/H{}", H), cudnn ? "/cudnn" : "");
    cases.push_back(
        {method_row("attention_forward", method, T, B, more, 4 * static_cast<double>(C) * pairs, 4 * bytes), [=] {
             const auto tables = make_tables(method, T, D, H);
             const auto workspace = shared_array(floats(attention_workspace_floats(B, T, H, D)), 0);
             return Work{rotating({N * C, floats(N * H), N * 3 * C}, 1, [=](const Arrays& a) {
                 run_forward(cudnn, a[0].data, a[1].data, a[2].data, *tables, workspace->data, B, T, H, D);
             })};
         }});
    cases.push_back(
        {method_row("attention_backward", method, T, B, more, 10 * static_cast<double>(C) * pairs, 8 * bytes), [=] {
             const auto tables = make_tables(method, T, D, H);
             const auto workspace = shared_array(floats(attention_workspace_floats(B, T, H, D)), 0);
             const auto dlag_bias = std::make_shared<DeviceArray<float>>(tables->lag_bias.size);
             const auto forward = [=](const Arrays& a) {
                 run_forward(cudnn, a[3].data, a[4].data, a[2].data, *tables, workspace->data, B, T, H, D);
             };
             const auto backward = [=](const Arrays& a) {
                 run_backward(cudnn, a[0].data, dlag_bias->data, a[1].data, a[2].data, a[3].data, a[4].data, *tables,
                              workspace->data, B, T, H, D);
             };
             return Work{rotating({N * 3 * C, N * C, N * 3 * C, N * C, floats(N * H)}, 1, backward, forward)};
         }});
}

// One new row over T positions.
void add_decode(std::vector<Case>& cases, const std::string& method, int64_t T, int64_t D) {
    const int64_t H = kHeads, C = H * D;
    const double cached = 2 * static_cast<double>(T * C);
    cases.push_back(
        {method_row("attention_decode", method, T, 1, fmt::format("D{}", D), 2 * cached, kRealBytes * cached), [=] {
             const auto tables = make_tables(method, T, D);
             const int64_t side = attention_cache_size(T, H, D);
             const auto workspace = shared_array(floats(attention_decode_workspace_floats(T, H, D)), 0);
             return Work{rotating({C, 3 * C, side, side}, 1, [=](const Arrays& a) {
                 attention_decode(a[0].data, a[1].data, a[2].data, a[3].data, tables->rotary, tables->lag_bias.data,
                                  workspace->data, T - 1, T, H, D);
             })};
         }});
}

void add_tables(std::vector<Case>& cases, const std::string& method, int64_t T) {
    const Method* m = find_method(method);
    if (m->rotary != nullptr)
        cases.push_back({method_row("rotary_table", method, T, 1, "D24", 0, 0), [=] {
                             const auto tables = make_tables(method, T, 24);
                             return Work{[=] { rotary_table(tables->rotary, tables->shape.rotary, T); }};
                         }});
    if (m->lag_bias == nullptr) return;
    cases.push_back({method_row("lag_bias_table", method, T, 1, "H4", 0, 0), [=] {
                         const auto tables = make_tables(method, T, 24);
                         return Work{[=] {
                             lag_bias_table(tables->lag_bias.data, tables->shape.lag_bias, tables->parameters.data, T);
                         }};
                     }});
    cases.push_back({method_row("lag_bias_table_backward", method, T, 1, "H4", 0, 0), [=] {
                         const auto tables = make_tables(method, T, 24);
                         const auto dparameters = shared_array(floats(tables->parameters.size), 0);
                         return Work{[=] {
                             lag_bias_table_backward(dparameters->data, tables->lag_bias.data, tables->shape.lag_bias,
                                                     tables->parameters.data, T);
                         }};
                     }});
}

// ---------------------------------------------------------------------------------------------------------------
// Whole steps and evaluations

// The tokens of all whole rows: window w starts at byte w T mod (n - T).
std::span<const uint8_t> bench_tokens() {
    static const std::string text = make_motif_corpus({.bars = 40000}).text;
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}
Batch bench_batch(int64_t first_window, int64_t B, int64_t T) {
    std::vector<int64_t> starts;
    for (int64_t w = first_window; w < first_window + B; w++)
        starts.push_back(w * T % (std::ssize(bench_tokens()) - T));
    return make_batch(bench_tokens(), starts, T);
}

std::optional<double> skipped_share(const AttentionSkipping& skipping) {
    if (skipping.tiles == 0) return std::nullopt;
    return static_cast<double>(skipping.skipped) / static_cast<double>(skipping.tiles);
}

// The times of the ops in one more run, beside the samples: for them the device is waited for after every op.
OpTimes op_times_of(Activations& acts, const std::function<void()>& run) {
    OpTimes times;
    acts.op_times = &times;
    device_wait();
    times.last = std::chrono::steady_clock::now();
    run();
    acts.op_times = nullptr;
    return times;
}

// A training step as train_lm makes it: batch, forward, backward, gradient norm, AdamW.
void add_training(std::vector<Case>& cases, const std::string& method, int64_t T, int64_t B, int threads,
                  const std::vector<std::string>& overrides = {}) {
    const ModelShape shape = model_shape(method_config(method, overrides));
    Row row = method_row("train", method, T, B, fmt::format("B{}", B), training_flops(shape, B, T), 0);
    row.threads = threads;
    if (threads > 0) row.name += fmt::format("/threads{}", threads);
    if (shape.cudnn_attention)
        row.name += "/cudnn";
    else if (!overrides.empty())
        row.name += fmt::format("/L{}/C{}", shape.layers, shape.embed_dim);
    cases.push_back({row, [=] {
                         struct State {
                             Subject subject;
                             Activations acts;
                             DeviceArray<float> gradients, m, v;
                             DeviceArray<double> norm;
                             int64_t step = 0;
                             std::vector<double> losses;
                         };
                         const auto s = std::make_shared<State>();
                         std::vector<std::string> settings = overrides;
                         settings.push_back(fmt::format("train.context={}", T));
                         s->subject = make_subject(method, settings);
                         Model& model = s->subject.model;
                         s->acts = make_activations(model.shape, B, T, Mode::training, false);
                         s->gradients = DeviceArray<float>(model.parameters.size);
                         s->m = DeviceArray<float>(model.parameters.size);
                         s->v = DeviceArray<float>(model.parameters.size);
                         s->norm = DeviceArray<double>(1);
                         const auto run = [=] {
                             Model& trained = s->subject.model;
                             const TrainSettings& t = s->subject.config.train;
                             const Batch batch = bench_batch(s->step * B, B, T);
                             device_zero(s->gradients.data, s->gradients.bytes());
                             start_train_batch(trained, s->acts, s->gradients, batch.tokens, batch.targets, B, T, 1);
                             euclidean_norm(s->norm.data, s->gradients.data, s->gradients.size);
                             adamw(trained.parameters.data, s->m.data, s->v.data, s->gradients.data,
                                   trained.takes_part.data,
                                   {t.lr, t.beta1, t.beta2, t.eps, t.weight_decay, 1, s->norm.data}, ++s->step,
                                   trained.parameters.size);
                             const double loss = finish_train_batch(s->acts, B, T);
                             if (std::ssize(s->losses) < kComparedLosses) s->losses.push_back(loss);
                             lap(s->acts.op_times, "optimizer");
                         };
                         return Work{run, [=](Row& done) {
                                         done.losses = s->losses;
                                         done.shares = op_times_of(s->acts, run);
                                     }};
                     }});
}

void add_evaluation(std::vector<Case>& cases, const std::string& method, int64_t T, bool skips) {
    const ModelShape shape = model_shape(method_config(method, {}));
    const std::string more = skips ? "B1" : "B1/no_skipping";
    cases.push_back({method_row("eval", method, T, 1, more, forward_flops(shape, 1, T), 0), [=] {
                         struct State {
                             Subject subject;
                             Activations acts;
                             std::vector<double> losses;
                         };
                         const auto s = std::make_shared<State>();
                         s->subject = make_subject(method, {fmt::format("model.exact_skipping={}", skips)});
                         s->acts = make_activations(s->subject.model.shape, 1, T, Mode::inference, false);
                         const auto run = [=] {
                             const Batch batch = bench_batch(0, 1, T);
                             s->losses = {
                                 evaluate_batch(s->subject.model, s->acts, batch.tokens, batch.targets, 1, T, T).loss};
                         };
                         return Work{run, [=](Row& done) {
                                         done.losses = s->losses;
                                         done.shares = op_times_of(s->acts, run);
                                         done.skipped = skipped_share(attention_skipping(s->acts));
                                     }};
                     }});
}

// The dense layers and the passes over memory of a model for N tokens; logits exist 2048 rows at a time.
void add_layers(std::vector<Case>& cases, int64_t N, const ModelShape& s, const std::string& more) {
    const std::string rows = fmt::format("/N{}{}", N, more);
    const int64_t C = s.embed_dim;
    add_dense(cases, "qkv", rows, N, C, 3 * C);
    add_dense(cases, "out_proj", rows, N, C, C);
    add_dense(cases, "mlp.0", rows, N, C, s.mlp_dim);
    add_dense(cases, "mlp.2", rows, N, s.mlp_dim, C);
    if (N == 8192) add_dense(cases, "head", fmt::format("/N2048{}", more), 2048, C, s.vocab);
    add_passes(cases, rows, N, s);
}

// With `large`, also a larger model's ops and training steps, which take a CPU minutes.
std::vector<Case> all_cases(bool large) {
    const std::vector<std::string> larger = {"model.layers=12", "model.embed_dim=768", "model.heads=12"};
    const std::pair<int64_t, int64_t> larger_batches[] = {{1024, 8}, {8192, 1}};  // T and B
    std::vector<Case> cases;
    const ModelShape published = model_shape(method_config("none", {}));
    for (int64_t B : {8, 32}) add_layers(cases, B * 1024, published, "");
    add_optimizer(cases, make_model(model_shape(method_config("full", {}))).parameters.size);
    if (large) {
        const ModelShape shape = model_shape(method_config("none", larger));
        add_layers(cases, 8192, shape, fmt::format("/C{}", shape.embed_dim));
        add_optimizer(cases, make_model(shape).parameters.size);
        for (const auto& [T, B] : larger_batches)
            for (const char* method : {"rope", "full"}) add_attention(cases, method, T, B, shape.heads, shape.head_dim);
    }
    for (const Method& method : methods())
        for (int64_t T : {1024, 32768}) add_tables(cases, method.name, T);
    for (int64_t D : {24, 64})
        for (const auto& [T, B] : {std::pair<int64_t, int64_t>{512, 8}, {1024, 8}, {8192, 1}, {32768, 1}})
            for (const Method& method : methods()) add_attention(cases, method.name, T, B, kHeads, D);
    if (kHasCudnn) {
        for (const auto& [T, B] : {std::pair<int64_t, int64_t>{1024, 8}, {8192, 1}})
            for (int64_t D : {24, 64}) add_attention(cases, "rope", T, B, kHeads, D, true);
        add_training(cases, "rope", 1024, 32, 0, {"model.attention=cudnn"});
    }
    for (int64_t D : {24, 64})
        for (int64_t T : {1024, 8192, 32768})
            for (const char* method : {"rope", "full"}) add_decode(cases, method, T, D);
    for (const Method& method : methods())
        for (int64_t B : {8, 32}) add_training(cases, method.name, 1024, B, 0);
    for (const char* method : {"rope", "full"}) add_training(cases, method, 1024, 8, 1);
    for (const Method& method : methods())
        for (int64_t T : {1024, 8192, 32768}) {
            add_evaluation(cases, method.name, T, true);
            if (method.lag_bias != nullptr) add_evaluation(cases, method.name, T, false);
        }
    for (const auto& [T, B] : larger_batches)
        for (const char* method : {"rope", "full"})
            if (large) add_training(cases, method, T, B, 0, larger);
    return cases;
}

// ---------------------------------------------------------------------------------------------------------------
// The program

struct Machine {
    std::string cpu;
    int threads = 0;
    std::vector<std::pair<const char*, double>> peaks, peaks_one_thread;  // FLOP/s by vector width
    double copy = 0, copy_one_thread = 0;                                 // bytes read and written per second
};

std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
    return "unknown";
}

Machine measure_machine() {
    constexpr size_t kCopied = size_t{256} << 20;
    Machine machine;
    machine.cpu = cpu_name();
    machine.threads = thread_count();
    // A core that has idled takes its time to reach its clock: the best of several.
    const auto best_peaks = [] {
        auto best = measure_peaks();
        for (int again = 0; again < 2; again++) {
            const auto peaks = measure_peaks();
            for (size_t i = 0; i < best.size(); i++) best[i].second = std::max(best[i].second, peaks[i].second);
        }
        return best;
    };
    machine.peaks = best_peaks();
    machine.copy = measure_copy_bandwidth(kCopied);
    set_thread_count(1);
    machine.peaks_one_thread = best_peaks();
    machine.copy_one_thread = measure_copy_bandwidth(kCopied);
    set_thread_count(machine.threads);
    return machine;
}

void print_machine(const Machine& machine) {
    fmt::print("machine     {}, {} threads, {} {}, {}\n", machine.cpu, machine.threads, backend_name(), kPrecision,
               simd_target_name());
    for (size_t i = 0; i < machine.peaks.size(); i++)
        fmt::print("            {:<8} {:7.1f} GFLOP/s, one thread {:7.1f}\n", machine.peaks[i].first,
                   machine.peaks[i].second * 1e-9, machine.peaks_one_thread[i].second * 1e-9);
    fmt::print("            copy     {:7.1f} GB/s read and written, one thread {:.1f}\n\n", machine.copy * 1e-9,
               machine.copy_one_thread * 1e-9);
}

void print_row(const Row& row) {
    const double m = median(row.seconds);
    fmt::print("{:<52} {:>10.3f} ms  {:>+5.1f} {:>+5.1f}%", row.name, m * 1e3, 100 * (row.seconds.front() / m - 1),
               100 * (row.seconds.back() / m - 1));
    if (row.flops > 0)
        fmt::print("  {:>6.1f} GFLOP/s {:>5.1f}%", row.flops / m * 1e-9, 100 * row.flops / m / row.peak);
    else
        fmt::print("  {:>21}", "");
    if (row.bytes > 0) fmt::print("  {:>8.1f} MB {:>6.1f} GB/s", row.bytes * 1e-6, row.bytes / m * 1e-9);
    if (row.kind == "train") fmt::print("  {:.0f} tokens/s", static_cast<double>(row.B * row.T) / m);
    if ((row.kind == "train" || row.kind == "eval") && row.peak_memory_bytes)
        fmt::print("  {:.0f} MB resident", static_cast<double>(*row.peak_memory_bytes) * 1e-6);
    if (row.skipped) fmt::print("  {:.1f}% skipped", 100 * *row.skipped);
    fmt::print("\n");
    double total = 0;
    for (const auto& [op, seconds] : row.shares.seconds) total += seconds;
    std::string line;
    for (const auto& [op, seconds] : row.shares.seconds)
        line += fmt::format("{}{} {:.1f}%", line.empty() ? "" : ", ", op, 100 * seconds / total);
    if (!line.empty()) fmt::print("    {}\n", line);
    std::fflush(stdout);
}

nlohmann::ordered_json json_of(const Machine& machine) {
    nlohmann::ordered_json json{{"cpu", machine.cpu},         {"threads", machine.threads},
                                {"backend", backend_name()},  {"precision", kPrecision},
                                {"simd", simd_target_name()}, {"peak_gflops", machine.peaks.front().second * 1e-9}};
    for (size_t i = 0; i < machine.peaks.size(); i++) {
        json["gflops"][machine.peaks[i].first] = machine.peaks[i].second * 1e-9;
        json["gflops_one_thread"][machine.peaks[i].first] = machine.peaks_one_thread[i].second * 1e-9;
    }
    json["copy_gbytes_per_s"] = machine.copy * 1e-9;
    json["copy_gbytes_per_s_one_thread"] = machine.copy_one_thread * 1e-9;
    return json;
}

nlohmann::ordered_json json_of(const Row& row, const Machine& machine) {
    const double m = median(row.seconds);
    nlohmann::ordered_json json{{"name", row.name}, {"kind", row.kind}};
    if (!row.method.empty()) {
        json["method"] = row.method;
        json["T"] = row.T;
        json["B"] = row.B;
    }
    json["threads"] = row.threads > 0 ? row.threads : machine.threads;
    json["seconds"] = row.seconds;
    json["median"] = m;
    if (row.flops > 0) {
        json["flops"] = row.flops;
        json["peak_gflops"] = row.peak * 1e-9;
        json["percent_of_peak"] = 100 * row.flops / m / row.peak;
    }
    if (row.bytes > 0) json["bytes"] = row.bytes;
    if (!row.losses.empty()) json["losses"] = row.losses;
    if (row.peak_memory_bytes) json["peak_memory_bytes"] = *row.peak_memory_bytes;
    if (row.skipped) json["skipped"] = *row.skipped;
    double total = 0;
    for (const auto& [op, seconds] : row.shares.seconds) total += seconds;
    for (const auto& [op, seconds] : row.shares.seconds) json["share"][op] = seconds / total;
    return json;
}

// What bench/torch_baseline.py needs to do the same work: tokens, and the initial weights of every method.
void write_inputs(const std::filesystem::path& folder) {
    make_folder(folder);
    const auto tokens = bench_tokens();
    write_file_atomically(folder / "tokens.bin",
                          std::string_view(reinterpret_cast<const char*>(tokens.data()), tokens.size()));
    for (const Method& method : methods()) {
        const Subject subject = make_subject(method.name, {});
        save_checkpoint(folder / fmt::format("{}.safetensors", method.name), subject.model, config_json(subject.config),
                        0, sha256_hex(std::as_bytes(tokens)));
    }
    fmt::print("tokens and initial weights of {} methods written to {}\n", methods().size(), folder.string());
}

// The rows whose name contains a match of `filter`, an extended regular expression; "" matches all.
std::vector<Case> matching_cases(const std::string& filter, bool large) {
    regex_t pattern;
    if (const int code = regcomp(&pattern, filter.empty() ? "." : filter.c_str(), REG_EXTENDED | REG_NOSUB);
        code != 0) {
        char reason[256];
        regerror(code, &pattern, reason, sizeof(reason));
        fail_usage("--filter {}: not an extended regular expression: {}", filter, reason);
    }
    std::vector<Case> cases;
    for (Case& c : all_cases(large))
        if (regexec(&pattern, c.row.name.c_str(), 0, nullptr, 0) == 0) cases.push_back(std::move(c));
    regfree(&pattern);
    if (cases.empty()) fail_usage("--filter {}: matches no row (--list shows them)", filter);
    return cases;
}

int run(int argc, char** argv) {
    CLI::App app{"Measures this machine, every op, training steps and evaluations."};
    std::string filter, json_file, inputs;
    int64_t repeat = 7;
    int threads = 0;
    bool list = false, large = false;
    app.add_option("--filter", filter, "only rows whose name contains a match of this extended regular expression");
    app.add_option("--repeat", repeat, "samples of a row, of which the median is shown (default: 7)")
        ->check(CLI::Range(1, 10000));
    app.add_option("--threads", threads, "threads (default: all)")->check(CLI::Range(1, 1024));
    app.add_option("--json", json_file, "write a JSON file as well");
    app.add_option("--inputs", inputs, "only write tokens and initial weights for bench/torch_baseline.py there");
    app.add_flag("--large", large, "also ops and training steps of a model of 12 layers and 768 channels");
    app.add_flag("--list", list, "only list the names of the rows");
    app.footer(
        "Columns: name, median time of one run, fastest and slowest sample against it, arithmetic per second and in\n"
        "percent of the peak measured beside it, bytes that must be read and written at least, and those per second.\n"
        "Tiles that exact skipping leaves out count as done: the percentage can exceed 100.");
    if (!parse_command_line(app, argc, argv)) return kExitGood;
    for (const char* option : {"--filter", "--json", "--inputs"})
        if (app.count(option) > 0 && app[option]->as<std::string>().empty()) fail_usage("{}: is empty", option);
    std::vector<Case> cases = matching_cases(filter, large);
    if (!inputs.empty()) {
        write_inputs(inputs);
        return kExitGood;
    }
    if (list) {
        for (const Case& c : cases) fmt::print("{}\n", c.row.name);
        return kExitGood;
    }
    if (!json_file.empty()) check_output_path("--json", json_file);
    if (threads > 0) set_thread_count(threads);
    const Machine machine = measure_machine();
    print_machine(machine);
    Progress progress = make_progress();
    nlohmann::ordered_json json{{"machine", json_of(machine)}, {"rows", nlohmann::ordered_json::array()}};
    const double start = now();
    for (size_t i = 0; i < cases.size(); i++) {
        const double share = static_cast<double>(i) / static_cast<double>(cases.size());
        draw_progress(progress, cases[i].row.name, share, fmt::format("{} elapsed", duration_text(now() - start)));
        const Row row = measure(cases[i], repeat);
        clear_progress(progress);
        print_row(row);
        json["rows"].push_back(json_of(row, machine));
        if (!json_file.empty()) write_file_atomically(json_file, json.dump(1) + "\n");
    }
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("bench", [&] { return jetlag::run(argc, argv); });
}

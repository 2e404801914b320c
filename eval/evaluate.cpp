#include "eval/evaluate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "models/windows.h"
#include "src/error.h"

namespace jetlag {

std::string protocol_text(const Protocol& protocol) {
    const std::string windows =
        protocol.windows == Windows::random
            ? fmt::format("{} random windows (seed {})", protocol.batches * protocol.batch, protocol.seed)
            : "all disjoint windows in order";
    const std::string targets =
        protocol.last_targets == 0
            ? "every target scored"
            : fmt::format("the same last {} targets scored at every length", protocol.last_targets);
    return fmt::format("{}, batches of {}, {}", windows, protocol.batch, targets);
}

// With fixed targets the windows of all lengths end where those of the longest length end.
static int64_t window_span(const Protocol& protocol, int64_t T, int64_t longest) {
    return protocol.last_targets > 0 ? longest : T;
}

static int64_t window_count(const Protocol& protocol, int64_t tokens, int64_t T, int64_t longest) {
    return protocol.windows == Windows::sequential ? disjoint_windows(tokens, window_span(protocol, T, longest))
                                                   : protocol.batches * protocol.batch;
}

// The starts of all windows of T tokens.
static std::vector<int64_t> window_starts(const Protocol& protocol, int64_t tokens, int64_t T, int64_t longest) {
    const int64_t span = window_span(protocol, T, longest);
    std::vector<int64_t> starts;
    if (protocol.windows == Windows::sequential) {
        for (int64_t n = 0; n < window_count(protocol, tokens, T, longest); n++) starts.push_back(n * span);
    } else {
        for (int64_t n = 0; n < protocol.batches; n++) {
            TorchGenerator generator = make_indexed_generator(protocol.seed, kEvalWindows, static_cast<uint64_t>(n));
            for (int64_t start : draw_windows(generator, tokens, span, protocol.batch)) starts.push_back(start);
        }
    }
    for (int64_t& start : starts) start += span - T;
    return starts;
}

static std::span<const uint8_t> held_out_part(const Checkpoint& checkpoint, const TokenStream& corpus) {
    return split_corpus(corpus.tokens, checkpoint.config.data.train_fraction).eval;
}

// The fewest tokens that hold a window: random windows leave out the last start, as the published code does.
static int64_t tokens_needed(const Protocol& protocol, int64_t T) {
    return protocol.windows == Windows::random ? tokens_to_draw_from(T) : T + 1;
}

// The lengths of a protocol, and the training length where it can be evaluated so: delta_loss refers to it.
static std::vector<int64_t> lengths_of(const Checkpoint& checkpoint, const TokenStream& corpus,
                                       const Protocol& protocol) {
    std::vector<int64_t> lengths = protocol.contexts;
    const int64_t L = checkpoint.model.shape.train_len;
    const int64_t tokens = static_cast<int64_t>(held_out_part(checkpoint, corpus).size());
    if (std::find(lengths.begin(), lengths.end(), L) == lengths.end() && tokens >= tokens_needed(protocol, L) &&
        L >= protocol.last_targets)
        lengths.push_back(L);
    return lengths;
}

int64_t longest_length(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol) {
    const std::vector<int64_t> lengths = lengths_of(checkpoint, corpus, protocol);
    return std::max(protocol.longest, *std::max_element(lengths.begin(), lengths.end()));
}

static Evaluation evaluate_at(const Checkpoint& checkpoint, std::span<const uint8_t> part, const Protocol& protocol,
                              int64_t T, int64_t longest, double work_before,
                              const std::function<void(int64_t, double)>& report) {
    const Model& model = checkpoint.model;
    const int64_t scored = protocol.last_targets > 0 ? protocol.last_targets : T;
    const std::vector<int64_t> starts = window_starts(protocol, static_cast<int64_t>(part.size()), T, longest);
    const int64_t total = static_cast<int64_t>(starts.size());
    Activations acts =
        make_activations(model.shape, std::min(protocol.batch, total), T, Mode::inference, protocol.attention_stats);
    Evaluation e;
    e.checkpoint = checkpoint.path.string();
    e.position = model.shape.position;
    e.train_seed = checkpoint.config.train.seed;
    e.train_len = model.shape.train_len;
    e.max_order = checkpoint.config.model.max_order.integer;
    e.context = T;
    e.windows = total;
    e.targets_scored = total * scored;
    e.disjoint_windows = disjoint_windows(static_cast<int64_t>(part.size()), T);
    e.lag_bias = lag_bias_summary(model);
    // A composed lag bias has an order of its own: that of the last mass it reports.
    for (const auto& figure : e.lag_bias)
        if (figure.first.starts_with("fj_mass_r")) e.max_order = std::stoll(figure.first.substr(9));
    e.loss_at.assign(static_cast<size_t>(T), 0.0);
    e.count_at.assign(static_cast<size_t>(T), 0);

    device_wait();
    const auto start_time = std::chrono::steady_clock::now();
    double entropy = 0, support = 0, lag = 0;
    for (int64_t first = 0; first < total; first += protocol.batch) {
        report(T, work_before + static_cast<double>(first) * forward_flops(model.shape, 1, T));
        const int64_t B = std::min(protocol.batch, total - first);
        const Batch batch =
            make_batch(part, std::span(starts).subspan(static_cast<size_t>(first), static_cast<size_t>(B)), T);
        const BatchResult result = evaluate_batch(model, acts, batch.tokens, batch.targets, B, T, scored);
        if (!std::isfinite(result.loss))
            fail("{}: the loss at context {} is {}: the first tensor with a NaN or infinity is {}", e.checkpoint, T,
                 std::fabs(result.loss), first_nonfinite_tensor(model, acts, nullptr, B, T));
        const double share = static_cast<double>(B) / static_cast<double>(total);
        e.loss += share * result.loss;
        e.logit_std += share * result.logit_std;
        e.logit_abs_max += share * result.logit_abs_max;
        e.skipped += share * result.skipped;
        entropy += share * result.entropy.value_or(0);
        support += share * result.effective_support.value_or(0);
        lag += share * result.mean_lag.value_or(0);
        for (int64_t b = 0; b < B; b++)
            for (int64_t t = T - scored; t < T; t++) {
                e.loss_at[static_cast<size_t>(t)] += result.losses[static_cast<size_t>(b * T + t)];
                e.count_at[static_cast<size_t>(t)]++;
            }
    }
    e.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_time).count();
    e.perplexity = std::exp(std::min(e.loss, 20.0));
    if (protocol.attention_stats) {
        e.entropy = entropy;
        e.effective_support = support;
        e.mean_lag = lag;
    }
    for (size_t t = 0; t < e.loss_at.size(); t++)
        if (e.count_at[t] > 0) e.loss_at[t] /= static_cast<double>(e.count_at[t]);
    return e;
}

void check_protocol(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol) {
    const int64_t tokens = static_cast<int64_t>(held_out_part(checkpoint, corpus).size());
    const std::string where = checkpoint.path.string(), part = "held-out part of " + corpus.path.string();
    for (int64_t T : protocol.contexts) {
        check_fits(where, "context", T, tokens, tokens_needed(protocol, T), part);
        if (protocol.last_targets > T)
            fail_usage("{}: --targets last:{} wants at least as many tokens, and a context is {}", where,
                       protocol.last_targets, T);
    }
    const int64_t longest = longest_length(checkpoint, corpus, protocol);
    if (protocol.last_targets > 0)
        check_fits(where, "longest length of all checkpoints", longest, tokens, tokens_needed(protocol, longest), part);
}

double evaluation_work(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol) {
    const int64_t tokens = static_cast<int64_t>(held_out_part(checkpoint, corpus).size());
    const int64_t longest = longest_length(checkpoint, corpus, protocol);
    double work = 0;
    for (int64_t T : lengths_of(checkpoint, corpus, protocol))
        work += static_cast<double>(window_count(protocol, tokens, T, longest)) *
                forward_flops(checkpoint.model.shape, 1, T);
    return work;
}

std::vector<Evaluation> evaluate_checkpoint(const Checkpoint& checkpoint, const TokenStream& corpus,
                                            const Protocol& protocol,
                                            const std::function<void(int64_t, double)>& report) {
    check_protocol(checkpoint, corpus, protocol);
    std::vector<Evaluation> list;
    const int64_t longest = longest_length(checkpoint, corpus, protocol);
    double work = 0;
    std::optional<double> at_L;
    for (int64_t T : lengths_of(checkpoint, corpus, protocol)) {
        list.push_back(evaluate_at(checkpoint, held_out_part(checkpoint, corpus), protocol, T, longest, work, report));
        work += static_cast<double>(list.back().windows) * forward_flops(checkpoint.model.shape, 1, T);
        if (T == checkpoint.model.shape.train_len) at_L = list.back().loss;
    }
    for (Evaluation& e : list) {
        e.train_len_loss = at_L;
        if (at_L) e.delta_loss = e.loss - *at_L;
    }
    list.resize(protocol.contexts.size());
    return list;
}

}  // namespace jetlag

// Evaluation of checkpoints at several context lengths.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "src/token_stream.h"

namespace jetlag {

enum class Windows { random, sequential };

// What is scored, and on which windows; the same for every checkpoint and length of one evaluation.
struct Protocol {
    std::vector<int64_t> contexts;
    Windows windows = Windows::random;
    int64_t batches = 8;  // at each length; sequential: as many as the held-out part holds
    int64_t batch = 1;    // windows per batch
    uint64_t seed = 0;
    int64_t last_targets = 0;  // 0: every target of a window. Otherwise the last so many, and the windows of all
                               // lengths then end at the same tokens (a fixed-target sweep)
    int64_t longest = 0;       // the longest length of all checkpoints (longest_length), for a fixed-target sweep to
                               // score the same targets for each of them; 0: of the checkpoint at hand
    bool attention_stats = false;
};

// "8 random windows of 1024 tokens (seed 0), every target scored".
std::string protocol_text(const Protocol& protocol);

// One checkpoint at one length. Each figure is computed per batch and averaged over the batches, a last batch of fewer
// windows counting less.
struct Evaluation {
    std::string checkpoint;
    std::string position;
    int64_t train_seed = 0, train_len = 0, max_order = 0;
    int64_t context = 0;
    double loss = 0;        // nats per token
    double perplexity = 0;  // exp(min(loss, 20))
    // At the training length under the same protocol, and loss minus that; where that length cannot be evaluated so,
    // neither.
    std::optional<double> train_len_loss, delta_loss;
    double logit_std = 0;
    double logit_abs_max = 0;
    std::optional<double> entropy, effective_support, mean_lag;  // of the last block's attention rows
    std::vector<std::pair<std::string, double>> lag_bias;        // gates, slope, order masses
    double skipped = 0;  // share of attention's tiles that exact skipping left out
    int64_t windows = 0, targets_scored = 0, disjoint_windows = 0;
    double seconds = 0;
    std::vector<double> loss_at;    // mean loss at each position of the window, over all windows
    std::vector<int64_t> count_at;  // and how many targets of that position were scored
};

// The arithmetic of evaluating a checkpoint under a protocol, in floating-point operations: for time left.
double evaluation_work(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol);

// Errors: a length that the held-out part cannot hold; more last targets than the shortest length has.
void check_protocol(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol);

// The longest length that evaluating this checkpoint involves, protocol.longest among them.
int64_t longest_length(const Checkpoint& checkpoint, const TokenStream& corpus, const Protocol& protocol);

// One Evaluation per length of the protocol, in its order. `report` is called before each batch with the length and
// the work that is done so far. Errors: a loss that is not finite.
std::vector<Evaluation> evaluate_checkpoint(const Checkpoint& checkpoint, const TokenStream& corpus,
                                            const Protocol& protocol,
                                            const std::function<void(int64_t, double)>& report);

}  // namespace jetlag

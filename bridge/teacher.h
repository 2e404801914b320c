// The teacher of the synthetic bridge: a classification task whose answer is a function of the lags. A sequence of n
// tokens is n - 1 random bits (tokens 0 and 1) and a query (token 2) at the end; the bit at lag d from the query, taken
// as -1 or +1, counts with a coefficient c(d), and the label is whether the sum, the score, exceeds a threshold.
//
// All of it is computed in float, in the order in which the published PyTorch code computes it on a CPU: scores next to
// the median are so near to it that labels would differ otherwise. Those of the signed affine teacher are multiples of
// one number and often equal but for rounding.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lab/jets.h"
#include "src/random.h"

namespace jetlag {

inline constexpr int32_t kQueryToken = 2;
inline constexpr int64_t kBridgeVocab = 3;

struct TeacherSettings {
    std::string target = "recency_weak_jet";  // of bridge_targets()
    std::string kind = "attention";           // or signed
    double attention_lambda = 4;
    double omega_cycles = 17;       // omega = 2 pi omega_cycles / L
    bool median_threshold = false;  // of the batch's scores; otherwise 0
};

// The targets: those of the laboratory, with `affine`, -0.4 x, in place of its `linear`.
const std::vector<LagTarget>& bridge_targets();

// The sector and the jet order that a target is made of, as gate_init and order_init take them. Of a target with two
// parts the sector is the one that decides under this kind of teacher.
std::string teacher_sector(const TeacherSettings& teacher);
int64_t teacher_order(const TeacherSettings& teacher);

// K(d) of the query's lags n-1 .. 1, (n - 1); L: the training length.
std::vector<float> teacher_kernel(const TeacherSettings& teacher, int64_t L, int64_t n);

// c(d) in the same order. signed: K / |K|; attention: softmax(lambda K).
std::vector<float> teacher_coefficients(const TeacherSettings& teacher, int64_t L, int64_t n);

// Of softmax(lambda K) at length n, in nats and in tokens; and |K|.
struct TeacherStats {
    double entropy = 0, effective_support = 0, kernel_norm = 0;
};
TeacherStats teacher_stats(const TeacherSettings& teacher, int64_t L, int64_t n);

struct QueryBatch {
    std::vector<int32_t> tokens;  // (B, n)
    std::vector<int32_t> labels;  // (B)
};
// Bits as torch.randint(0, 2, (B, n - 1)) draws them. The median of an even number of scores is the lower of the two in
// the middle. n is at least 2.
QueryBatch draw_queries(TorchGenerator& generator, const TeacherSettings& teacher, int64_t L, int64_t B, int64_t n);

// The sum in the order of torch.sum over a contiguous last dimension on a CPU.
float torch_sum(std::span<const float> values);

}  // namespace jetlag

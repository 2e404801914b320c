#include "bridge/teacher.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/position/pj.h"

namespace jetlag {

const std::vector<LagTarget>& bridge_targets() {
    static const std::vector<LagTarget> list = [] {
        std::vector<LagTarget> targets = lag_targets();
        for (LagTarget& target : targets)
            if (std::string(target.name) == "linear") target = {"affine", "-0.4 x", {}, 0, {}, -0.4, 0};
        return targets;
    }();
    return list;
}

static const LagTarget& target_of(const TeacherSettings& teacher) {
    return find_target("teacher.target", bridge_targets(), teacher.target);
}

std::string teacher_sector(const TeacherSettings& teacher) {
    const LagTarget& target = target_of(teacher);
    if (!target.lc.empty()) return "lc";
    if (target.fj.empty()) return "affine";
    // A softmax follows the recency of a mixed target; a signed sum follows what oscillates.
    return target.slope != 0 && teacher.kind == "attention" ? "affine" : "fj";
}

int64_t teacher_order(const TeacherSettings& teacher) {
    return std::max<int64_t>(0, std::ssize(target_of(teacher).fj) - 1);
}

// sum_r c[r] x^r, with powers as products.
static float polynomial(const std::vector<double>& c, float x) {
    float sum = 0, power = 1;
    for (const double factor : c) {
        if (factor != 0) sum += static_cast<float>(factor) * power;
        power *= x;
    }
    return sum;
}

std::vector<float> teacher_kernel(const TeacherSettings& teacher, int64_t L, int64_t n) {
    const LagTarget& target = target_of(teacher);
    const float length = static_cast<float>(L), omega = static_cast<float>(lag_frequency(teacher.omega_cycles, L));
    std::vector<float> kernel;
    for (int64_t d = n - 1; d >= 1; d--) {
        const float lag = static_cast<float>(d), x = lag / length, eta = pj_rapidity(lag, length);
        float value = static_cast<float>(target.slope) * x;
        if (!target.fj.empty()) {
            float amplitude = polynomial(target.fj, x);
            if (target.fj_damping != 0) amplitude *= std::exp(static_cast<float>(-target.fj_damping) * x);
            value += amplitude * std::cos(omega * lag);
        }
        if (!target.lc.empty()) value += std::cos(omega * (length * eta)) * polynomial(target.lc, pj_beta(lag, length));
        if (target.eta_slope != 0) value += static_cast<float>(target.eta_slope) * eta;
        kernel.push_back(value);
    }
    return kernel;
}

float torch_sum(std::span<const float> values) {
    // Eight lanes of a vector, four vectors at a time; after every 16 of these groups the sums move up a level.
    constexpr size_t kLanes = 8, kVectors = 4, kLevels = 4;
    using Vector = std::array<float, kLanes>;
    const auto add = [](Vector& to, const float* from) {
        for (size_t i = 0; i < kLanes; i++) to[i] += from[i];
    };
    if (values.size() < kLanes) {
        std::array<float, kVectors> sums{};
        const size_t grouped = values.size() / kVectors * kVectors;
        for (size_t i = 0; i < values.size(); i++) sums[i < grouped ? i : 0] += values[i];
        return ((sums[0] + sums[1]) + sums[2]) + sums[3];
    }
    const size_t vectors = values.size() / kLanes, groups = vectors / kVectors;
    const size_t doublings = groups > 1 ? static_cast<size_t>(std::bit_width(groups - 1)) : 0;
    const size_t power = std::max<size_t>(4, doublings / kLevels);
    std::array<std::array<Vector, kVectors>, kLevels> sums{};
    for (size_t g = 0; g < groups; g++) {
        for (size_t k = 0; k < kVectors; k++) add(sums[0][k], values.data() + (g * kVectors + k) * kLanes);
        for (size_t level = 1; level < kLevels && (g + 1) % (size_t{1} << (level * power)) == 0; level++)
            for (size_t k = 0; k < kVectors; k++) {
                add(sums[level][k], sums[level - 1][k].data());
                sums[level - 1][k] = {};
            }
    }
    std::array<Vector, kVectors>& whole = sums[0];
    for (size_t level = 1; level < kLevels; level++)
        for (size_t k = 0; k < kVectors; k++) add(whole[k], sums[level][k].data());
    for (size_t v = groups * kVectors; v < vectors; v++) add(whole[0], values.data() + v * kLanes);
    for (size_t k = 1; k < kVectors; k++) add(whole[0], whole[k].data());
    float sum = 0;
    for (size_t i = vectors * kLanes; i < values.size(); i++) sum += values[i];
    for (const float lane : whole[0]) sum += lane;
    return sum;
}

static float norm_of(const std::vector<float>& kernel) {
    std::vector<float> squares;
    for (const float value : kernel) squares.push_back(value * value);
    return std::sqrt(torch_sum(squares));
}

static std::vector<float> softmax_of(const std::vector<float>& kernel, double lambda) {
    std::vector<float> weights;
    for (const float value : kernel) weights.push_back(static_cast<float>(lambda) * value);
    const float largest = *std::max_element(weights.begin(), weights.end());
    for (float& weight : weights) weight = std::exp(weight - largest);
    const float sum = torch_sum(weights);
    for (float& weight : weights) weight /= sum;
    return weights;
}

std::vector<float> teacher_coefficients(const TeacherSettings& teacher, int64_t L, int64_t n) {
    std::vector<float> kernel = teacher_kernel(teacher, L, n);
    if (teacher.kind == "attention") return softmax_of(kernel, teacher.attention_lambda);
    const float norm = std::max(norm_of(kernel), std::numeric_limits<float>::epsilon());
    for (float& value : kernel) value /= norm;
    return kernel;
}

TeacherStats teacher_stats(const TeacherSettings& teacher, int64_t L, int64_t n) {
    const std::vector<float> kernel = teacher_kernel(teacher, L, n);
    TeacherStats stats;
    for (const float p : softmax_of(kernel, teacher.attention_lambda))
        if (p > 0) stats.entropy -= static_cast<double>(p) * std::log(static_cast<double>(p));
    stats.effective_support = std::exp(stats.entropy);
    stats.kernel_norm = norm_of(kernel);
    return stats;
}

QueryBatch draw_queries(TorchGenerator& generator, const TeacherSettings& teacher, int64_t L, int64_t B, int64_t n) {
    std::vector<int64_t> bits(static_cast<size_t>(B * (n - 1)));
    fill_randint(generator, 0, 2, bits);
    const std::vector<float> coefficients = teacher_coefficients(teacher, L, n);
    QueryBatch batch;
    std::vector<float> terms(coefficients.size()), scores;
    for (size_t b = 0; b < static_cast<size_t>(B); b++) {
        for (size_t i = 0; i < terms.size(); i++) {
            const int64_t bit = bits[b * terms.size() + i];
            batch.tokens.push_back(static_cast<int32_t>(bit));
            terms[i] = bit > 0 ? coefficients[i] : -coefficients[i];
        }
        batch.tokens.push_back(kQueryToken);
        scores.push_back(torch_sum(terms));
    }
    float threshold = 0;
    if (teacher.median_threshold) {
        std::vector<float> sorted = scores;
        std::sort(sorted.begin(), sorted.end());
        threshold = sorted[(sorted.size() - 1) / 2];
    }
    for (const float score : scores) batch.labels.push_back(score > threshold ? 1 : 0);
    return batch;
}

}  // namespace jetlag

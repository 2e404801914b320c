// Rotary tables and their application to queries and keys.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "src/error.h"
#include "test/reference/reference.h"

namespace jetlag::reference {

// RoPE: Su et al., arXiv:2104.09864. Position interpolation: Chen et al., arXiv:2306.15595. NTK-aware base and YaRN:
// Peng et al., arXiv:2309.00071.
RotaryTable rotary_table(const RotarySettings& settings, int64_t L, int64_t T, int64_t D) {
    RotaryTable table;
    if (settings.kind == Rotary::kNone) return table;
    const bool jordan = settings.kind == Rotary::kJordan;
    if (D < 2 || D % 2 != 0) fail("reference: rotary head dim is {}, wanted an even one", D);
    if (jordan && D % 4 != 0) fail("reference: jordan head dim is {}, wanted a multiple of 4", D);
    const bool longer = T > L;
    const double stretch = static_cast<double>(T) / L;

    double base = settings.base;
    if (settings.kind == Rotary::kNtk && longer) {
        if (D == 2) fail("reference: ntk head dim is 2, wanted 4 or more");
        base *= std::pow(stretch, D / (D - 2.0));
    }

    const int64_t P = D / 2;
    table.pairs = P;
    Vector frequency(P);
    for (int64_t p = 0; p < P; p++) {
        // The two complex channels of a Jordan block turn together.
        const double exponent = jordan ? (p / 2) / (D / 4.0) : p / (D / 2.0);
        frequency[p] = std::pow(base, -exponent);
        if (settings.kind == Rotary::kYarn && longer) {
            const double rotations = L * frequency[p] / (2 * std::numbers::pi);
            const double w = std::clamp((rotations - 1) / (32 - 1), 0.0, 1.0);
            frequency[p] = frequency[p] / stretch * (1 - w) + frequency[p] * w;
        }
    }
    const double gain = settings.kind == Rotary::kYarn && longer ? 1 + 0.1 * std::log(stretch) : 1;

    table.query_cosine.resize(T * P);
    table.query_sine.resize(T * P);
    if (jordan) table.shear.resize(T);
    for (int64_t t = 0; t < T; t++) {
        double position = static_cast<double>(t);
        if (settings.kind == Rotary::kPi && longer) position *= (L - 1.0) / (T - 1.0);
        for (int64_t p = 0; p < P; p++) {
            table.query_cosine[t * P + p] = gain * std::cos(position * frequency[p]);
            table.query_sine[t * P + p] = gain * std::sin(position * frequency[p]);
        }
        if (jordan) table.shear[t] = settings.jordan_eta * position / L;
    }
    table.key_cosine = table.query_cosine;
    table.key_sine = table.query_sine;
    return table;
}

// direction: 1 turns forward, -1 applies the transposed map.
static Vector turn(const Vector& cosines, const Vector& sines, int64_t P, double direction, const Vector& x,
                   int64_t D) {
    if (2 * P > D) fail("reference: rotary table has {} pairs, wanted {} or fewer", P, D / 2);
    const int64_t T = std::ssize(cosines) / P;
    check_size(cosines, T * P, "rotary cosines");
    check_size(sines, T * P, "rotary sines");
    check_size(x, T * D, "rotary input");
    Vector out = x;
    for (int64_t t = 0; t < T; t++) {
        for (int64_t p = 0; p < P; p++) {
            const double cosine = cosines[t * P + p], sine = direction * sines[t * P + p];
            const double re = x[t * D + 2 * p], im = x[t * D + 2 * p + 1];
            out[t * D + 2 * p] = re * cosine - im * sine;
            out[t * D + 2 * p + 1] = re * sine + im * cosine;
        }
    }
    return out;
}

// z_target <- z_target + sign * c * z_source in every block.
static void shear(const RotaryTable& table, double sign, int64_t target, int64_t source, Vector& x, int64_t D) {
    check_size(x, std::ssize(table.shear) == 0 ? std::ssize(x) : std::ssize(table.shear) * D, "sheared input");
    for (int64_t t = 0; t < std::ssize(table.shear); t++) {
        for (int64_t block = 0; block < table.pairs / 2; block++) {
            for (int64_t part = 0; part < 2; part++) {
                const int64_t z = t * D + 4 * block + part;
                x[z + 2 * target] += sign * table.shear[t] * x[z + 2 * source];
            }
        }
    }
}

Vector rotate_queries(const RotaryTable& table, const Vector& q, int64_t D) {
    if (table.pairs == 0) return q;
    Vector sheared = q;
    shear(table, 1, 0, 1, sheared, D);
    return turn(table.query_cosine, table.query_sine, table.pairs, 1, sheared, D);
}

Vector rotate_keys(const RotaryTable& table, const Vector& k, int64_t D) {
    if (table.pairs == 0) return k;
    Vector sheared = k;
    shear(table, -1, 1, 0, sheared, D);
    return turn(table.key_cosine, table.key_sine, table.pairs, 1, sheared, D);
}

Vector rotate_queries_backward(const RotaryTable& table, const Vector& drotated, int64_t D) {
    if (table.pairs == 0) return drotated;
    Vector dq = turn(table.query_cosine, table.query_sine, table.pairs, -1, drotated, D);
    shear(table, 1, 1, 0, dq, D);
    return dq;
}

Vector rotate_keys_backward(const RotaryTable& table, const Vector& drotated, int64_t D) {
    if (table.pairs == 0) return drotated;
    Vector dk = turn(table.key_cosine, table.key_sine, table.pairs, -1, drotated, D);
    shear(table, -1, 0, 1, dk, D);
    return dk;
}

}  // namespace jetlag::reference

#include "lab/adaptive.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "lab/least_squares.h"
#include "lab/parallel.h"
#include "src/error.h"
#include "src/random.h"

namespace jetlag {

AdaptiveSettings adaptive_defaults() {
    AdaptiveSettings settings;
    for (const LagTarget& target : lag_targets()) settings.targets.push_back(target.name);
    return settings;
}

namespace {

// The functions of the head at lags 0..T-1, without damping; order r of FJ is fj_cos[r * T + d].
struct Functions {
    int64_t T;
    int orders;
    std::vector<double> x, fj_cos, fj_sin, lc_cos, lc_sin;
};

Functions make_functions(const AdaptiveSettings& settings, int64_t T) {
    const int orders = settings.max_order + 1;
    const size_t n = static_cast<size_t>(T), size = n * static_cast<size_t>(orders);
    Functions f = {T,
                   orders,
                   std::vector<double>(n),
                   std::vector<double>(size),
                   std::vector<double>(size),
                   std::vector<double>(size),
                   std::vector<double>(size)};
    const double omega = lag_frequency(settings.cycles, settings.train_len);
    double cosine[kPjMaxOrder + 1], sine[kPjMaxOrder + 1];
    for (size_t t = 0; t < n; t++) {
        const double d = static_cast<double>(t);
        f.x[t] = d / static_cast<double>(settings.train_len);
        jet_functions(kPjFj, d, settings.train_len, omega, 0, settings.max_order, cosine, sine);
        for (size_t r = 0; r < static_cast<size_t>(orders); r++) {
            f.fj_cos[r * n + t] = cosine[r];
            f.fj_sin[r * n + t] = sine[r];
        }
        jet_functions(kPjLc, d, settings.train_len, omega, 0, settings.max_order, cosine, sine);
        for (size_t r = 0; r < static_cast<size_t>(orders); r++) {
            f.lc_cos[r * n + t] = cosine[r];
            f.lc_sin[r * n + t] = sine[r];
        }
    }
    return f;
}

double mean_square(const std::vector<double>& values) {
    double sum = 0;
    for (double x : values) sum += x * x;
    return sum / static_cast<double>(values.size());
}

double variance(const std::vector<double>& values) {
    double mean = 0, sum = 0;
    for (double x : values) mean += x / static_cast<double>(values.size());
    for (double x : values) sum += (x - mean) * (x - mean);
    return sum / static_cast<double>(values.size());
}

double mean_squared_error(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sum / static_cast<double>(a.size());
}

// What a head is worth as a function: products of gate, order weight and amplitude for each function, and damping.
struct Head {
    double gate[kPjSectorCount] = {};
    double damping = 0, slope = 0;  // the affine part is slope_product x
    double slope_product = 0;
    std::vector<double> fj_re, fj_im, lc_re, lc_im;  // products
};

// e^(-damping x) of each lag: (T)
void fill_envelope(const Functions& f, double damping, double* envelope) {
    for (size_t t = 0; t < static_cast<size_t>(f.T); t++) envelope[t] = std::exp(-damping * f.x[t]);
}
std::vector<double> make_envelope(const Functions& f, double damping) {
    std::vector<double> envelope(static_cast<size_t>(f.T));
    fill_envelope(f, damping, envelope.data());
    return envelope;
}

// The part of order r of one sector.
std::vector<double> order_part(const Functions& f, const std::vector<double>& cosines, const std::vector<double>& sines,
                               double re, double im, const std::vector<double>& envelope, int r) {
    const size_t n = static_cast<size_t>(f.T), first = static_cast<size_t>(r) * n;
    std::vector<double> part(n);
    for (size_t t = 0; t < n; t++) part[t] = envelope[t] * (re * cosines[first + t] - im * sines[first + t]);
    return part;
}

// The whole kernel; if asked for, also the parts of the orders (FJ and LC together) and of the sectors.
std::vector<double> head_kernel(const Head& head, const Functions& f, std::vector<std::vector<double>>* orders,
                                std::vector<std::vector<double>>* sectors) {
    const size_t n = static_cast<size_t>(f.T);
    std::vector<double> kernel(n);
    if (orders) orders->assign(static_cast<size_t>(f.orders), std::vector<double>(n, 0.0));
    if (sectors) sectors->assign(kPjSectorCount, std::vector<double>(n, 0.0));
    const auto add = [&](const std::vector<double>& part, int r, int sector) {
        for (size_t t = 0; t < n; t++) {
            kernel[t] += part[t];
            if (orders && r >= 0) (*orders)[static_cast<size_t>(r)][t] += part[t];
            if (sectors) (*sectors)[static_cast<size_t>(sector)][t] += part[t];
        }
    };
    const std::vector<double> damped = make_envelope(f, head.damping), undamped(n, 1.0);
    for (int r = 0; r < f.orders; r++) {
        const size_t k = static_cast<size_t>(r);
        add(order_part(f, f.fj_cos, f.fj_sin, head.fj_re[k], head.fj_im[k], damped, r), r, kPjFj);
        add(order_part(f, f.lc_cos, f.lc_sin, head.lc_re[k], head.lc_im[k], undamped, r), r, kPjLc);
    }
    std::vector<double> affine(n);
    for (size_t t = 0; t < n; t++) affine[t] = head.slope_product * f.x[t];
    add(affine, -1, kPjAffine);
    return kernel;
}

AdaptiveFit measure_head(const Head& head, int restart, const Functions& train, const std::vector<double>& train_target,
                         const Functions& eval, const std::vector<double>& eval_target) {
    AdaptiveFit fit = {};
    fit.dominant_order = -1;
    fit.restart = restart;
    fit.slope = head.slope;
    fit.damping = head.damping;
    std::copy(std::begin(head.gate), std::end(head.gate), std::begin(fit.gate));
    fit.train_mse = mean_squared_error(head_kernel(head, train, nullptr, nullptr), train_target);
    std::vector<std::vector<double>> orders, sectors;
    const std::vector<double> kernel = head_kernel(head, eval, &orders, &sectors);
    fit.eval_mse = mean_squared_error(kernel, eval_target);
    fit.train_r2 = 1 - fit.train_mse / std::max(variance(train_target), 1e-30);
    fit.eval_r2 = 1 - fit.eval_mse / std::max(variance(eval_target), 1e-30);

    double total = 0;
    std::vector<double> all(kernel.size(), 0.0);
    for (size_t r = 0; r < orders.size(); r++) {
        fit.fj_mass.push_back(std::hypot(head.fj_re[r], head.fj_im[r]));
        fit.lc_mass.push_back(std::hypot(head.lc_re[r], head.lc_im[r]));
        fit.order_mass.push_back(fit.fj_mass[r] + fit.lc_mass[r]);
        total += fit.order_mass[r];
        for (size_t t = 0; t < all.size(); t++) all[t] += orders[r][t];
    }
    if (total > 0)
        fit.dominant_order =
            static_cast<int>(std::max_element(fit.order_mass.begin(), fit.order_mass.end()) - fit.order_mass.begin());
    for (double& mass : fit.order_mass) mass = total > 0 ? mass / total : 0;
    const double whole = std::sqrt(mean_square(all));
    for (const std::vector<double>& part : orders) {
        fit.functional_energy.push_back(whole > 0 ? std::sqrt(mean_square(part)) / whole : 0);
        std::vector<double> without = kernel;
        for (size_t t = 0; t < without.size(); t++) without[t] -= part[t];
        fit.leave_one_out.push_back(mean_squared_error(without, eval_target) - fit.eval_mse);
    }
    double energy = 0;
    for (int s = 0; s < kPjSectorCount; s++) energy += mean_square(sectors[static_cast<size_t>(s)]);
    for (int s = 0; s < kPjSectorCount; s++)
        fit.sector_energy[s] = energy > 0 ? mean_square(sectors[static_cast<size_t>(s)]) / energy : 0;
    return fit;
}

// Where the learned numbers are in their vector.
struct Layout {
    size_t gate, fj_alpha, lc_alpha, fj_re, fj_im, lc_re, lc_im, damping, slope, count;
};

Layout make_layout(size_t orders) {
    Layout l;
    l.gate = 0;
    l.fj_alpha = kPjSectorCount;
    l.lc_alpha = l.fj_alpha + orders;
    l.fj_re = l.lc_alpha + orders;
    l.fj_im = l.fj_re + orders;
    l.lc_re = l.fj_im + orders;
    l.lc_im = l.lc_re + orders;
    l.damping = l.lc_im + orders;
    l.slope = l.damping + 1;
    l.count = l.slope + 1;
    return l;
}

constexpr uint64_t kRestartSeedStep = 7919;

// Amplitudes are their deviation times the draws of torch.randn in float64, in the order re and im of FJ, re and im of
// LC.
std::vector<double> initial_parameters(const AdaptiveSettings& settings, uint64_t seed, int restart) {
    const size_t orders = static_cast<size_t>(settings.max_order) + 1;
    const Layout l = make_layout(orders);
    std::vector<double> p(l.count, 0.0);
    for (size_t s = 0; s < kPjSectorCount; s++) p[l.gate + s] = settings.start_gates[s];
    if (settings.favour_orders)
        for (size_t r = 0; r < orders; r++)
            p[l.fj_alpha + r] = p[l.lc_alpha + r] =
                r == static_cast<size_t>(restart) % orders ? settings.favour : -settings.favour;
    TorchGenerator generator = make_generator(seed + kRestartSeedStep * static_cast<uint64_t>(restart));
    for (size_t i = l.fj_re; i < l.damping; i++) p[i] = settings.start_amplitude * draw_normal(generator);
    p[l.damping] = settings.start_damping;
    p[l.slope] = settings.start_slope;
    return p;
}

Head head_of(const std::vector<double>& p, size_t orders) {
    const Layout l = make_layout(orders);
    Head head;
    std::vector<double> fj_alpha(orders), lc_alpha(orders);
    const unsigned all = (1u << orders) - 1;
    pj_softmax(&p[l.gate], kPjSectorCount, 7, head.gate);
    pj_softmax(&p[l.fj_alpha], static_cast<int>(orders), all, fj_alpha.data());
    pj_softmax(&p[l.lc_alpha], static_cast<int>(orders), all, lc_alpha.data());
    head.damping = pj_softplus(p[l.damping]);
    head.slope = p[l.slope];
    head.slope_product = head.gate[kPjAffine] * head.slope;
    for (size_t r = 0; r < orders; r++) {
        head.fj_re.push_back(head.gate[kPjFj] * fj_alpha[r] * p[l.fj_re + r]);
        head.fj_im.push_back(head.gate[kPjFj] * fj_alpha[r] * p[l.fj_im + r]);
        head.lc_re.push_back(head.gate[kPjLc] * lc_alpha[r] * p[l.lc_re + r]);
        head.lc_im.push_back(head.gate[kPjLc] * lc_alpha[r] * p[l.lc_im + r]);
    }
    return head;
}

// dp = the gradient of the MSE. The kernel is linear in the products, whose gradients are sums over the lags of the
// error times a function; the rest is the chain rule on a few numbers. Scratch is (2 T).
void mse_gradient(const std::vector<double>& p, const Functions& f, const std::vector<double>& target,
                  std::vector<double>& dp, std::vector<double>& scratch) {
    const size_t orders = static_cast<size_t>(f.orders), n = target.size();
    const Layout l = make_layout(orders);
    const Head head = head_of(p, orders);
    double* envelope = scratch.data();
    double* error = scratch.data() + n;  // first the FJ part without its envelope, then 2 (kernel - target) / n
    fill_envelope(f, head.damping, envelope);
    std::fill(error, error + n, 0.0);
    for (size_t r = 0; r < orders; r++) {
        const double re = head.fj_re[r], im = head.fj_im[r];
        const double *cosine = &f.fj_cos[r * n], *sine = &f.fj_sin[r * n];
        for (size_t t = 0; t < n; t++) error[t] += re * cosine[t] - im * sine[t];
    }
    std::vector<double> fj(n);
    for (size_t t = 0; t < n; t++) {
        fj[t] = error[t] * envelope[t];
        error[t] = fj[t] + head.slope_product * f.x[t] - target[t];
    }
    for (size_t r = 0; r < orders; r++) {
        const double re = head.lc_re[r], im = head.lc_im[r];
        const double *cosine = &f.lc_cos[r * n], *sine = &f.lc_sin[r * n];
        for (size_t t = 0; t < n; t++) error[t] += re * cosine[t] - im * sine[t];
    }
    double ddamping = 0, dslope_product = 0;
    for (size_t t = 0; t < n; t++) {
        error[t] *= 2 / static_cast<double>(n);
        ddamping -= error[t] * fj[t] * f.x[t];
        dslope_product += error[t] * f.x[t];
    }

    double fj_alpha[kPjMaxOrder + 1], lc_alpha[kPjMaxOrder + 1], gate[kPjSectorCount];
    double dfj_alpha[kPjMaxOrder + 1], dlc_alpha[kPjMaxOrder + 1], dgate[kPjSectorCount] = {};
    const unsigned all = (1u << orders) - 1;
    pj_softmax(&p[l.gate], kPjSectorCount, 7, gate);
    pj_softmax(&p[l.fj_alpha], f.orders, all, fj_alpha);
    pj_softmax(&p[l.lc_alpha], f.orders, all, lc_alpha);
    for (size_t r = 0; r < orders; r++) {
        double dfj_re = 0, dfj_im = 0, dlc_re = 0, dlc_im = 0;
        const double *fj_cos = &f.fj_cos[r * n], *fj_sin = &f.fj_sin[r * n];
        const double *lc_cos = &f.lc_cos[r * n], *lc_sin = &f.lc_sin[r * n];
        for (size_t t = 0; t < n; t++) {
            const double damped = error[t] * envelope[t];
            dfj_re += damped * fj_cos[t];
            dfj_im -= damped * fj_sin[t];
            dlc_re += error[t] * lc_cos[t];
            dlc_im -= error[t] * lc_sin[t];
        }
        const double fj_part = dfj_re * p[l.fj_re + r] + dfj_im * p[l.fj_im + r];
        const double lc_part = dlc_re * p[l.lc_re + r] + dlc_im * p[l.lc_im + r];
        dgate[kPjFj] += fj_alpha[r] * fj_part;
        dgate[kPjLc] += lc_alpha[r] * lc_part;
        dfj_alpha[r] = gate[kPjFj] * fj_part;
        dlc_alpha[r] = gate[kPjLc] * lc_part;
        dp[l.fj_re + r] = gate[kPjFj] * fj_alpha[r] * dfj_re;
        dp[l.fj_im + r] = gate[kPjFj] * fj_alpha[r] * dfj_im;
        dp[l.lc_re + r] = gate[kPjLc] * lc_alpha[r] * dlc_re;
        dp[l.lc_im + r] = gate[kPjLc] * lc_alpha[r] * dlc_im;
    }
    dgate[kPjAffine] = dslope_product * p[l.slope];
    std::fill(dp.begin(), dp.begin() + static_cast<int64_t>(l.fj_re), 0.0);
    pj_softmax_gradient(gate, dgate, kPjSectorCount, &dp[l.gate]);
    pj_softmax_gradient(fj_alpha, dfj_alpha, f.orders, &dp[l.fj_alpha]);
    pj_softmax_gradient(lc_alpha, dlc_alpha, f.orders, &dp[l.lc_alpha]);
    dp[l.damping] = ddamping * pj_sigmoid(p[l.damping]);
    dp[l.slope] = gate[kPjAffine] * dslope_product;
}

constexpr double kAdamEps = 1e-8;

// Adam (Kingma and Ba 2015), as torch.optim.Adam computes it.
std::vector<double> adam(std::vector<double> p, const Functions& f, const std::vector<double>& target,
                         const AdaptiveSettings& settings) {
    const double beta1 = settings.beta1, beta2 = settings.beta2, lr = settings.lr;
    std::vector<double> m(p.size(), 0.0), v(p.size(), 0.0), dp(p.size()), scratch(2 * target.size());
    for (int64_t step = 1; step <= settings.steps; step++) {
        mse_gradient(p, f, target, dp, scratch);
        const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
        for (size_t i = 0; i < p.size(); i++) {
            m[i] += (dp[i] - m[i]) * (1 - beta1);
            v[i] = v[i] * beta2 + dp[i] * dp[i] * (1 - beta2);
            p[i] -= lr / correction1 * (m[i] / (std::sqrt(v[i]) / std::sqrt(correction2) + kAdamEps));
        }
    }
    return p;
}

}  // namespace

AdaptiveFit fit_adam(const LagTarget& target, const AdaptiveSettings& settings, uint64_t seed) {
    const Functions train = make_functions(settings, settings.train_len);
    const Functions eval = make_functions(settings, settings.context);
    const double omega = lag_frequency(settings.cycles, settings.train_len);
    const std::vector<double> train_target = target_values(target, settings.train_len, settings.train_len, omega);
    const std::vector<double> eval_target = target_values(target, settings.context, settings.train_len, omega);
    std::vector<AdaptiveFit> fits(static_cast<size_t>(settings.restarts));
    run_jobs(fits.size(), fmt::format("a fit on {} lags", settings.train_len), [&](size_t i) {
        const int k = static_cast<int>(i);
        const std::vector<double> p = adam(initial_parameters(settings, seed, k), train, train_target, settings);
        fits[i] = measure_head(head_of(p, static_cast<size_t>(settings.max_order) + 1), k, train, train_target, eval,
                               eval_target);
    });
    return *std::min_element(fits.begin(), fits.end(), [&](const AdaptiveFit& a, const AdaptiveFit& b) {
        const double x = settings.select_by_train ? a.train_mse : a.eval_mse;
        const double y = settings.select_by_train ? b.train_mse : b.eval_mse;
        return x < y || (std::isnan(y) && !std::isnan(x));
    });
}

// ---------------------------------------------------------------------------------------------------------------

namespace {

// A part of the space: the sectors whose bit is set, with orders 0..orders-1.
struct Subspace {
    unsigned sectors;
    int orders;
};

int subspace_size(const Subspace& space) {
    const int jets = static_cast<int>((space.sectors >> kPjFj & 1) + (space.sectors >> kPjLc & 1));
    return 2 * space.orders * jets + static_cast<int>(space.sectors >> kPjAffine & 1);
}

// The best products for this damping, and their training MSE.
Head solve_products(const Functions& f, const std::vector<double>& target, const Subspace& space, double damping,
                    double& mse) {
    const size_t orders = static_cast<size_t>(space.orders), n = target.size();
    const unsigned sectors = space.sectors;
    const bool fj = sectors >> kPjFj & 1, affine = sectors >> kPjAffine & 1, lc = sectors >> kPjLc & 1;
    Matrix design = make_matrix(f.T, subspace_size(space));
    auto column = design.values.begin();
    const std::vector<double> envelope = make_envelope(f, damping);
    const auto put = [&](const double* values, bool damped, double sign) {
        for (size_t t = 0; t < n; t++) *column++ = sign * values[t] * (damped ? envelope[t] : 1.0);
    };
    for (size_t r = 0; fj && r < orders; r++) {
        put(&f.fj_cos[r * n], true, 1);
        put(&f.fj_sin[r * n], true, -1);
    }
    for (size_t r = 0; lc && r < orders; r++) {
        put(&f.lc_cos[r * n], false, 1);
        put(&f.lc_sin[r * n], false, -1);
    }
    if (affine) put(f.x.data(), false, 1);
    Matrix wanted = make_matrix(f.T, 1);
    wanted.values = target;
    const std::vector<double> w = least_squares(design, wanted).values;

    Head head;
    head.damping = damping;
    size_t at = 0;
    head.fj_re = head.fj_im = head.lc_re = head.lc_im = std::vector<double>(static_cast<size_t>(f.orders), 0.0);
    for (size_t r = 0; fj && r < orders; r++) {
        head.fj_re[r] = w[at++];
        head.fj_im[r] = w[at++];
    }
    for (size_t r = 0; lc && r < orders; r++) {
        head.lc_re[r] = w[at++];
        head.lc_im[r] = w[at++];
    }
    if (affine) head.slope = head.slope_product = w[at];
    head.gate[kPjFj] = fj;
    head.gate[kPjAffine] = affine;
    head.gate[kPjLc] = lc;
    mse = mean_squared_error(head_kernel(head, f, nullptr, nullptr), target);
    return head;
}

// Of the search, and what counts as no error, as a share of the target's mean square.
constexpr double kLargestDamping = 4, kDampingStep = 0.1, kRounding = 1e-24;

// The damping of least training MSE: a grid, then golden sections between the neighbours of its best point. Where the
// target is in the space the MSE falls to rounding at the true damping, and the search sees it to some 1e-13.
Head search_damping(const Functions& f, const std::vector<double>& target, const Subspace& space, double& best_mse) {
    Head best = solve_products(f, target, space, 0, best_mse);
    if (!(space.sectors >> kPjFj & 1)) return best;
    const double step = kDampingStep, last = kLargestDamping;
    const auto try_damping = [&](double damping) {
        double mse;
        const Head head = solve_products(f, target, space, damping, mse);
        if (mse < best_mse) {
            best_mse = mse;
            best = head;
        }
        return mse;
    };
    for (int i = 1; i <= std::lround(last / step); i++) try_damping(step * i);
    const double ratio = (std::sqrt(5.0) - 1) / 2;
    double low = std::max(0.0, best.damping - step), high = best.damping + step;
    double a = high - ratio * (high - low), b = low + ratio * (high - low);
    double mse_a = try_damping(a), mse_b = try_damping(b);
    while (high - low > 1e-15) {
        if (mse_a < mse_b) {
            high = b;
            b = a;
            mse_b = mse_a;
            a = high - ratio * (high - low);
            mse_a = try_damping(a);
        } else {
            low = a;
            a = b;
            mse_a = mse_b;
            b = low + ratio * (high - low);
            mse_b = try_damping(b);
        }
        if (!(a < b)) break;
    }
    return best;
}

}  // namespace

AdaptiveFit fit_varpro(const LagTarget& target, const AdaptiveSettings& settings) {
    const Functions train = make_functions(settings, settings.train_len);
    const Functions eval = make_functions(settings, settings.context);
    const double omega = lag_frequency(settings.cycles, settings.train_len);
    const std::vector<double> train_target = target_values(target, settings.train_len, settings.train_len, omega);
    const std::vector<double> eval_target = target_values(target, settings.context, settings.train_len, omega);
    const unsigned fj = 1 << kPjFj, affine = 1 << kPjAffine, lc = 1 << kPjLc;
    std::vector<Subspace> spaces = {{affine, 0}};
    for (int orders = 1; orders <= settings.max_order + 1; orders++)
        for (unsigned sectors : {fj, lc, fj | affine, affine | lc, fj | lc, fj | affine | lc})
            spaces.push_back({sectors, orders});
    std::stable_sort(spaces.begin(), spaces.end(),
                     [](const Subspace& a, const Subspace& b) { return subspace_size(a) < subspace_size(b); });
    const double rounding = kRounding * mean_square(train_target);
    Head head;
    for (const Subspace& space : spaces) {
        double mse;
        head = search_damping(train, train_target, space, mse);
        if (mse <= rounding) break;
    }
    return measure_head(head, 0, train, train_target, eval, eval_target);
}

// ---------------------------------------------------------------------------------------------------------------

static Json settings_json(const AdaptiveSettings& s) {
    Json json = {{"targets", s.targets},     {"train_len", s.train_len}, {"eval_len", s.context},
                 {"omega_cycles", s.cycles}, {"max_order", s.max_order}, {"solver", "varpro"}};
    if (s.solver == AdaptiveSolver::varpro) {
        json["damping_range"] = {0, kLargestDamping};
        json["damping_step"] = kDampingStep;
        json["relative_rounding"] = kRounding;
        return json;
    }
    json["solver"] = "adam";
    json["seeds"] = s.seeds;
    json["steps"] = s.steps;
    json["lr"] = s.lr;
    json["betas"] = {s.beta1, s.beta2};
    json["eps"] = kAdamEps;
    json["restarts"] = s.restarts;
    json["restart_seed_step"] = kRestartSeedStep;
    json["start_gates"] = s.start_gates;
    json["start_amplitude"] = s.start_amplitude;
    json["start_raw_damping"] = s.start_damping;
    json["start_slope"] = s.start_slope;
    if (s.favour_orders) json["favoured_order_logit"] = s.favour;
    json["order_init_cycle"] = s.favour_orders;
    json["selection_metric"] = s.select_by_train ? "train_mse" : "eval_mse";
    return json;
}

// Mean over the seeds, and the sample standard deviation (0 of one seed).
static std::pair<double, double> mean_and_spread(const std::vector<double>& values) {
    double mean = 0, squares = 0;
    for (double x : values) mean += x / static_cast<double>(values.size());
    for (double x : values) squares += (x - mean) * (x - mean);
    return {mean, values.size() > 1 ? std::sqrt(squares / static_cast<double>(values.size() - 1)) : 0};
}

LabResult run_adaptive(const AdaptiveSettings& settings) {
    const bool is_adam = settings.solver == AdaptiveSolver::adam;
    const std::vector<uint64_t> seeds = is_adam ? settings.seeds : std::vector<uint64_t>{0};
    const size_t orders = static_cast<size_t>(settings.max_order) + 1;
    LabResult result;
    result.name = is_adam ? "adaptive" : "adaptive_varpro";
    result.title = is_adam ? "Targets found by a PJ head with Adam (Table 3, Figure 3)"
                           : "Targets found by a PJ head with variable projection";
    result.settings = settings_json(settings);
    result.table.columns = {"target",         "seed",      "restart",       "train_mse", "train_r2",     "eval_mse",
                            "eval_r2",        "gate_fj",   "gate_affine",   "gate_lc",   "affine_slope", "damping",
                            "dominant_order", "energy_fj", "energy_affine", "energy_lc"};
    for (const char* group :
         {"fj_mass", "lc_mass", "normalized_order_mass", "functional_energy", "leave_one_order_out_delta_mse"})
        for (size_t r = 0; r < orders; r++) result.table.columns.push_back(fmt::format("{}_r{}", group, r));

    LabSummary summary;
    summary.title = is_adam ? fmt::format("Mean over seeds {} (spread in brackets)", fmt::join(settings.seeds, ", "))
                            : "Shares of energy by sector, order masses as shares";
    summary.table.columns = {"target", "FJ", "affine", "LC"};
    for (size_t r = 0; r < orders; r++) summary.table.columns.push_back(fmt::format("order {}", r));
    summary.table.columns.insert(summary.table.columns.end(), {"dominant", "damping", "train MSE", "eval MSE"});
    summary.numbers.columns = {"target", "dominant_order"};
    const auto name_numbers = [&](const std::string& column) {
        summary.numbers.columns.push_back(column + "_mean");
        if (is_adam) summary.numbers.columns.push_back(column + "_spread");
    };
    for (const char* sector : {"fj", "affine", "lc"})
        name_numbers((is_adam ? "gate_" : "energy_") + std::string(sector));
    for (size_t r = 0; r < orders; r++) name_numbers(fmt::format("normalized_order_mass_r{}", r));
    for (const char* column : {"damping", "train_mse", "eval_mse"}) name_numbers(column);
    LabPanel sectors, masses;
    sectors.title = is_adam ? "Gates" : "Energy of the sectors";
    masses.title = "Effective mass of the orders";
    sectors.y_label = masses.y_label = "share";
    sectors.stacked = masses.stacked = true;
    sectors.x_names = masses.x_names = settings.targets;
    for (const char* name : {"FJ", "affine", "LC"}) sectors.series.push_back({name, {}, {}});
    for (size_t r = 0; r < orders; r++) masses.series.push_back({fmt::format("order {}", r), {}, {}});

    std::vector<const LagTarget*> targets;
    for (const std::string& name : settings.targets) targets.push_back(&find_target("--targets", lag_targets(), name));
    std::vector<AdaptiveFit> all_fits(targets.size() * seeds.size());
    const int64_t lags = std::max(settings.train_len, settings.context);
    run_jobs(all_fits.size(), fmt::format("the functions of {} orders at {} lags", orders, lags), [&](size_t i) {
        const LagTarget& target = *targets[i / seeds.size()];
        all_fits[i] = is_adam ? fit_adam(target, settings, seeds[i % seeds.size()]) : fit_varpro(target, settings);
    });
    for (size_t k = 0; k < targets.size(); k++) {
        const LagTarget& target = *targets[k];
        const std::span fits = std::span(all_fits).subspan(k * seeds.size(), seeds.size());
        for (size_t i = 0; i < seeds.size(); i++) {
            const uint64_t seed = seeds[i];
            const AdaptiveFit& fit = fits[i];
            std::vector<Json> row = {target.name,
                                     seed,
                                     fit.restart,
                                     fit.train_mse,
                                     fit.train_r2,
                                     fit.eval_mse,
                                     fit.eval_r2,
                                     fit.gate[kPjFj],
                                     fit.gate[kPjAffine],
                                     fit.gate[kPjLc],
                                     fit.slope,
                                     fit.damping,
                                     fit.dominant_order,
                                     fit.sector_energy[kPjFj],
                                     fit.sector_energy[kPjAffine],
                                     fit.sector_energy[kPjLc]};
            for (const std::vector<double>* group :
                 {&fit.fj_mass, &fit.lc_mass, &fit.order_mass, &fit.functional_energy, &fit.leave_one_out})
                row.insert(row.end(), group->begin(), group->end());
            result.table.rows.push_back(row);
        }
        const auto over_seeds = [&](auto value) {
            std::vector<double> values;
            for (const AdaptiveFit& fit : fits) values.push_back(value(fit));
            return mean_and_spread(values);
        };
        std::vector<Json> line = {target.name}, numbers;
        const auto put_numbers = [&](std::pair<double, double> of) {
            numbers.push_back(of.first);
            if (is_adam) numbers.push_back(of.second);
        };
        // A share with three decimals; another number with four digits, its spread with two.
        const auto put_share = [&](std::pair<double, double> of) {
            line.push_back(is_adam ? fmt::format("{:.3f} ({:.3f})", of.first, of.second)
                                   : fmt::format("{:.3f}", of.first));
            put_numbers(of);
        };
        const auto put = [&](std::pair<double, double> of) {
            line.push_back(is_adam ? Json(fmt::format("{:.4g} ({:.2g})", of.first, of.second)) : Json(of.first));
            put_numbers(of);
        };
        for (int s = 0; s < kPjSectorCount; s++) {
            const auto of =
                over_seeds([&](const AdaptiveFit& fit) { return is_adam ? fit.gate[s] : fit.sector_energy[s]; });
            put_share(of);
            sectors.series[static_cast<size_t>(s)].x.push_back(static_cast<double>(k));
            sectors.series[static_cast<size_t>(s)].y.push_back(of.first);
        }
        int dominant = -1;
        double largest = 0;
        for (size_t r = 0; r < orders; r++) {
            const auto of = over_seeds([&](const AdaptiveFit& fit) { return fit.order_mass[r]; });
            put_share(of);
            masses.series[r].x.push_back(static_cast<double>(k));
            masses.series[r].y.push_back(of.first);
            if (of.first > largest) {
                largest = of.first;
                dominant = static_cast<int>(r);
            }
        }
        line.push_back(dominant);
        put(over_seeds([](const AdaptiveFit& fit) { return fit.damping; }));
        put(over_seeds([](const AdaptiveFit& fit) { return fit.train_mse; }));
        put(over_seeds([](const AdaptiveFit& fit) { return fit.eval_mse; }));
        summary.table.rows.push_back(line);
        numbers.insert(numbers.begin(), {target.name, dominant});
        summary.numbers.rows.push_back(numbers);
    }
    result.summaries = {summary};
    result.panels = {sectors, masses};
    return result;
}

}  // namespace jetlag

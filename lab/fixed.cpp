#include "lab/fixed.h"

#include <algorithm>
#include <cmath>

#include "lab/least_squares.h"
#include "src/error.h"

namespace jetlag {

FixedSettings fixed_defaults() {
    FixedSettings settings;
    for (const LagTarget& target : lag_targets()) settings.targets.push_back(target.name);
    settings.bases = {"rope", "alibi", "alibi_lc", "rope_alibi"};
    for (int k = 1; k <= 3; k++)
        for (const char* name : {"jordan_R{}", "scaled_R{}", "scaled_R{}_affine"})
            settings.bases.push_back(fmt::format(fmt::runtime(name), k));
    settings.bases.insert(settings.bases.end(), {"lc_R3", "lc_R3_affine"});
    return settings;
}

FixedSettings projection_defaults() {
    FixedSettings settings;
    settings.contexts = {1024, 4096, 32768};
    settings.cycles = {17};
    for (const LagTarget& target : projection_targets()) settings.targets.push_back(target.name);
    settings.bases = {"grape_m_rope", "grape_a_alibi", "grape_ma_rope_alibi", "pj_fj_R1", "pj_fj_R2", "pj_lc_R3"};
    return settings;
}

const std::vector<LagTarget>& projection_targets() {
    static const std::vector<LagTarget> list = {
        {"phase", "cos(omega d)", {1}, 0, {}, 0, 0},
        {"affine", "-x", {}, 0, {}, -1, 0},
        {"first_jet", "x cos(omega d)", {0, 1}, 0, {}, 0, 0},
        {"second_jet", "x^2 cos(omega d)", {0, 0, 1}, 0, {}, 0, 0},
        {"lc_core", "cos(omega phi) (1 + 0.4 beta + 0.2 beta^2)", {}, 0, {1, 0.4, 0.2}, 0, 0},
    };
    return list;
}

// "jordan_R2" with the prefix "jordan_R" is order 2; nothing else may follow.
static bool read_order(const std::string& name, const std::string& prefix, int& order) {
    if (!name.starts_with(prefix)) return false;
    const std::string digits = name.substr(prefix.size());
    if (digits.empty() || digits.size() > 2 || digits.find_first_not_of("0123456789") != std::string::npos ||
        (digits.size() == 2 && digits[0] == '0') || std::stoi(digits) > kPjMaxOrder)
        return false;
    order = std::stoi(digits);
    return true;
}

LagBasis parse_basis(const std::string& option, const std::string& name) {
    LagBasis basis;
    basis.name = basis.label = name;
    if (name == "rope" || name == "grape_m_rope") {
        basis.fj_order = 0;
        if (name != "rope") basis.label = "GRAPE-M";
        return basis;
    }
    if (name == "alibi" || name == "grape_a_alibi") {
        basis.x = true;
        if (name != "alibi") basis.label = "GRAPE-A";
        return basis;
    }
    if (name == "rope_alibi" || name == "grape_ma_rope_alibi") {
        basis.fj_order = 0;
        basis.x = true;
        if (name != "rope_alibi") basis.label = "GRAPE-M+A";
        return basis;
    }
    if (name == "alibi_lc") {
        basis.eta = true;
        return basis;
    }
    if (read_order(name, "pj_fj_R", basis.fj_order)) {
        basis.label = fmt::format("PJ-FJ R{}", basis.fj_order);
        return basis;
    }
    if (read_order(name, "pj_lc_R", basis.lc_order)) {
        basis.label = fmt::format("PJ-LC R{}", basis.lc_order);
        return basis;
    }
    if (read_order(name, "jordan_R", basis.fj_order)) return basis;
    const std::string affine = "_affine";
    const bool is_affine = name.ends_with(affine);
    const std::string jets = is_affine ? name.substr(0, name.size() - affine.size()) : name;
    if (read_order(jets, "scaled_R", basis.fj_order)) {
        basis.is_damped = true;
        basis.x = is_affine;
        return basis;
    }
    if (read_order(jets, "lc_R", basis.lc_order)) {
        basis.eta = is_affine;
        return basis;
    }
    fail_usage(
        "{}: there is no basis {}, wanted some of rope, alibi, alibi_lc, rope_alibi, jordan_Rk, scaled_Rk, "
        "scaled_Rk_affine, lc_Rk, lc_Rk_affine, grape_m_rope, grape_a_alibi, grape_ma_rope_alibi, pj_fj_Rk, pj_lc_Rk "
        "(k from 0 to {})",
        option, name, kPjMaxOrder);
}

static int64_t basis_size(const LagBasis& basis) {
    return 2 * (basis.fj_order + 1) + 2 * (basis.lc_order + 1) + basis.x + basis.eta;
}

// (T, basis_size). The functions of FJ carry 1/r!, which standardising removes.
static Matrix basis_columns(const LagBasis& basis, int64_t T, int64_t train_len, double omega, double damping) {
    Matrix columns = make_matrix(T, basis_size(basis));
    double cosine[kPjMaxOrder + 1], sine[kPjMaxOrder + 1];
    for (int64_t t = 0; t < T; t++) {
        const double d = static_cast<double>(t), L = static_cast<double>(train_len);
        int64_t j = 0;
        const auto put = [&](double value) { columns.values[static_cast<size_t>(j++ * T + t)] = value; };
        if (basis.fj_order >= 0)
            jet_functions(kPjFj, d, train_len, omega, basis.is_damped ? damping : 0, basis.fj_order, cosine, sine);
        for (int r = 0; r <= basis.fj_order; r++) {
            put(cosine[r]);
            put(sine[r]);
        }
        if (basis.lc_order >= 0) jet_functions(kPjLc, d, train_len, omega, 0, basis.lc_order, cosine, sine);
        for (int r = 0; r <= basis.lc_order; r++) {
            put(cosine[r]);
            put(sine[r]);
        }
        if (basis.x) put(d / L);
        if (basis.eta) put(pj_rapidity(d, L));
    }
    return columns;
}

std::vector<FixedRow> fit_fixed(const FixedSettings& settings, const std::vector<LagTarget>& targets,
                                const std::vector<LagBasis>& bases) {
    const int64_t L = settings.train_len;
    const int64_t T = std::max(L, *std::max_element(settings.contexts.begin(), settings.contexts.end()));
    std::vector<FixedRow> rows;
    for (double cycles : settings.cycles) {
        const double omega = lag_frequency(cycles, L);
        Matrix values = make_matrix(T, static_cast<int64_t>(targets.size()));
        Matrix train_values = make_matrix(L, values.columns);
        for (size_t k = 0; k < targets.size(); k++) {
            const std::vector<double> y = target_values(targets[k], T, L, omega);
            std::copy(y.begin(), y.end(), values.values.begin() + static_cast<int64_t>(k) * T);
            std::copy(y.begin(), y.begin() + L, train_values.values.begin() + static_cast<int64_t>(k) * L);
        }
        std::vector<std::vector<FixedRow>> by_target(targets.size());
        for (const LagBasis& basis : bases) {
            const Matrix columns = basis_columns(basis, T, L, omega, settings.damping);
            Matrix train_columns = make_matrix(L, columns.columns);
            for (int64_t j = 0; j < columns.columns; j++)
                std::copy_n(columns.values.begin() + j * T, L, train_columns.values.begin() + j * L);
            const Standardisation statistics = column_statistics(train_columns);
            const Matrix train_design = standardised(train_columns, statistics, true);
            const Matrix design = standardised(columns, statistics, true);
            const Matrix weights = least_squares(train_design, train_values);
            const double condition = condition_number(train_design);
            for (size_t k = 0; k < targets.size(); k++) {
                const double* w = &weights.values[k * static_cast<size_t>(weights.rows)];
                const double* y = &values.values[k * static_cast<size_t>(T)];
                std::vector<double> errors(static_cast<size_t>(T));
                for (int64_t t = 0; t < T; t++) {
                    double sum = 0;
                    for (int64_t j = 0; j < design.columns; j++)
                        sum += design.values[static_cast<size_t>(j * T + t)] * w[j];
                    errors[static_cast<size_t>(t)] = sum - y[t];
                }
                const auto mean_square = [&](int64_t n) {
                    double sum = 0;
                    for (int64_t t = 0; t < n; t++)
                        sum += errors[static_cast<size_t>(t)] * errors[static_cast<size_t>(t)];
                    return sum / static_cast<double>(n);
                };
                for (int64_t context : settings.contexts) {
                    const double n = static_cast<double>(context);
                    double mean = 0, variance = 0;
                    for (int64_t t = 0; t < context; t++) mean += y[t] / n;
                    for (int64_t t = 0; t < context; t++) variance += (y[t] - mean) * (y[t] - mean) / n;
                    const double mse = mean_square(context);
                    by_target[k].push_back({cycles, targets[k].name, basis.name, context, mean_square(L), mse,
                                            1 - mse / std::max(variance, 1e-30), condition});
                }
            }
        }
        for (const auto& list : by_target) rows.insert(rows.end(), list.begin(), list.end());
    }
    return rows;
}

// ---------------------------------------------------------------------------------------------------------------

constexpr double kEqualBelow = 1e-20;  // errors, where the best basis is chosen

static Json settings_json(const FixedSettings& settings) {
    return {{"train_len", settings.train_len},
            {"contexts", settings.contexts},
            {"cycles", settings.cycles},
            {"damping", settings.damping},
            {"targets", settings.targets},
            {"bases", settings.bases},
            {"deviation_floor", kDeviationFloor},
            {"singular_value_floor", kSingularValueFloor},
            {"best_basis_equal_below", kEqualBelow}};
}

// The MSE at one context, a row per basis and a column per target.
static LabSummary mse_summary(const std::vector<FixedRow>& rows, const FixedSettings& settings, double cycles,
                              int64_t context) {
    LabSummary summary;
    summary.title = fmt::format("MSE on lags 0..{} at {} cycles", context - 1, cycles);
    summary.table.columns = {"basis"};
    for (const std::string& target : settings.targets) summary.table.columns.push_back(target);
    for (const std::string& basis : settings.bases) {
        std::vector<Json> line = {basis};
        for (const FixedRow& row : rows)
            if (row.basis == basis && row.cycles == cycles && row.context == context) line.push_back(row.mse);
        summary.table.rows.push_back(line);
    }
    return summary;
}

// The basis of least MSE for every target at the last context; errors near rounding count as equal, and of equal bases
// the smallest wins.
static LabSummary best_summary(const std::vector<FixedRow>& rows, const FixedSettings& settings) {
    LabSummary summary;
    const int64_t context = settings.contexts.back();
    summary.title =
        fmt::format("Best basis on lags 0..{} (errors below {} count as equal, and then the fewest functions win)",
                    context - 1, kEqualBelow);
    summary.table.columns = {"target", "best basis", "cycles", "MSE"};
    const auto rank = [](const FixedRow& row) {
        return std::pair(std::max(row.mse, kEqualBelow), basis_size(parse_basis("--bases", row.basis)));
    };
    for (double cycles : settings.cycles)
        for (const std::string& target : settings.targets) {
            const FixedRow* best = nullptr;
            for (const FixedRow& row : rows)
                if (row.cycles == cycles && row.target == target && row.context == context &&
                    (best == nullptr || rank(row) < rank(*best)))
                    best = &row;
            summary.table.rows.push_back({target, best->basis, cycles, best->mse});
        }
    return summary;
}

// One panel per context: MSE of every basis, a line per target.
static LabPanel mse_panel(const std::vector<FixedRow>& rows, const FixedSettings& settings, double cycles,
                          int64_t context) {
    LabPanel panel;
    panel.title = fmt::format("{} cycles, lags 0..{}", cycles, context - 1);
    panel.y_label = "MSE";
    panel.log_y = true;
    panel.lines = false;
    panel.x_names = settings.bases;
    for (const std::string& target : settings.targets) {
        LabSeries series;
        series.name = target;
        for (const FixedRow& row : rows)
            if (row.target == target && row.cycles == cycles && row.context == context) {
                series.x.push_back(static_cast<double>(series.x.size()));
                series.y.push_back(row.mse);
            }
        panel.series.push_back(series);
    }
    return panel;
}

LabResult run_fixed(const FixedSettings& settings) {
    std::vector<LagTarget> targets;
    std::vector<LagBasis> bases;
    for (const std::string& name : settings.targets) targets.push_back(find_target("--targets", lag_targets(), name));
    for (const std::string& name : settings.bases) bases.push_back(parse_basis("--bases", name));
    const std::vector<FixedRow> rows = fit_fixed(settings, targets, bases);

    LabResult result;
    result.name = "fixed";
    result.title = fmt::format("Targets fitted by fixed bases on lags 0..{}", settings.train_len - 1);
    result.settings = settings_json(settings);
    result.table.columns = {"omega_cycles", "target", "basis", "eval_len",
                            "train_mse",    "mse",    "r2",    "condition_number"};
    for (const FixedRow& row : rows)
        result.table.rows.push_back(
            {row.cycles, row.target, row.basis, row.context, row.train_mse, row.mse, row.r2, row.condition});
    for (double cycles : settings.cycles) {
        result.summaries.push_back(mse_summary(rows, settings, cycles, settings.contexts.back()));
        result.panels.push_back(mse_panel(rows, settings, cycles, settings.contexts.back()));
    }
    result.summaries.push_back(best_summary(rows, settings));
    return result;
}

LabResult run_projection(const FixedSettings& settings) {
    std::vector<LagTarget> targets;
    std::vector<LagBasis> bases;
    for (const std::string& name : settings.targets)
        targets.push_back(find_target("--targets", projection_targets(), name));
    for (const std::string& name : settings.bases) bases.push_back(parse_basis("--bases", name));
    const std::vector<FixedRow> rows = fit_fixed(settings, targets, bases);

    LabResult result;
    result.name = "projection";
    result.title =
        fmt::format("Published kernels as projections, fitted on lags 0..{} (Table 9)", settings.train_len - 1);
    result.settings = settings_json(settings);
    result.table.columns = {"omega_cycles", "train_len", "eval_len",  "target", "target_label", "basis",
                            "basis_label",  "basis_dim", "train_mse", "mse",    "r2",           "condition_number"};
    for (const FixedRow& row : rows) {
        const LagBasis basis = parse_basis("--bases", row.basis);
        result.table.rows.push_back({row.cycles, settings.train_len, row.context, row.target,
                                     find_target("--targets", projection_targets(), row.target).formula, row.basis,
                                     basis.label, basis_size(basis), row.train_mse, row.mse, row.r2, row.condition});
    }
    for (double cycles : settings.cycles)
        for (int64_t context : settings.contexts) {
            result.summaries.push_back(mse_summary(rows, settings, cycles, context));
            result.panels.push_back(mse_panel(rows, settings, cycles, context));
        }
    result.summaries.push_back(best_summary(rows, settings));
    return result;
}

}  // namespace jetlag

// The kernel laboratory: against the study's numbers, against values computed independently at small sizes, and as its
// user meets it.
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "lab/adaptive.h"
#include "lab/fixed.h"
#include "lab/float32.h"
#include "lab/lags.h"
#include "lab/least_squares.h"
#include "lab/parallel.h"
#include "src/csv.h"
#include "src/error.h"
#include "src/files.h"
#include "src/text_table.h"
#include "test/support.h"

namespace jetlag {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_error;
using test::run_program;
using test::TemporaryFolder;
using Texts = std::vector<std::string>;

fs::path golden(const std::string& name) {
    return test::shared_folder() / "golden" / "diagnostics" / name;
}

CsvTable golden_table(const std::string& name) {
    return read_csv(read_file(golden(name)), name);
}

CsvTable table_of(const LabResult& result) {
    return read_csv(result_csv(result), result.name);
}

double number(const CsvTable& table, size_t row, const std::string& column) {
    return std::stod(table.rows[row][csv_column(table, column)]);
}

// Rows by the text of their keys; numbers in them by value, so that 17.0 is 17.
std::map<Texts, size_t> rows_by_key(const CsvTable& table, const Texts& keys) {
    std::map<Texts, size_t> rows;
    for (size_t i = 0; i < table.rows.size(); i++) {
        Texts key;
        for (const std::string& column : keys) {
            const std::string& text = table.rows[i][csv_column(table, column)];
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            key.push_back(*end == '\0' && !text.empty() ? fmt::format("{}", value) : text);
        }
        EXPECT_TRUE(rows.emplace(key, i).second) << fmt::format("{} has a row twice", table.label);
    }
    return rows;
}

// Calls check(column, found, wanted, what) for every number of every row of `wanted`, of which `found` has the same
// rows.
template <typename Check>
void compare(const CsvTable& found, const CsvTable& wanted, const Texts& keys, const Texts& columns, Check check) {
    const std::map<Texts, size_t> found_rows = rows_by_key(found, keys), wanted_rows = rows_by_key(wanted, keys);
    ASSERT_EQ(found_rows.size(), wanted_rows.size());
    for (const auto& [key, row] : wanted_rows) {
        std::string what;
        for (const std::string& part : key) what += part + " ";
        const auto at = found_rows.find(key);
        ASSERT_NE(at, found_rows.end()) << what;
        for (const std::string& column : columns)
            check(column, number(found, at->second, column), number(wanted, row, column), what + column);
    }
}

// What the study's tables print of a number: so many digits after the point, or so many significant ones.
std::string decimals(double value, int digits) {
    return fmt::format("{:.{}f}", value, digits);
}
std::string significant(double value, int digits) {
    return fmt::format("{:.{}g}", value, digits);
}

void expect_relative(double found, double wanted, double tolerance, const std::string& what) {
    EXPECT_NEAR(found, wanted, tolerance * std::fabs(wanted)) << what;
}

// ---- the study's numbers

// An R^2 near 0 is the difference of two numbers near 1, and determined only that far.
void expect_fit(const std::string& column, double found, double wanted, const std::string& what) {
    if (column == "r2") {
        EXPECT_NEAR(found, wanted, 1e-6 * std::max(std::fabs(wanted), 1e-6)) << what;
    } else if (column != "condition_number" && wanted < 1e-20) {
        // Solutions are refined, and mostly nearer than the published.
        EXPECT_LT(found, 10 * wanted + 1e-29) << what;
    } else {
        expect_relative(found, wanted, 1e-6, what);
    }
}

TEST(LabGolden, FixedFits) {
    NEEDS_SHARED();
    compare(table_of(run_fixed(fixed_defaults())), golden_table("fixed_kernel.csv"),
            {"omega_cycles", "target", "basis", "eval_len"}, {"train_mse", "mse", "r2", "condition_number"},
            expect_fit);
}

TEST(LabGolden, ProjectionAndTable9) {
    NEEDS_SHARED();
    const CsvTable found = table_of(run_projection(projection_defaults())), wanted = golden_table("grape_fixed.csv");
    const Texts keys = {"target", "basis", "eval_len"};
    compare(found, wanted, keys, {"train_mse", "mse", "r2", "condition_number", "basis_dim"}, expect_fit);
    compare(found, wanted, keys, {"mse", "r2"}, [](const std::string&, double a, double b, const std::string& what) {
        EXPECT_EQ(decimals(a + 0.0, 3), decimals(b + 0.0, 3)) << what;
    });
}

TEST(LabGolden, StabilityAndTable5) {
    NEEDS_SHARED();
    const CsvTable found = table_of(run_stability(stability_defaults())), wanted = golden_table("lc_stability.csv");
    const Texts keys = {"variant", "eval_len"};
    Texts columns(wanted.columns.begin() + 6, wanted.columns.end());
    compare(found, wanted, keys, columns, [](const std::string& column, double a, double b, const std::string& what) {
        if (column == "far_gram_condition_number" && b > 1e10) {
            EXPECT_LT(std::fabs(std::log10(a / b)), 1) << what;
        } else if (column == "wrapped_phase_nearest_median" && b < 1e-12) {
            EXPECT_LT(a, 1e-12) << what;
        } else {
            expect_relative(a, b, 1e-6, what);
        }
    });
    compare(found, wanted, keys,
            {"qk_norm_proxy_final", "local_phase_ratio_final", "far_phase_span_radians", "int8_quant_error_tensor",
             "int4_quant_error_tensor"},
            [](const std::string&, double a, double b, const std::string& what) {
                EXPECT_EQ(significant(a, 4), significant(b, 4)) << what;
            });
}

// The draws are those of PyTorch; logit errors are sums of rounding errors.
void expect_published_cache(const CsvTable& found) {
    const CsvTable wanted = golden_table("cache_quant.csv");
    compare(found, wanted, {"variant", "eval_len"}, Texts(wanted.columns.begin() + 8, wanted.columns.end()),
            [](const std::string&, double a, double b, const std::string& what) { expect_relative(a, b, 1e-3, what); });
}

// Counts are exact. Means of scores were taken in float.
void expect_published_retrieval(const CsvTable& found) {
    const CsvTable wanted = golden_table("retrieval.csv");
    compare(found, wanted, {"variant", "precision", "eval_len", "bucket"},
            Texts(wanted.columns.begin() + 5, wanted.columns.end()),
            [](const std::string& column, double a, double b, const std::string& what) {
                const bool is_mean = column.ends_with("score") || column == "mean_margin";
                EXPECT_NEAR(a, b, is_mean ? 2e-7 : 0) << what;
            });
}

TEST(LabGolden, Adaptive) {
    NEEDS_SHARED();
    const json wanted = json::parse(read_file(golden("adaptive.json")));
    AdaptiveSettings settings = adaptive_defaults();
    for (const json& run : wanted.at("results")) {
        const std::string name = run.at("target");
        // Seed 0 as published, number by number; then the mean of three seeds.
        double gates[kPjSectorCount] = {};
        std::vector<double> mass(4, 0.0);
        for (uint64_t seed : settings.seeds) {
            const AdaptiveFit fit = fit_adam(find_target("target", lag_targets(), name), settings, seed);
            for (int s = 0; s < kPjSectorCount; s++) gates[s] += fit.gate[s] / 3;
            for (size_t r = 0; r < 4; r++) mass[r] += fit.order_mass[r] / 3;
            if (seed != 0) continue;
            EXPECT_EQ(fit.restart, run.at("restart").get<int>()) << name;
            expect_relative(fit.train_mse, run.at("train_mse"), 1e-2, name);
            expect_relative(fit.eval_mse, run.at("eval_mse"), 1e-2, name);
            EXPECT_NEAR(fit.gate[kPjFj], run.at("gates").at("fj").get<double>(), 1e-4) << name;
            EXPECT_NEAR(fit.gate[kPjAffine], run.at("gates").at("affine").get<double>(), 1e-4) << name;
            EXPECT_NEAR(fit.gate[kPjLc], run.at("gates").at("lc").get<double>(), 1e-4) << name;
            EXPECT_NEAR(fit.slope, run.at("affine_slope").get<double>(), 1e-3) << name;
            for (size_t r = 0; r < 4; r++) {
                EXPECT_NEAR(fit.fj_mass[r], run.at("fj_mass")[r].get<double>(), 1e-3) << name;
                EXPECT_NEAR(fit.lc_mass[r], run.at("lc_mass")[r].get<double>(), 1e-3) << name;
                EXPECT_NEAR(fit.order_mass[r], run.at("normalized_order_mass")[r].get<double>(), 1e-3) << name;
                EXPECT_NEAR(fit.functional_energy[r], run.at("functional_energy")[r].get<double>(), 1e-3) << name;
                const double left = run.at("leave_one_order_out_delta_mse")[r];
                EXPECT_NEAR(fit.leave_one_out[r], left, 1e-3 * std::max(std::fabs(left), 0.1)) << name;
            }
        }
        const std::vector<double> published = run.at("normalized_order_mass");
        EXPECT_EQ(std::max_element(mass.begin(), mass.end()) - mass.begin(),
                  std::max_element(published.begin(), published.end()) - published.begin())
            << name;
        EXPECT_NEAR(gates[kPjFj], run.at("gates").at("fj").get<double>(), 0.03) << name;
        EXPECT_NEAR(gates[kPjAffine], run.at("gates").at("affine").get<double>(), 0.03) << name;
        EXPECT_NEAR(gates[kPjLc], run.at("gates").at("lc").get<double>(), 0.03) << name;
    }
}

// ---- values computed independently, in double (numpy), at L = 64

TEST(Lab, FixedFitsAtASmallSize) {
    FixedSettings settings;
    settings.train_len = 64;
    settings.contexts = {256};
    settings.cycles = {3};
    settings.damping = 0.3;
    settings.targets = {"third_jet", "lc_affine", "recency_weak_jet"};
    settings.bases = {"scaled_R2_affine", "lc_R2"};
    const CsvTable table = table_of(run_fixed(settings));
    struct Wanted {
        const char *target, *basis;
        double train_mse, mse, r2, condition;
    };
    const Wanted list[] = {
        {"third_jet", "scaled_R2_affine", 0.00026895184883577177, 83.35507165179776, 0.4150524551317476,
         20.19589953180807},
        {"third_jet", "lc_R2", 0.008613681082469116, 143.3319185502963, -0.0058374637057119205, 24.413810012080454},
        {"lc_affine", "scaled_R2_affine", 0.008425456343379906, 69.87243904842775, -66.9811116033693,
         20.19589953180807},
        {"lc_affine", "lc_R2", 0.00256697598053629, 0.10142233141278492, 0.9013229976691134, 24.413810012080454},
        {"recency_weak_jet", "scaled_R2_affine", 4.6445642714451417e-07, 0.12408443679598577, 0.8416085944065527,
         20.19589953180807},
        {"recency_weak_jet", "lc_R2", 0.007845642906668674, 1.2900617645077066, -0.6467391194166974,
         24.413810012080454},
    };
    ASSERT_EQ(table.rows.size(), std::size(list));
    for (size_t i = 0; i < std::size(list); i++) {
        EXPECT_EQ(table.rows[i][1], list[i].target);
        EXPECT_EQ(table.rows[i][2], list[i].basis);
        expect_relative(number(table, i, "train_mse"), list[i].train_mse, 1e-8, list[i].target);
        expect_relative(number(table, i, "mse"), list[i].mse, 1e-8, list[i].target);
        expect_relative(number(table, i, "r2"), list[i].r2, 1e-8, list[i].target);
        expect_relative(number(table, i, "condition_number"), list[i].condition, 1e-10, list[i].target);
    }
}

// The targets, directly from their formulas in long double.
TEST(Lab, TargetsAreTheirFormulas) {
    const int64_t T = 700, L = 96;
    const long double omega = 2 * std::acos(-1.0L) * 7 / L;
    for (const LagTarget& target : lag_targets()) {
        const std::vector<double> values = target_values(target, T, L, lag_frequency(7, L));
        const std::string name = target.name;
        for (int64_t d = 0; d < T; d++) {
            const long double x = static_cast<long double>(d) / L, eta = std::asinh(x), wave = std::cos(omega * d);
            const long double beta = d / std::sqrt(static_cast<long double>(d * d + L * L));
            const long double core = std::cos(omega * L * eta) * (1 + 0.4L * beta + 0.2L * beta * beta);
            const long double wanted = name == "phase"              ? wave
                                       : name == "linear"           ? x
                                       : name == "first_jet"        ? x * wave
                                       : name == "second_jet"       ? x * x * std::exp(-0.1L * x) * wave
                                       : name == "third_jet"        ? x * x * x * std::exp(-0.1L * x) * wave
                                       : name == "recency_weak_jet" ? -0.4L * x + 0.15L * x * x * wave
                                       : name == "lc_core"          ? core
                                                                    : core - 0.25L * eta;
            ASSERT_NEAR(values[static_cast<size_t>(d)], static_cast<double>(wanted), 1e-11) << name << " at " << d;
        }
    }
}

TEST(Lab, ProjectionAtASmallSize) {
    FixedSettings settings = projection_defaults();
    settings.train_len = 64;
    settings.contexts = {256};
    settings.cycles = {3};
    settings.targets = {"affine", "second_jet", "lc_core"};
    settings.bases = {"grape_m_rope", "pj_fj_R1", "pj_lc_R1"};
    const CsvTable table = table_of(run_projection(settings));
    const double wanted[][4] = {
        {0.077643166438662661, 3.5776431664386634, -1.683273318330559, 1.0079052613579398},
        {0.077227930330782568, 3.5945345995477163, -1.6959420864724093, 3.9873196567846438},
        {0.066530148590477955, 3.7028946351109431, -1.777213353245946, 4.4819237161986942},
        {0.042391081360620197, 23.489427352393395, 0.06502928468154956, 1.0079052613579398},
        {0.0028650170571181575, 12.832972204093654, 0.48919771345125262, 3.9873196567846438},
        {0.034999263198325033, 25.34716383983713, -0.0089158646182043721, 4.4819237161986942},
        {0.28144025002786494, 1.3631926958178691, -0.3146749237898967, 1.0079052613579398},
        {0.054085562387747949, 11.751898077232671, -10.33363299001765, 3.9873196567846438},
        {3.4439442766229713e-05, 0.00090148363882339849, 0.99913060131718434, 4.4819237161986942}};
    const char* const columns[] = {"train_mse", "mse", "r2", "condition_number"};
    ASSERT_EQ(table.rows.size(), std::size(wanted));
    for (size_t i = 0; i < std::size(wanted); i++)
        for (size_t c = 0; c < 4; c++)
            expect_relative(number(table, i, columns[c]), wanted[i][c], 1e-8, fmt::format("{} {}", i, columns[c]));
}

// recency_weak_jet is the sum of -0.4 x and 0.15 x^2 cos(omega d), which variable projection finds: the shares of their
// mean squares, summed here lag by lag in long double.
TEST(Lab, EnergyOfTheSectors) {
    AdaptiveSettings settings = adaptive_defaults();
    settings.solver = AdaptiveSolver::varpro;
    settings.targets = {"recency_weak_jet"};
    settings.train_len = 64;
    settings.context = 256;
    settings.cycles = 3;
    const CsvTable table = table_of(run_adaptive(settings));
    long double jet = 0, affine = 0;
    for (int d = 0; d < 256; d++) {
        const long double x = d / 64.0L, wave = std::cos(2 * std::acos(-1.0L) * 3 * x);
        affine += 0.16L * x * x;
        jet += 0.0225L * x * x * x * x * wave * wave;
    }
    expect_relative(number(table, 0, "energy_fj"), static_cast<double>(jet / (jet + affine)), 1e-9, "energy_fj");
    expect_relative(number(table, 0, "energy_affine"), static_cast<double>(affine / (jet + affine)), 1e-9, "affine");
    EXPECT_EQ(number(table, 0, "energy_lc"), 0);
}

TEST(Lab, StabilityAtASmallSize) {
    VariantSettings settings = stability_defaults();
    settings.train_len = 64;
    settings.contexts = {256};
    settings.cycles = {3};
    settings.max_order = 2;
    settings.damping = 0.2;
    settings.variants = {"scaled", "log", "lc", "lc_wrong_scale", "raw"};
    const CsvTable table = table_of(run_stability(settings));
    const std::map<std::string, std::vector<double>> wanted = {
        {"bias_abs_max",
         {3.4237091441635052, 1.234560905758309, 0.9292413795087048, 0.7749411300948214, 31112.52266549339}},
        {"bias_rms",
         {1.3076798277305186, 0.5108910917680257, 0.5105465516423192, 0.6414847654197083, 10265.327711710624}},
        {"weighted_logit_std",
         {0.8370888849007581, 0.3492979046222021, 0.42398335416916644, 0.27212144975647523, 5966.765403809697}},
        {"final_attention_entropy", {4.699974082830346, 5.416280179749723, 5.426255359642066, 5.521101373801133, 0}},
        {"final_effective_support", {109.94432296952752, 225.0404535839072, 227.2965061493575, 249.91013014177668, 1}},
        {"final_average_distance", {175.2626418018769, 135.7547035085736, 137.8119111699998, 141.32129005250195, 255}},
        {"qk_norm_proxy_max", {4.028501884969926, 2.2901127266348107, 1.6809926687529329, 1.6809926687529329, 32513.5}},
        {"qk_norm_proxy_mean",
         {2.1643557315236235, 1.6046061623749392, 1.4660623861624127, 1.4660623861624127, 10859.75}},
        {"feature_abs_max", {3.577766571563564, 1.6063080194251727, 1, 1, 32512.5}},
        {"int8_quant_error_tensor",
         {0.0059496172585410375, 0.0031828651519810007, 0.002166270573915053, 0.002166270573915053,
          0.00714259225429736}},
        {"int8_quant_error_per_order",
         {0.003946870102833533, 0.002887696697812981, 0.002067041251915965, 0.002067041251915965,
          0.005033160197289708}},
        {"int4_quant_error_tensor",
         {0.10593202834951936, 0.07510955663140066, 0.04267042873331785, 0.04267042873331785, 0.08766171382345003}},
        {"int4_quant_error_per_order",
         {0.06965691622952708, 0.05085568311869959, 0.03501017009174658, 0.03501017009174658, 0.08708027919953187}},
        {"local_phase_ratio_final", {1, 1, 0.24388058899501175, 0.0038106342030470586, 1}},
        {"local_phase_ratio_far_mean", {1, 1, 0.3261885833807516, 0.005096696615324243, 1}},
        {"far_phase_span_radians",
         {37.40458753180347, 37.40458753180347, 12.200949418940299, 0.19063983467094217, 37.40458753180347}},
        {"far_local_collision_rate", {0, 0, 0, 0, 0}},
        {"wrapped_phase_collision_rate", {1, 1, 0.015625, 0, 1}},
        {"far_gram_condition_number",
         {126.90364673966607, 424.6318481416581, 10901.144983219521, 37224582.323007435, 133.4907117237194}},
    };
    ASSERT_EQ(table.rows.size(), settings.variants.size());
    for (const auto& [column, values] : wanted)
        for (size_t i = 0; i < values.size(); i++) {
            const double tolerance = column == "far_gram_condition_number" ? 1e-6 : 1e-10;
            EXPECT_NEAR(number(table, i, column), values[i], tolerance * values[i] + 1e-14)
                << settings.variants[i] << " " << column;
        }
    EXPECT_NEAR(number(table, 2, "wrapped_phase_nearest_median"), 0.02243241463089163, 1e-13);
    EXPECT_NEAR(number(table, 3, "wrapped_phase_nearest_median"), 0.0014518612181719792, 1e-13);
}

TEST(Lab, CacheAtASmallSize) {
    CacheSettings settings = cache_defaults();
    settings.lags.train_len = 64;
    settings.lags.contexts = {128};
    settings.lags.cycles = {3, 7};
    settings.lags.max_order = 2;
    settings.lags.damping = 0.2;
    settings.lags.variants = {"scaled", "lc"};
    settings.cache_dim = 16;
    settings.seed = 5;
    const CsvTable table = table_of(run_cache(settings));
    const std::map<std::string, std::vector<double>> wanted = {
        {"key_norm_max", {3.969483715498585, 3.3506030054881126}},
        {"key_norm_final", {3.5739414146357817, 3.090330830106981}},
        {"key_norm_mean", {2.236558351253781, 2.2063914666198525}},
        {"key_norm_far_mean", {2.6672217640661975, 2.5103105612072065}},
        {"cache_abs_max", {2.21325153078265, 1.7147472523587615}},
        {"logit_abs_max", {0.9972923112388916, 0.500356683789823}},
        {"logit_std", {0.4619627281093921, 0.23551054267891602}},
        {"int8_cache_error_tensor", {0.008551021751181945, 0.0068325218610884005}},
        {"int4_cache_error_channel", {0.09803302463579756, 0.08544895849342501}},
        {"int4_cache_error_far_tensor", {0.13356109711957517, 0.11306221980100185}},
        {"int4_logit_rel_error_tensor", {0.1680875688101991, 0.14269637131968538}},
        {"int8_logit_rel_error_channel", {0.0047767935213803405, 0.005902725039426708}},
        {"nonfinite_count", {0, 0}},
    };
    for (const auto& [column, values] : wanted)
        for (size_t i = 0; i < values.size(); i++)
            expect_relative(number(table, i, column), values[i], column.starts_with("int") ? 1e-3 : 1e-5, column);
}

TEST(Lab, RetrievalAtASmallSize) {
    RetrievalSettings settings = retrieval_defaults();
    settings.lags.train_len = 64;
    settings.lags.contexts = {512};
    settings.lags.cycles = {3, 7};
    settings.lags.max_order = 2;
    settings.lags.damping = 0.2;
    settings.lags.variants = {"lc", "log", "lc_amp_only"};
    settings.precisions = {"fp32", "int4"};
    settings.queries = 16;
    const CsvTable table = table_of(run_retrieval(settings));
    struct Wanted {
        double top1, within_1, within_64, bucket, error, margin, ties;
    };
    const Wanted list[] = {
        {1, 1, 1, 1, 0, 0.09192474561817746, 1},  {1, 1, 1, 1, 0, 0.00891227749472457, 1},
        {1, 1, 1, 1, 0, 0.003918296941074734, 1}, {1, 1, 1, 1, 0, 0.08975164279554229, 1},
        {1, 1, 1, 1, 0, 0.010089149340222071, 1}, {0.9375, 1, 1, 1, 0.0625, 0.004575959002889235, 1.1875},
        {1, 1, 1, 1, 0, 0.08954123114035636, 1},  {1, 1, 1, 1, 0, 0.01289999178190205, 1},
        {1, 1, 1, 1, 0, 0.001263366216543535, 1}, {1, 1, 1, 1, 0, 0.10949668406059146, 1},
        {1, 1, 1, 1, 0, 0.020852157524257127, 1}, {1, 1, 1, 1, 0, 0.003930603247874552, 1},
        {1, 1, 1, 1, 0, 0.08166537607030105, 1},  {1, 1, 1, 1, 0, 0.0024294772927991384, 1},
        {1, 1, 1, 1, 0, 9.49797620652254e-06, 1},
    };
    ASSERT_EQ(table.rows.size(), 18u);  // the last three, of int4, are ties whose order rounding decides
    for (size_t i = 0; i < std::size(list); i++) {
        const std::string what = table.rows[i][0] + " " + table.rows[i][1] + " " + table.rows[i][4];
        EXPECT_EQ(number(table, i, "top1_exact"), list[i].top1) << what;
        EXPECT_EQ(number(table, i, "within_1"), list[i].within_1) << what;
        EXPECT_EQ(number(table, i, "within_64"), list[i].within_64) << what;
        EXPECT_EQ(number(table, i, "bucket_accuracy"), list[i].bucket) << what;
        EXPECT_EQ(number(table, i, "mean_abs_error"), list[i].error) << what;
        EXPECT_EQ(number(table, i, "mean_tie_count"), list[i].ties) << what;
        EXPECT_NEAR(number(table, i, "mean_margin"), list[i].margin, 1e-6) << what;
    }
}

// Components that float cannot hold must not pass for errors of zero.
TEST(Lab, OverflowIsNotAPerfectResult) {
    CacheSettings cache = cache_defaults();
    cache.lags.contexts = {256, 32768};
    cache.lags.cycles = {3};
    cache.lags.variants = {"raw", "lc"};
    RetrievalSettings retrieval = retrieval_defaults();
    retrieval.queries = 4;
    retrieval.lags = cache.lags;
    for (int order : {9, 15}) {
        cache.lags.max_order = retrieval.lags.max_order = order;
        const LabResult kept = run_cache(cache);
        const CsvTable keys = table_of(kept);
        ASSERT_EQ(keys.rows.size(), 4u);
        for (size_t i = 0; i < keys.rows.size(); i++) {
            const bool overflows = i == 1;  // raw at 32768
            EXPECT_EQ(number(keys, i, "nonfinite_count") > 0, overflows) << order;
            for (const std::string& column : keys.columns)
                if (column.starts_with("int8") || column.starts_with("int4") || column == "logit_std" ||
                    column == "key_norm_mean") {
                    EXPECT_EQ(std::isfinite(number(keys, i, column)), !overflows) << i << " " << column;
                }
        }
        EXPECT_EQ(result_csv(kept).find("-nan"), std::string::npos);
        ASSERT_EQ(kept.notes.size(), 1u);
        EXPECT_NE(result_text(kept).find("note: raw at context 32768: "), std::string::npos);
        const LabResult found = run_retrieval(retrieval);
        const CsvTable table = table_of(found);
        size_t bad = 0;
        for (size_t i = 0; i < table.rows.size(); i++) {
            const bool is_raw = table.rows[i][0] == "raw";
            bad += number(table, i, "nonfinite_rows") > 0;
            if (!is_raw) {
                EXPECT_EQ(number(table, i, "nonfinite_rows"), 0);
            }
            // Scales of infinity leave no row of the quantised features.
            if (is_raw && table.rows[i][1] != "fp32" && table.rows[i][2] == "32768") {
                EXPECT_EQ(number(table, i, "nonfinite_rows"), 32767);
                for (const char* column : {"top1_exact", "within_64", "bucket_accuracy"})
                    EXPECT_EQ(number(table, i, column), 0) << column;
                for (const char* column : {"mean_abs_error", "median_abs_error", "mean_margin", "min_margin"})
                    EXPECT_TRUE(std::isnan(number(table, i, column))) << column;
            }
        }
        EXPECT_GT(bad, 0u);
        EXPECT_EQ(result_csv(found).find("-nan"), std::string::npos);
        EXPECT_NE(result_text(found).find("note: raw at context 32768, int8: 32767 of 32767 rows"), std::string::npos);
    }
}

TEST(Lab, AdaptiveAtASmallSize) {
    AdaptiveSettings settings = adaptive_defaults();
    settings.train_len = 64;
    settings.context = 256;
    settings.cycles = 3;
    settings.steps = 60;
    settings.lr = 0.05;
    settings.restarts = 2;
    const AdaptiveFit jet = fit_adam(find_target("target", lag_targets(), "first_jet"), settings, 4);
    EXPECT_EQ(jet.restart, 1);
    expect_relative(jet.train_mse, 0.0006845504319263543, 1e-8, "train MSE");
    expect_relative(jet.eval_mse, 0.09431381247690787, 1e-8, "evaluation MSE");
    EXPECT_NEAR(jet.gate[kPjFj], 0.8892785932797168, 1e-9);
    EXPECT_NEAR(jet.slope, 0.20712451559041023, 1e-9);
    const AdaptiveFit lc = fit_adam(find_target("target", lag_targets(), "lc_affine"), settings, 4);
    EXPECT_EQ(lc.restart, 0);
    expect_relative(lc.train_mse, 0.01210215837368167, 1e-6, "train MSE");
    expect_relative(lc.eval_mse, 0.09035062300192839, 1e-6, "evaluation MSE");
    EXPECT_NEAR(lc.slope, -1.4962591198358561, 1e-7);
}

TEST(Lab, VariableProjectionFindsTheDesignedSector) {
    AdaptiveSettings settings = adaptive_defaults();
    const std::map<std::string, std::vector<int>> sectors = {
        {"phase", {kPjFj}},      {"linear", {kPjAffine}}, {"first_jet", {kPjFj}},
        {"second_jet", {kPjFj}}, {"third_jet", {kPjFj}},  {"recency_weak_jet", {kPjFj, kPjAffine}},
        {"lc_core", {kPjLc}}};
    const std::map<std::string, int> order = {{"phase", 0},      {"linear", -1},   {"first_jet", 1},
                                              {"second_jet", 2}, {"third_jet", 3}, {"recency_weak_jet", 2},
                                              {"lc_core", 0}};
    struct Setting {
        int64_t train_len, context;
        double cycles;
        int max_order;
    };
    for (const Setting& s : {Setting{1024, 4096, 17, 3}, Setting{300, 2400, 5, 4}, Setting{512, 4096, 61, 5}}) {
        settings.train_len = s.train_len;
        settings.context = s.context;
        settings.cycles = s.cycles;
        settings.max_order = s.max_order;
        for (const auto& [name, wanted] : sectors) {
            const AdaptiveFit fit = fit_varpro(find_target("target", lag_targets(), name), settings);
            EXPECT_LT(fit.eval_mse, 1e-20) << name;
            for (int sector = 0; sector < kPjSectorCount; sector++)
                EXPECT_EQ(fit.gate[sector], std::count(wanted.begin(), wanted.end(), sector)) << name << " " << sector;
            EXPECT_EQ(fit.dominant_order, order.at(name)) << name;
            const bool is_damped = name == "second_jet" || name == "third_jet";
            EXPECT_NEAR(fit.damping, is_damped ? 0.1 : 0, 1e-10) << name;
        }
        EXPECT_GT(fit_varpro(find_target("target", lag_targets(), "lc_affine"), settings).train_mse, 1e-12);
    }
}

TEST(Lab, TablesWithRaggedRowsAreRefused) {
    EXPECT_THROW(aligned_table({{"a"}, {"1", "2"}}, 0), std::logic_error);
    EXPECT_THROW(aligned_table({{"a", "b"}, {"1"}}, 0), std::logic_error);
    EXPECT_EQ(aligned_table({{"a", "b"}, {"1", "22"}}, 1), "a   b\n1  22\n");
}

TEST(Lab, AJobThatFailsFailsTheLoop) {
    try {
        run_jobs(50, "a table of 50 rows", [](size_t i) {
            if (i % 7 == 3) throw std::bad_alloc();
        });
        FAIL();
    } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()), "no memory for a table of 50 rows");
        EXPECT_EQ(e.exit_code, kExitFailed);
    }
    EXPECT_THROW(run_jobs(5, "", [](size_t i) { fail("{}", i); }), Error);
}

// Mean and spread over seeds, recomputed from the rows.
TEST(Lab, SummariesOfTheLearnerInTheJson) {
    AdaptiveSettings settings = adaptive_defaults();
    settings.targets = {"second_jet", "lc_affine"};
    settings.train_len = 64;
    settings.context = 256;
    settings.cycles = 3;
    settings.seeds = {0, 3, 9};
    settings.steps = 40;
    settings.restarts = 4;
    const json document = json::parse(result_json(run_adaptive(settings)));
    const json &summary = document.at("summaries").at(0).at("rows"), &rows = document.at("rows");
    ASSERT_EQ(summary.size(), 2u);
    ASSERT_EQ(rows.size(), 6u);
    for (size_t k = 0; k < 2; k++) {
        EXPECT_EQ(summary[k].at("target"), settings.targets[k]);
        double largest = 0;
        int dominant = -1;
        for (const std::string column :
             {"gate_fj", "gate_affine", "gate_lc", "normalized_order_mass_r0", "normalized_order_mass_r1",
              "normalized_order_mass_r2", "normalized_order_mass_r3", "damping", "train_mse", "eval_mse"}) {
            double mean = 0, squares = 0;
            for (size_t i = 0; i < 3; i++) mean += rows[3 * k + i].at(column).get<double>() / 3;
            for (size_t i = 0; i < 3; i++) squares += std::pow(rows[3 * k + i].at(column).get<double>() - mean, 2);
            expect_relative(summary[k].at(column + "_mean"), mean, 1e-12, column);
            expect_relative(summary[k].at(column + "_spread"), std::sqrt(squares / 2), 1e-9, column);
            if (column.starts_with("normalized") && mean > largest) {
                largest = mean;
                dominant = column.back() - '0';
            }
        }
        EXPECT_EQ(summary[k].at("dominant_order"), dominant);
    }
}

TEST(Lab, BestBasesInTheJson) {
    for (bool is_projection : {false, true}) {
        FixedSettings settings = is_projection ? projection_defaults() : fixed_defaults();
        settings.train_len = 64;
        settings.contexts = {64, 256};
        settings.cycles = {3, 5};
        const json document = json::parse(result_json(is_projection ? run_projection(settings) : run_fixed(settings)));
        const json& best = document.at("summaries").back().at("rows");
        ASSERT_EQ(best.size(), 2 * settings.targets.size());
        for (const json& found : best) {
            double least = INFINITY;
            for (const json& row : document.at("rows"))
                if (row.at("target") == found.at("target") && row.at("omega_cycles") == found.at("cycles") &&
                    row.at("eval_len") == 256) {
                    least = std::min(least, row.at("mse").get<double>());
                    if (row.at("basis") == found.at("best basis")) {
                        EXPECT_EQ(row.at("mse"), found.at("MSE"));
                    }
                }
            EXPECT_LE(found.at("MSE").get<double>(), std::max(least, 1e-20)) << found.dump();
        }
        // Of the bases that hold a target the smallest.
        EXPECT_EQ(best[0].at("target"), "phase");
        EXPECT_EQ(best[0].at("best basis"), is_projection ? "grape_m_rope" : "rope");
        const json& jet = best[is_projection ? 3 : 4];
        EXPECT_EQ(jet.at("target"), is_projection ? "second_jet" : "third_jet");
        EXPECT_EQ(jet.at("best basis"), is_projection ? "pj_fj_R2" : "scaled_R3");
    }
}

// A design that lacks rank has the solution of least norm, and its condition number says so.
TEST(Lab, LeastSquares) {
    Matrix design = make_matrix(4, 2), target = make_matrix(4, 1);
    design.values = {1, 2, 3, 4, 1, 2, 3, 4};
    target.values = {2, 4, 6, 8};
    const Matrix weights = least_squares(design, target);
    EXPECT_NEAR(weights.values[0], 1, 1e-14);
    EXPECT_NEAR(weights.values[1], 1, 1e-14);
    EXPECT_NEAR(condition_number(design), std::sqrt(60.0) / 1e-12, 1e-3 / 1e-12);
    design.values = {3, 0, 0, 0, 0, 2, 0, 0};
    EXPECT_NEAR(condition_number(design), 1.5, 1e-14);
    const Standardisation s = column_statistics(design);
    EXPECT_DOUBLE_EQ(s.mean[0], 0.75);
    EXPECT_DOUBLE_EQ(s.deviation[0], 1.5);
}

TEST(Lab, FloatProductsAreChainsOfFusedMultiplyAdds) {
    FloatMatrix a = make_float_matrix(3, 5), b = make_float_matrix(5, 75);
    for (size_t i = 0; i < a.values.size(); i++) a.values[i] = std::sin(1.0f + static_cast<float>(i));
    for (size_t i = 0; i < b.values.size(); i++) b.values[i] = std::cos(0.3f * static_cast<float>(i));
    const FloatMatrix c = product(a, b);
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 75; j++) {
            float sum = 0;
            for (size_t k = 0; k < 5; k++) sum = std::fma(a.values[i * 5 + k], b.values[k * 75 + j], sum);
            ASSERT_EQ(c.values[i * 75 + j], sum);
        }
    const FloatMatrix back = transposed(transposed(b));
    EXPECT_EQ(back.values, b.values);
}

// ---- the program

TEST(LabProgram, WritesItsFilesAndNothingElse) {
    TemporaryFolder folder;
    const std::string out = folder.path / "deep" / "out";
    const Texts small = {"--out", out, "--train-len", "64", "--contexts", "128,64", "--cycles", "3"};
    const std::vector<Texts> runs = {{"fixed"},     {"projection"}, {"adaptive"}, {"adaptive", "--solver", "varpro"},
                                     {"stability"}, {"cache"},      {"retrieval"}};
    std::map<std::string, int> files;
    for (const Texts& run : runs) {
        Texts arguments = run;
        arguments.insert(arguments.end(), small.begin(), small.end());
        if (run[0] == "adaptive") {
            *std::find(arguments.begin(), arguments.end(), "--contexts") = "--context";
            *std::find(arguments.begin(), arguments.end(), "128,64") = "128";
            arguments.insert(arguments.end(), {"--targets", "phase"});
            if (run.size() == 1) arguments.insert(arguments.end(), {"--steps", "5"});
        }
        const test::ProgramResult result = run_program("lab", arguments);
        ASSERT_EQ(result.exit_code, kExitGood) << result.err;
        EXPECT_EQ(result.err, "");
        const std::string name = run.size() > 1 ? "adaptive_varpro" : run[0];
        const CsvTable table = read_csv(read_file(fs::path(out) / (name + ".csv")), name);
        const json document = json::parse(read_file(fs::path(out) / (name + ".json")));
        EXPECT_EQ(document.at("diagnostic"), name);
        EXPECT_EQ(document.at("settings").at("train_len"), 64);
        EXPECT_EQ(document.at("rows").size(), table.rows.size());
        EXPECT_GT(table.rows.size(), 0u);
        EXPECT_NE(read_file(fs::path(out) / (name + ".svg")).find("</svg>"), std::string::npos);
        EXPECT_NE(result.out.find(name + ".csv"), std::string::npos);
    }
    size_t count = 0;
    for (const auto& entry : fs::directory_iterator(out)) count += entry.is_regular_file();
    EXPECT_EQ(count, 3 * runs.size());

    const Texts again = {"stability", "--out", out, "--contexts", "64"};
    expect_error(run_program("lab", again), "lab", kExitUsage, {"stability.csv", "exists already", "--force"});
    Texts forced = again;
    forced.push_back("--force");
    EXPECT_EQ(run_program("lab", forced).exit_code, kExitGood);
}

// Everything once, since cache and retrieval take their seconds: the page, and those two against the study.
TEST(LabProgram, AllReproducesTheStudyOnOnePage) {
    if (!test::is_fast_build()) GTEST_SKIP() << "minutes without optimisation";
    TemporaryFolder folder;
    const test::ProgramResult result = run_program("lab", {"all", "--out", folder.path});
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;
    EXPECT_LT(result.cpu_seconds, 60);
    const std::string page = read_file(folder.path / "lab.html");
    for (const char* name : {"fixed", "projection", "adaptive", "adaptive_varpro", "stability", "cache", "retrieval"}) {
        EXPECT_NE(page.find(fmt::format("<h2 id=\"{}\">", name)), std::string::npos);
        EXPECT_TRUE(fs::exists(folder.path / fmt::format("{}.csv", name)));
    }
    EXPECT_NE(page.find("\"train_len\": 1024"), std::string::npos);
    // A figure and a table of all numbers for each, and a table for each summary.
    size_t summaries = 0;
    for (const char* name : {"fixed", "projection", "adaptive", "adaptive_varpro", "stability", "cache", "retrieval"})
        summaries += json::parse(read_file(folder.path / fmt::format("{}.json", name))).at("summaries").size();
    EXPECT_EQ(summaries, 4u + 4u + 1u + 1u + 1u + 1u + 3u);
    const auto count = [&](const std::string& text) {
        size_t n = 0;
        for (size_t at = page.find(text); at != std::string::npos; at = page.find(text, at + 1)) n++;
        return n;
    };
    EXPECT_EQ(count("<svg"), 7u);
    EXPECT_EQ(count("<table"), 7 + summaries);
    std::map<std::string, int> ids;
    for (const std::string quote : {"'", "\""})
        for (size_t at = page.find(" id=" + quote); at != std::string::npos; at = page.find(" id=" + quote, at + 1))
            ids[page.substr(at + 5, page.find(quote, at + 5) - at - 5)]++;
    EXPECT_GT(ids.size(), 7u);
    for (const auto& [id, times] : ids) EXPECT_EQ(times, 1) << id;
    // Nothing is loaded from elsewhere: the only addresses are the names of XML namespaces.
    EXPECT_EQ(page.find("src="), std::string::npos);
    EXPECT_EQ(page.find("<script"), std::string::npos);
    EXPECT_EQ(page.find("@import"), std::string::npos);
    for (size_t at = page.find("http"); at != std::string::npos; at = page.find("http", at + 1))
        EXPECT_EQ(page.substr(at, 18), "http://www.w3.org/") << page.substr(at, 60);
    expect_error(run_program("lab", {"all", "--out", folder.path}), "lab", kExitUsage, {"lab.html", "exists already"});

    NEEDS_SHARED();
    expect_published_cache(read_csv(read_file(folder.path / "cache.csv"), "cache"));
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("fma")) GTEST_SKIP() << "without FMA the last bits of retrieval differ";
#endif
    expect_published_retrieval(read_csv(read_file(folder.path / "retrieval.csv"), "retrieval"));
}

// Queries times lags would be 256 GiB of scores; they are worked through in blocks. What is too large all the same is
// an error, not a crash.
TEST(LabProgram, NeedsLittleMemoryOrSaysWhatItWanted) {
    if (!test::is_fast_build()) GTEST_SKIP() << "address space limits do not suit the sanitizers";
    TemporaryFolder folder;
    const auto limit = [] {
        const rlimit bytes = {800u << 20, 800u << 20};
        setrlimit(RLIMIT_AS, &bytes);
    };
    const Texts one = {"--variants", "lc", "--train-len", "16384", "--cycles", "3", "--max-order", "0"};
    Texts arguments = {"retrieval",    "--out", folder.path / "a", "--contexts", "16384",
                       "--precisions", "fp32",  "--queries",       "16384"};
    arguments.insert(arguments.end(), one.begin(), one.end());
    test::RunningProgram fits = test::start_program("lab", arguments, {"OMP_NUM_THREADS=2"}, limit);
    const test::ProgramResult good = wait_for_program(fits);
    EXPECT_EQ(good.exit_code, kExitGood) << good.err;
    arguments = {"cache", "--out", folder.path / "b", "--contexts", "1048576", "--cache-dim", "4096"};
    arguments.insert(arguments.end(), one.begin(), one.end());
    test::RunningProgram large = test::start_program("lab", arguments, {"OMP_NUM_THREADS=2"}, limit);
    expect_error(wait_for_program(large), "lab", kExitFailed, {"no memory for keys of 4096 numbers at 1048576 lags"});
}

// The CSV and the JSON fit in this limit, the picture of four panels does not.
TEST(LabProgram, SaysThatAFileWasTooLarge) {
    TemporaryFolder folder;
    for (const int64_t limit : {1000, 20000}) {
        const auto limit_files = [limit] {
            const rlimit bytes = {static_cast<rlim_t>(limit), static_cast<rlim_t>(limit)};
            setrlimit(RLIMIT_FSIZE, &bytes);
        };
        test::RunningProgram program =
            test::start_program("lab",
                                {"stability", "--out", folder.path / std::to_string(limit), "--contexts", "64,96",
                                 "--variants", "lc,raw,log", "--train-len", "64"},
                                {}, limit_files);
        expect_error(wait_for_program(program), "lab", kExitFailed,
                     {limit == 1000 ? "stability.csv" : "stability.svg", "File too large"});
    }
}

TEST(LabProgram, SaysWhatIsWrong) {
    TemporaryFolder folder;
    const std::string out = folder.path / "out";
    struct Wrong {
        Texts arguments, parts;
    };
    const std::vector<Wrong> list = {
        {{"fixed", "--targets", "phase,nothing"}, {"--targets", "nothing", "recency_weak_jet"}},
        {{"fixed", "--targets", "phase,phase"}, {"--targets", "phase is there twice"}},
        {{"fixed", "--contexts", "64,064"}, {"--contexts", "64 is there twice"}},
        {{"fixed", "--cycles", "5,5.0"}, {"--cycles", "5 is there twice"}},
        {{"stability", "--cycles", "17,3,1.7e1"}, {"--cycles", "17 is there twice"}},
        {{"adaptive", "--seeds", "0,1,00"}, {"--seeds", "0 is there twice"}},
        {{"fixed", "--bases", "jordan_R16"}, {"--bases", "jordan_R16", "scaled_Rk_affine"}},
        {{"fixed", "--bases", "rope,"}, {"--bases"}},
        {{"fixed", "--train-len", "1"}, {"--train-len", "found 1", "from 2 to"}},
        {{"fixed", "--contexts", "1024,0"}, {"--contexts", "found 0"}},
        {{"fixed", "--cycles", "5,x"}, {"--cycles", "found x"}},
        {{"fixed", "--cycles", "nan"}, {"--cycles", "found nan"}},
        {{"fixed", "--damping", "-1"}, {"--damping", "found -1"}},
        {{"projection", "--targets", "third_jet"}, {"--targets", "third_jet", "affine"}},
        {{"adaptive", "--targets", "affine"}, {"--targets", "affine", "linear"}},
        {{"adaptive", "--seeds", "0,-1"}, {"--seeds", "found -1"}},
        {{"adaptive", "--restarts", "0"}, {"--restarts", "found 0"}},
        {{"adaptive", "--lr", "0"}, {"--lr", "found 0"}},
        {{"adaptive", "--max-order", "16"}, {"--max-order", "found 16", "to 15"}},
        {{"adaptive", "--solver", "newton"}, {"--solver newton", "adam or varpro"}},
        {{"adaptive", "--select", "both"}, {"--select both"}},
        {{"adaptive", "--start", "odd"}, {"--start odd"}},
        {{"adaptive", "--targets", ""}, {"--targets", "empty"}},
        {{"adaptive", "--seeds", ""}, {"--seeds", "empty"}},
        {{"fixed", "--bases", ""}, {"--bases", "empty"}},
        {{"fixed", "--contexts", ""}, {"--contexts", "empty"}},
        {{"adaptive", "--betas", "0.9"}, {"--betas", "found 0.9", "two"}},
        {{"adaptive", "--betas", "0.9,1"}, {"--betas", "found 1"}},
        {{"adaptive", "--gates", "0,1"}, {"--gates", "three"}},
        {{"adaptive", "--gates", "0,1,nan"}, {"--gates", "found nan"}},
        {{"adaptive", "--amplitude", "-1"}, {"--amplitude", "found -1"}},
        {{"adaptive", "--start", "even", "--favour", "1"}, {"--favour", "even"}},
        {{"adaptive", "--solver", "varpro", "--seeds", "1"}, {"--seeds", "Adam", "varpro"}},
        {{"adaptive", "--solver", "varpro", "--lr", "0.1"}, {"--lr", "Adam"}},
        {{"adaptive", "--solver", "varpro", "--restarts", "2"}, {"--restarts", "Adam"}},
        {{"adaptive", "--solver", "varpro", "--select", "eval"}, {"--select", "Adam"}},
        {{"adaptive", "--solver", "varpro", "--start", "even"}, {"--start", "Adam"}},
        {{"stability", "--variants", "lc,raws"}, {"--variants", "raws", "lc_wrong_scale"}},
        {{"stability", "--contexts", "3"}, {"--contexts", "found 3"}},
        {{"stability", "--contexts", "2097152"}, {"--contexts", "found 2097152"}},
        {{"cache", "--cache-dim", "0"}, {"--cache-dim", "found 0"}},
        {{"cache", "--seed", "1.5"}, {"--seed", "found 1.5"}},
        {{"retrieval", "--precisions", "int2"}, {"--precisions", "int2", "fp32"}},
        {{"retrieval", "--queries", "0"}, {"--queries", "found 0"}},
    };
    for (const Wrong& wrong : list) {
        Texts arguments = wrong.arguments;
        arguments.insert(arguments.end(), {"--out", out});
        expect_error(run_program("lab", arguments), "lab", kExitUsage, wrong.parts);
    }
    EXPECT_FALSE(fs::exists(out));
    expect_error(run_program("lab", {"fixed"}), "lab", kExitUsage, {"--out"});
    fs::create_directories(folder.path / "folders" / "lab.html");
    fs::create_directories(folder.path / "folders" / "fixed.csv");
    for (const char* name : {"all", "fixed"})
        expect_error(run_program("lab", {name, "--force", "--out", folder.path / "folders"}), "lab", kExitUsage,
                     {std::string(name) == "all" ? "lab.html" : "fixed.csv", "is a folder"});
    expect_error(run_program("lab", {}), "lab", kExitUsage, {"no subcommand", "retrieval"});
    expect_error(run_program("lab", {"nothing"}), "lab", kExitUsage, {"nothing"});
    write_file_atomically(folder.path / "file", "");
    expect_error(run_program("lab", {"fixed", "--out", folder.path / "file" / "out"}), "lab", kExitFailed,
                 {"cannot create folder", "file/out"});
}

}  // namespace
}  // namespace jetlag

#include "bridge/sweep.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include "kernels/ops.h"
#include "src/command_line.h"
#include "src/csv.h"
#include "src/error.h"
#include "src/files.h"
#include "src/gnuplot.h"
#include "src/interrupt.h"
#include "src/progress.h"
#include "src/text_table.h"
#include "train/run_folder.h"

namespace jetlag {

// A run's folder has what it printed.
static constexpr const char* kOutputFile = "output.txt";

// What a student is, but for its sector's name.
static std::string identity_of(BridgeConfig config) {
    if (config.model.sector == "grape_a_alibi") config.model.sector = "affine";
    return bridge_json(config);
}

std::vector<SweepRun> sweep_runs(const BridgeConfig& base) {
    SweepSettings sweep = base.sweep;
    if (sweep.targets.empty()) sweep.targets = {base.teacher.target};
    if (sweep.sectors.empty()) sweep.sectors = {base.model.sector};
    if (sweep.seeds.empty()) sweep.seeds = {base.train.seed};
    const bool has_lambdas = !sweep.lambdas.empty();
    if (!has_lambdas) sweep.lambdas = {""};
    std::vector<SweepRun> runs;
    std::map<std::string, std::string> known;
    for (const std::string& target : sweep.targets)
        for (const std::string& lambda : sweep.lambdas)
            for (const std::string& sector : sweep.sectors)
                for (const int64_t seed : sweep.seeds) {
                    SweepRun run;
                    run.config = base;
                    run.config.sweep = {};
                    run.config.teacher.target = target;
                    run.config.model.sector = sector;
                    run.config.train.seed = seed;
                    if (has_lambdas) run.config.teacher.attention_lambda = std::stod(lambda);
                    run.name =
                        fmt::format("{}{}-{}-seed{}", target, has_lambdas ? "-lambda" + lambda : "", sector, seed);
                    const auto [entry, is_new] = known.insert({identity_of(run.config), run.name});
                    if (!is_new) run.same_as = entry->second;
                    runs.push_back(run);
                }
    return runs;
}

// Whether the folder holds the evaluation of this very run, at every length.
static bool is_done(const std::filesystem::path& folder, const BridgeConfig& config) {
    const std::filesystem::path path = evaluation_path(folder);
    if (!std::filesystem::exists(path)) return false;
    const StudentReport report = parse_bridge_report(read_file(path), path.string());
    std::vector<int64_t> contexts;
    for (const BridgeEvaluation& e : report.evaluations) contexts.push_back(e.context);
    return contexts == config.eval.contexts && bridge_json(report.config) == bridge_json(config);
}

// In a process of its own; never returns. It outlives its parent, `sweep`, by no more than a save.
[[noreturn]] static void train_in_child(const SweepRun& run, const std::filesystem::path& folder, int threads,
                                        pid_t sweep) {
    int code = kExitFailed;
    try {
        prctl(PR_SET_PDEATHSIG, SIGHUP);
        if (getppid() != sweep) _exit(code);
        const std::string output = (folder / kOutputFile).string();
        if (std::freopen(output.c_str(), "a", stdout) == nullptr || dup2(STDOUT_FILENO, STDERR_FILENO) < 0) _exit(code);
        set_thread_count(threads);
        code = run_main("train_bridge", [&] {
            train_student(run.config, folder, true);
            return kExitGood;
        });
    } catch (const std::exception&) {
    }
    std::fflush(stdout);
    _exit(code);
}

static std::string last_line(const std::filesystem::path& file) {
    if (!std::filesystem::exists(file)) return "no output";
    std::string line, last = "no output";
    std::istringstream lines(read_file(file));
    while (std::getline(lines, line))
        if (!line.empty()) last = line;
    return last;
}

// Why a run ended as waitpid says.
static std::string end_of_run(int status, const std::filesystem::path& folder) {
    if (WIFSIGNALED(status)) return fmt::format("was killed by a signal: {}", strsignal(WTERMSIG(status)));
    return last_line(folder / kOutputFile);
}

std::vector<StudentReport> run_sweep(const std::vector<SweepRun>& runs, const std::filesystem::path& folder, int jobs) {
    make_folder(folder);
    // The runs hold it too, so that a sweep that is killed cannot start again before they have saved themselves.
    const FolderLock lock = lock_folder(folder, false);
    const int threads = std::max(1, thread_count() / jobs);
    std::vector<const SweepRun*> left;
    for (const SweepRun& run : runs)
        if (run.same_as.empty() && !is_done(folder / run.name, run.config)) left.push_back(&run);
    const size_t total = left.size();
    fmt::print("{} runs, {} to train, {} at a time on {} threads each\n", runs.size(), total, jobs, threads);
    std::fflush(stdout);
    catch_signals();
    const pid_t sweep = getpid();
    std::map<pid_t, const SweepRun*> running;
    std::string failure;
    const auto start = std::chrono::steady_clock::now();
    size_t started = 0, ended = 0;
    bool told_to_stop = false;
    Progress progress = make_progress();
    while (!running.empty() || (started < total && failure.empty() && caught_signal == 0)) {
        while (started < total && failure.empty() && caught_signal == 0 && running.size() < static_cast<size_t>(jobs)) {
            const SweepRun* run = left[started++];
            try {
                make_folder(folder / run->name);
            } catch (const Error& e) {
                failure = e.what();
                break;
            }
            const pid_t child = fork();
            if (child < 0) fail("cannot start a process for {}: {}", run->name, std::strerror(errno));
            if (child == 0) train_in_child(*run, folder / run->name, threads, sweep);
            running[child] = run;
        }
        int status = 0;
        const pid_t child = waitpid(-1, &status, WNOHANG);
        if (child <= 0) {
            // A signal to this process alone asks the runs to save, too. It is another one than came: where all have
            // got that, its second would end them at once.
            if (caught_signal != 0 && !std::exchange(told_to_stop, true))
                for (const auto& [pid, run] : running) kill(pid, caught_signal == SIGTERM ? SIGINT : SIGTERM);
            usleep(20000);
            continue;
        }
        const auto found = running.find(child);
        if (found == running.end()) continue;
        const SweepRun* run = found->second;
        running.erase(found);
        ended++;
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (status != 0 && failure.empty())
            failure = fmt::format("{}: {}", run->name, end_of_run(status, folder / run->name));
        const std::string time_left =
            duration_text(seconds / static_cast<double>(ended) * static_cast<double>(total - ended));
        clear_progress(progress);
        if (status == 0) fmt::print("{}/{} {}  left {}\n", ended, total, run->name, time_left);
        std::fflush(stdout);
        draw_progress(progress, "sweep", static_cast<double>(ended) / static_cast<double>(total), "left " + time_left);
    }
    clear_progress(progress);
    if (caught_signal != 0)
        fail("interrupted by {}; what was trained is in {}; the same command goes on", strsignal(caught_signal),
             folder.string());
    if (!failure.empty()) fail("{}", failure);

    std::vector<StudentReport> reports;
    for (const SweepRun& run : runs) {
        const std::filesystem::path path = evaluation_path(folder / (run.same_as.empty() ? run.name : run.same_as));
        reports.push_back(parse_bridge_report(read_file(path), path.string()));
        reports.back().name = run.name;
        reports.back().config.model.sector = run.config.model.sector;
    }
    return reports;
}

// ---------------------------------------------------------------------------------------------------------------

struct Spread {
    double mean, deviation;
};
static Spread spread_of(const std::vector<double>& values) {
    const double n = static_cast<double>(values.size());
    double mean = 0, squares = 0;
    for (const double value : values) mean += value / n;
    for (const double value : values) squares += (value - mean) * (value - mean);
    return {mean, values.size() < 2 ? 0 : std::sqrt(squares / (n - 1))};
}

std::vector<SweepCell> sweep_cells(const std::vector<StudentReport>& reports) {
    std::vector<SweepCell> cells;
    std::vector<std::vector<const BridgeEvaluation*>> members;
    for (const StudentReport& report : reports)
        for (const BridgeEvaluation& e : report.evaluations) {
            const BridgeConfig& c = report.config;
            size_t i = 0;
            while (i < cells.size() &&
                   !(cells[i].target == c.teacher.target && cells[i].sector == c.model.sector &&
                     cells[i].lambda == c.teacher.attention_lambda && cells[i].context == e.context))
                i++;
            if (i == cells.size()) {
                SweepCell cell;
                cell.target = c.teacher.target;
                cell.sector = c.model.sector;
                cell.lambda = c.teacher.attention_lambda;
                cell.context = e.context;
                cell.teacher_support = teacher_stats(c.teacher, c.train.context, e.context).effective_support;
                cells.push_back(cell);
                members.emplace_back();
            }
            members[i].push_back(&e);
        }
    for (size_t i = 0; i < cells.size(); i++) {
        const auto spread = [&](double BridgeEvaluation::*value) {
            std::vector<double> values;
            for (const BridgeEvaluation* e : members[i]) values.push_back(e->*value);
            return spread_of(values);
        };
        SweepCell& cell = cells[i];
        cell.seeds = std::ssize(members[i]);
        const Spread accuracy = spread(&BridgeEvaluation::accuracy), loss = spread(&BridgeEvaluation::loss),
                     support = spread(&BridgeEvaluation::attention_effective_support);
        cell.accuracy = accuracy.mean;
        cell.accuracy_deviation = accuracy.deviation;
        cell.loss = loss.mean;
        cell.loss_deviation = loss.deviation;
        cell.support = support.mean;
        cell.support_deviation = support.deviation;
    }
    return cells;
}

std::vector<PublishedAccuracy> read_published(const std::filesystem::path& file) {
    check_input_path("--published", file, kExitUsage);
    const CsvTable table = read_csv(read_file(file), file.string());
    const size_t target = csv_column(table, "target"), sector = csv_column(table, "sector"),
                 context = csv_column(table, "eval_len"), accuracy = csv_column(table, "accuracy");
    std::vector<PublishedAccuracy> list;
    std::vector<std::string> keys;
    for (size_t i = 0; i < table.rows.size(); i++) {
        const std::vector<std::string>& row = table.rows[i];
        const std::string where = fmt::format("{}: row {}", file.string(), i + 2);
        find_target(where + ": target", bridge_targets(), row[target]);
        if (std::find(std::begin(kBridgeSectors), std::end(kBridgeSectors), row[sector]) == std::end(kBridgeSectors))
            fail_usage("{}: sector: there is no {}, wanted one of {}", where, row[sector],
                       fmt::join(kBridgeSectors, ", "));
        PublishedAccuracy value;
        value.target = row[target];
        value.sector = row[sector];
        value.context = parse_whole(where + ": eval_len", row[context], 3, int64_t{1} << 40);
        value.accuracy = parse_real(
            where + ": accuracy", row[accuracy], [](double x) { return x >= 0 && x <= 1; }, "a number from 0 to 1");
        list.push_back(value);
        keys.push_back(fmt::format("{},{},{}", value.target, value.sector, value.context));
    }
    if (list.empty()) fail_usage("{}: has no row, wanted accuracies", file.string());
    check_once(file.string(), keys);
    return list;
}

static const PublishedAccuracy* published_of(const std::vector<PublishedAccuracy>& published, const SweepCell& cell) {
    for (const PublishedAccuracy& value : published)
        if (value.target == cell.target && value.sector == cell.sector && value.context == cell.context) return &value;
    return nullptr;
}

// Different values of a cell's field, in the order of the cells.
template <typename Value>
static std::vector<Value> distinct(const std::vector<SweepCell>& cells, Value SweepCell::*field) {
    std::vector<Value> values;
    for (const SweepCell& cell : cells)
        if (std::find(values.begin(), values.end(), cell.*field) == values.end()) values.push_back(cell.*field);
    return values;
}

// A column or panel: a target, and its lambda where there are several.
struct SweepColumn {
    std::string target, title;
    double lambda;
};
static std::vector<SweepColumn> columns_of(const std::vector<SweepCell>& cells) {
    const std::vector<double> lambdas = distinct(cells, &SweepCell::lambda);
    std::vector<SweepColumn> columns;
    for (const std::string& target : distinct(cells, &SweepCell::target))
        for (const double lambda : lambdas)
            columns.push_back(
                {target, lambdas.size() > 1 ? fmt::format("{} lambda {}", target, lambda) : target, lambda});
    return columns;
}

static const SweepCell* cell_at(const std::vector<SweepCell>& cells, const SweepColumn& column,
                                const std::string& sector, int64_t context) {
    for (const SweepCell& cell : cells)
        if (cell.target == column.target && cell.lambda == column.lambda && cell.sector == sector &&
            cell.context == context)
            return &cell;
    return nullptr;
}

std::string sweep_table(const std::vector<SweepCell>& cells, const std::vector<PublishedAccuracy>& published) {
    std::string text;
    const std::vector<SweepColumn> columns = columns_of(cells);
    const std::vector<double> lambdas = distinct(cells, &SweepCell::lambda);
    for (const int64_t context : distinct(cells, &SweepCell::context)) {
        text +=
            fmt::format("{}accuracy at length {}, mean and deviation over seeds\n", text.empty() ? "" : "\n", context);
        std::vector<std::vector<std::string>> rows = {{"sector"}};
        for (const SweepColumn& column : columns) {
            rows[0].push_back(column.title);
            if (!published.empty()) rows[0].insert(rows[0].end(), {"published", "difference"});
            if (lambdas.size() > 1) rows[0].insert(rows[0].end(), {"support", "teacher's"});
        }
        for (const std::string& sector : distinct(cells, &SweepCell::sector)) {
            std::vector<std::string> row = {sector};
            for (const SweepColumn& column : columns) {
                const SweepCell* cell = cell_at(cells, column, sector, context);
                row.push_back(
                    cell == nullptr ? "-" : fmt::format("{:.3f} +- {:.3f}", cell->accuracy, cell->accuracy_deviation));
                if (!published.empty()) {
                    const PublishedAccuracy* value = cell != nullptr ? published_of(published, *cell) : nullptr;
                    row.push_back(value == nullptr ? "-" : fmt::format("{:.3f}", value->accuracy));
                    row.push_back(value == nullptr ? "-" : fmt::format("{:+.3f}", cell->accuracy - value->accuracy));
                }
                if (lambdas.size() > 1) {
                    row.push_back(cell == nullptr ? "-" : fmt::format("{:.1f}", cell->support));
                    row.push_back(cell == nullptr ? "-" : fmt::format("{:.1f}", cell->teacher_support));
                }
            }
            rows.push_back(row);
        }
        text += aligned_table(rows, 1);
    }
    return text;
}

std::string sweep_csv(const std::vector<SweepCell>& cells, const std::vector<PublishedAccuracy>& published) {
    std::string text =
        "target,attention_lambda,sector,eval_len,seeds,accuracy_mean,accuracy_sd,loss_mean,loss_sd,"
        "attention_effective_support_mean,attention_effective_support_sd,teacher_effective_support_at_eval_len,"
        "published_accuracy,"
        "difference\n";
    for (const SweepCell& cell : cells) {
        const PublishedAccuracy* value = published_of(published, cell);
        text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", cell.target, cell.lambda, cell.sector,
                            cell.context, cell.seeds, cell.accuracy, cell.accuracy_deviation, cell.loss,
                            cell.loss_deviation, cell.support, cell.support_deviation, cell.teacher_support,
                            value != nullptr ? fmt::format("{}", value->accuracy) : "",
                            value != nullptr ? fmt::format("{}", cell.accuracy - value->accuracy) : "");
    }
    return text;
}

void draw_sweep(const std::filesystem::path& svg, const std::vector<SweepCell>& cells) {
    const std::vector<SweepColumn> columns = columns_of(cells);
    const std::vector<std::string> sectors = distinct(cells, &SweepCell::sector);
    const std::vector<int64_t> contexts = distinct(cells, &SweepCell::context);
    const bool has_lambdas = distinct(cells, &SweepCell::lambda).size() > 1;
    const char* const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00",
                                   "#56b4e9", "#000000", "#999999", "#8b4513"};
    struct Panel {
        std::string title, x_label, y_label;
        std::vector<std::string> lines;
        bool is_accuracy;     // y
        bool against_length;  // x
    };
    std::vector<Panel> panels;
    std::string blocks;
    const auto add_line = [&](Panel& panel, const std::string& points, const std::string& name, size_t colour,
                              const std::string& style) {
        if (points.empty()) return;
        const std::string block = fmt::format("$data{}", std::count(blocks.begin(), blocks.end(), '$'));
        blocks += fmt::format("{} << EOD\n{}EOD\n", block, points);
        panel.lines.push_back(fmt::format("{} using 1:2:3 with yerrorlines {} lc rgb '{}' title {}", block, style,
                                          colours[colour % std::size(colours)], plot_text(name)));
    };
    for (const SweepColumn& column : columns) {
        if (has_lambdas) break;
        Panel panel{column.title, "length (tokens)", "accuracy", {}, true, true};
        for (size_t s = 0; s < sectors.size(); s++) {
            std::string points;
            for (const int64_t context : contexts)
                if (const SweepCell* cell = cell_at(cells, column, sectors[s], context))
                    points += fmt::format("{} {} {}\n", context, cell->accuracy, cell->accuracy_deviation);
            add_line(panel, points, sectors[s], s, "lw 1.5 pt 7 ps 0.5");
        }
        panels.push_back(panel);
    }
    for (const std::string& target : distinct(cells, &SweepCell::target)) {
        if (!has_lambdas) break;
        for (const int64_t context : contexts) {
            Panel panel{
                fmt::format("{} at {}", target, context), "support of the teacher (keys)", "accuracy", {}, true, false};
            for (size_t s = 0; s < sectors.size(); s++) {
                std::string points;
                for (const SweepCell& cell : cells)
                    if (cell.target == target && cell.sector == sectors[s] && cell.context == context)
                        points +=
                            fmt::format("{} {} {}\n", cell.teacher_support, cell.accuracy, cell.accuracy_deviation);
                add_line(panel, points, sectors[s], s, "lw 1.5 pt 7 ps 0.5");
            }
            panels.push_back(panel);
        }
        Panel panel{fmt::format("{} at {}: support", target, contexts[0]), "lambda", "keys", {}, false, false};
        std::string teacher;
        for (size_t s = 0; s < sectors.size(); s++) {
            std::string points;
            for (const SweepCell& cell : cells)
                if (cell.target == target && cell.sector == sectors[s] && cell.context == contexts[0]) {
                    points += fmt::format("{} {} {}\n", cell.lambda, cell.support, cell.support_deviation);
                    if (s == 0) teacher += fmt::format("{} {} 0\n", cell.lambda, cell.teacher_support);
                }
            add_line(panel, points, sectors[s], s, "lw 1.5 pt 7 ps 0.5");
        }
        add_line(panel, teacher, "teacher", 6, "dt 2 lw 1.5 pt 6 ps 0.5");
        panels.push_back(panel);
    }
    const size_t across = std::min<size_t>(3, panels.size()), down = (panels.size() + across - 1) / across;
    std::string script = fmt::format(
        "set terminal svg size {},{} dynamic background rgb 'white' font 'sans-serif,12'\n{}"
        "set multiplot layout {},{}\nset grid lc rgb '#dddddd'\nset key below maxrows 4 samplen 2 font ',10' "
        "noenhanced\n",
        60 + 380 * across, 60 + 360 * down, blocks, down, across);
    for (const Panel& panel : panels) {
        script += fmt::format("set title {} noenhanced\nset xlabel {}\nset ylabel {}\n", plot_text(panel.title),
                              plot_text(panel.x_label), plot_text(panel.y_label));
        script += panel.is_accuracy ? "set yrange [0:1.02]\n" : "set yrange [0:*]\n";
        if (panel.against_length) {
            script += "set logscale x 2\nset xtics (";
            for (size_t i = 0; i < contexts.size(); i++)
                script += fmt::format("{}'{}' {}", i > 0 ? ", " : "", contexts[i], contexts[i]);
            script += ")\n";
        }
        std::string plots;
        for (const std::string& line : panel.lines) plots += (plots.empty() ? "" : ", ") + line;
        script += "plot " + plots + "\n";
    }
    draw_svg(svg, script + "unset multiplot\n");
}

}  // namespace jetlag

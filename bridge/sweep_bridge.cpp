// sweep_bridge: trains students for several targets, lambdas, sectors and seeds, and writes one table and one figure.
#include <algorithm>

#include "bridge/sweep.h"
#include "kernels/ops.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/gnuplot.h"

namespace jetlag {
namespace {

int run(int argc, char** argv) {
    CLI::App app{
        "Trains students for several targets, lambdas, sectors and seeds, and writes one table and one figure."};
    BridgeConfig defaults;
    std::string config_file, out, jobs, published_file;
    std::vector<std::string> overrides;
    app.add_option("CONFIG", config_file, "YAML file")->required();
    app.add_option("--set", overrides,
                   "KEY=VALUE over the file's value; repeatable. A VALUE {...} replaces the whole section KEY")
        ->allow_extra_args(false);
    app.add_option("--out", out, "folder of the runs, table.csv, runs.csv and figure.svg; runs that it has are kept")
        ->required();
    app.add_option("--jobs", jobs, "runs at a time (default: on a CPU as many as threads; on a GPU 1)");
    app.add_option("--published", published_file,
                   "CSV file of accuracies to compare with: target,sector,eval_len,accuracy");
    app.footer("Keys:\n" + help_text(bridge_keys(defaults, true)));
    if (!parse_command_line(app, argc, argv)) return kExitGood;
    std::vector<Setting> settings = read_settings(config_file);
    add_overrides(settings, overrides);
    const BridgeConfig config = make_bridge_config(settings, true);
    const bool on_host = std::string(backend_name()) != "cuda";
    const int at_a_time =
        jobs.empty() ? (on_host ? thread_count() : 1) : static_cast<int>(parse_whole("--jobs", jobs, 1, 1024));
    const std::vector<PublishedAccuracy> published =
        published_file.empty() ? std::vector<PublishedAccuracy>() : read_published(published_file);
    if (!published.empty() && config.sweep.lambdas.size() > 1)
        fail_usage("--published {}: does not say of which lambda its accuracies are", published_file);
    const std::filesystem::path folder = out, figure = folder / "figure.svg";
    if (std::filesystem::exists(folder) && !std::filesystem::is_directory(folder))
        fail_usage("--out {}: is no folder", out);
    check_gnuplot(figure);

    const std::vector<StudentReport> reports = run_sweep(sweep_runs(config), folder, at_a_time);
    const std::vector<SweepCell> cells = sweep_cells(reports);
    write_file_atomically(folder / "runs.csv", bridge_csv(reports));
    write_file_atomically(folder / "table.csv", sweep_csv(cells, published));
    draw_sweep(figure, cells);
    fmt::print("{}", sweep_table(cells, published));
    fmt::print("table:  {}\nfigure: {}\n", (folder / "table.csv").string(), figure.string());
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("sweep_bridge", [&] { return jetlag::run(argc, argv); });
}

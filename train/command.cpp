#include "train/command.h"

#include <filesystem>

#include "src/command_line.h"
#include "src/error.h"
#include "train/run_folder.h"

namespace jetlag {

bool read_training_command(TrainingCommand& command, const std::string& about, const std::vector<Key>& keys, int argc,
                           char** argv) {
    CLI::App app{about};
    std::vector<std::string> overrides;
    app.add_option("CONFIG", command.config_file, "YAML file; with --resume the run folder's own if not given");
    app.add_option("--set", overrides,
                   "KEY=VALUE over the file's value; repeatable. A VALUE {...} replaces the whole section KEY")
        ->allow_extra_args(false);
    app.add_option("--out", command.out, "run folder (default: runs/NAME-WHAT, NAME from the name of CONFIG)");
    app.add_flag("--resume", command.resume, "continue the run in the run folder as if it had never stopped");
    app.footer("Keys:\n" + help_text(keys));
    if (!parse_command_line(app, argc, argv)) return false;

    if (command.config_file.empty()) {
        if (!command.resume || command.out.empty())
            fail_usage("no CONFIG given (wanted a YAML file, or --resume with --out; see --help)");
        if (!std::filesystem::exists(config_path(command.out)))
            fail_usage("{}: nothing to resume: no config.yaml there", command.out);
        command.config_file = config_path(command.out);
    }
    command.settings = read_settings(command.config_file);
    add_overrides(command.settings, overrides);
    return true;
}

std::string checked_run_folder(const TrainingCommand& command, const std::string& what) {
    std::string out = command.out;
    if (out.empty())
        out = std::filesystem::path("runs") /
              fmt::format("{}-{}", std::filesystem::path(command.config_file).stem().string(), what);
    if (command.resume && !holds_a_run(out) && !std::filesystem::exists(config_path(out)))
        fail_usage("{}: nothing to resume: no run there", out);
    if (!command.resume && holds_a_run(out))
        fail_usage("{}: holds a run already; continue it with --resume, or give another folder with --out", out);
    return out;
}

}  // namespace jetlag

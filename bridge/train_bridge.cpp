// train_bridge: trains a small Transformer to answer a teacher's queries (docs/bridge.md).
#include "bridge/training.h"
#include "src/error.h"
#include "train/command.h"

namespace jetlag {
namespace {

int run(int argc, char** argv) {
    BridgeConfig defaults;
    TrainingCommand command;
    if (!read_training_command(command, "Trains a small Transformer to answer a teacher's queries.",
                               bridge_keys(defaults, true), argc, argv))
        return kExitGood;
    const BridgeConfig config = make_bridge_config(command.settings, true);
    const std::string folder = checked_run_folder(command, config.teacher.target + "-" + config.model.sector);
    // A sweep's file serves here too.
    if (has_sweep(config))
        fmt::print("note: this is one run, of the sections teacher and model; {}'s sweep is sweep_bridge's\n",
                   command.config_file);
    train_student(config, folder, command.resume);
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("train_bridge", [&] { return jetlag::run(argc, argv); });
}

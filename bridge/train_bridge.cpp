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
    // A sweep's file serves here too: the section `sweep` says nothing of a single run.
    const BridgeConfig config = make_bridge_config(command.settings, true);
    train_student(config, checked_run_folder(command, config.teacher.target + "-" + config.model.sector),
                  command.resume);
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("train_bridge", [&] { return jetlag::run(argc, argv); });
}

// The command line that training programs have in common: CONFIG, --set, --out, --resume.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/config.h"

namespace jetlag {

struct TrainingCommand {
    std::string config_file, out;
    std::vector<Setting> settings;  // of the file, with the overrides on top
    bool resume = false;
};

// Reads the command line and the configuration file; false if --help was asked for and has been printed. `about` is one
// sentence; `keys` are shown by --help. Errors (exit code 2): no CONFIG, nothing to resume.
bool read_training_command(TrainingCommand& command, const std::string& about, const std::vector<Key>& keys, int argc,
                           char** argv);

// The run folder: --out, or runs/NAME-WHAT with NAME from the name of CONFIG. Errors (exit code 2): it holds a run and
// --resume was not given, or the other way round.
std::string checked_run_folder(const TrainingCommand& command, const std::string& what);

}  // namespace jetlag

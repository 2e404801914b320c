// Command lines, through CLI11.
#pragma once

#include <CLI/CLI.hpp>

namespace jetlag {

// Parses into the variables that `app` is bound to. True if the program should go on; false if --help was asked for
// and has been printed. Errors (exit code 2): what CLI11 says of the command line.
bool parse_command_line(CLI::App& app, int argc, char** argv);

}  // namespace jetlag

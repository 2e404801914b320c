// Command lines, through CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace jetlag {

// Parses into the variables that `app` is bound to. True if the program should go on; false if --help was asked for
// and has been printed. Errors (exit code 2): what CLI11 says of the command line.
bool parse_command_line(CLI::App& app, int argc, char** argv);

// The number that an option's text holds. Errors (exit code 2) name the option, what was found and what was wanted:
// CLI11 itself reads 010 as eight and takes the largest number for one that is too large.
int64_t parse_whole(const std::string& option, const std::string& text, int64_t min, int64_t max);

// `wanted` says in words what `is_good` asks for.
double parse_real(const std::string& option, const std::string& text, bool (*is_good)(double), const char* wanted);

}  // namespace jetlag

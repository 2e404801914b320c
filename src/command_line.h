// Command lines, through CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "src/error.h"

namespace jetlag {

// Parses into the variables that `app` is bound to. True if the program should go on; false if --help was asked for
// and has been printed. Errors (exit code 2): what CLI11 says of the command line.
bool parse_command_line(CLI::App& app, int argc, char** argv);

// The number that an option's text holds. Errors (exit code 2) name the option, what was found and what was wanted:
// CLI11 itself reads 010 as eight and takes the largest number for one that is too large.
int64_t parse_whole(const std::string& option, const std::string& text, int64_t min, int64_t max);

// `wanted` says in words what `is_good` asks for.
double parse_real(const std::string& option, const std::string& text, bool (*is_good)(double), const char* wanted);

// What stands between commas.
std::vector<std::string> split_list(const std::string& text);

// Twice the same would give a table two rows with one key. The entries are compared as what they mean: 5.0 is 5.
// Errors (exit code 2) name `what`, an option or a key, and the entry.
template <typename Entry>
void check_once(const std::string& what, std::vector<Entry> entries) {
    std::sort(entries.begin(), entries.end());
    const auto twice = std::adjacent_find(entries.begin(), entries.end());
    if (twice != entries.end()) fail_usage("{}: {} is there twice", what, *twice);
}

}  // namespace jetlag

// Errors that a user sees: one line that says what was found, what was wanted, and which file or key.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

namespace jetlag {

// Exit codes of every program.
inline constexpr int kExitGood = 0;
inline constexpr int kExitFailed = 1;  // failed while running
inline constexpr int kExitUsage = 2;   // bad usage or configuration

struct Error : std::runtime_error {
    int exit_code;
    Error(int code, const std::string& message) : std::runtime_error(message), exit_code(code) {}
};

// Throws an Error with exit code 1 (something failed while running: a file, the disk, a NaN).
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
    throw Error(kExitFailed, fmt::format(format, std::forward<Args>(args)...));
}

// Throws an Error with exit code 2 (bad usage or configuration: nothing was started).
template <typename... Args>
[[noreturn]] void fail_usage(fmt::format_string<Args...> format, Args&&... args) {
    throw Error(kExitUsage, fmt::format(format, std::forward<Args>(args)...));
}

// Prints to stderr as fmt::print does. What cannot be written there is lost, which is no reason to fail.
template <typename... Args>
void print_note(fmt::format_string<Args...> format, Args&&... args) {
    const std::string text = fmt::format(format, std::forward<Args>(args)...);
    std::fwrite(text.data(), 1, text.size(), stderr);
}

// The text with blanks for line breaks and other control characters, so that it stays one line on a terminal.
std::string one_line(std::string text);

// Runs the body of main and returns the exit code. An exception becomes the one line
// "PROGRAM: error: MESSAGE" on stderr (one_line()). SIGINT and SIGTERM, unless the
// body handles them, end the program with such a line and exit code 1. A file that reaches the limit on its size is an
// error of the write.
int run_main(const char* program, const std::function<int()>& body);

}  // namespace jetlag

// Errors that a user sees: one line that says what was found, what was wanted, and which file or key.
#pragma once

#include <fmt/format.h>

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

// Runs the body of main and returns the exit code. An exception becomes the one line
// "PROGRAM: error: MESSAGE" on stderr; line breaks inside the message become spaces. SIGINT and SIGTERM, unless the
// body handles them, end the program with such a line and exit code 1.
int run_main(const char* program, const std::function<int()>& body);

}  // namespace jetlag

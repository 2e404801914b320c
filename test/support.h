// Helpers of the tests: the shared reference data, running a program, temporary folders.
#pragma once

#include <gtest/gtest.h>

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace jetlag::test {

// The folder of reference numbers and corpora: $JETLAG_SHARED, or ../shared beside the repository. Tests call
// NEEDS_SHARED() first: without the folder the test is skipped and says so, and under CI it fails.
std::filesystem::path shared_folder();
bool have_shared();

#define NEEDS_SHARED()                                                                                  \
    do {                                                                                                \
        if (!::jetlag::test::have_shared()) {                                                           \
            if (std::getenv("CI") != nullptr) FAIL() << "no shared reference data, which CI must have"; \
            GTEST_SKIP() << "no shared reference data: set JETLAG_SHARED, or place it at ../shared";    \
        }                                                                                               \
    } while (false)

// A fresh folder under the system's temporary folder, removed with its contents at the end of the scope.
struct TemporaryFolder {
    std::filesystem::path path;
    TemporaryFolder();
    ~TemporaryFolder();
    TemporaryFolder(const TemporaryFolder&) = delete;
};

// The program NAME of the build under test ($JETLAG_BUILD, default build/cpu), run to its end. `environment` holds
// "NAME=VALUE"s that are added. A program ended by signal s has exit code 128 + s.
struct ProgramResult {
    int exit_code;
    std::string out;
    std::string err;
    double cpu_seconds;  // of all its threads
};
std::filesystem::path program_path(const std::string& name);
ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& environment = {});

// The same in two steps, for what happens to a program while it runs (kill(program.pid, SIGTERM)). `prepare` is called
// in the child before the program starts: resource limits, ignored signals, another stderr. A program that nobody
// waited for is killed at the end of the scope.
struct RunningProgram {
    pid_t pid = -1;
    std::unique_ptr<TemporaryFolder> folder;  // what it writes to stdout and stderr
    RunningProgram() = default;
    RunningProgram(RunningProgram&& other) noexcept;
    RunningProgram& operator=(RunningProgram&& other) = delete;
    ~RunningProgram();
};
RunningProgram start_program(const std::string& name, const std::vector<std::string>& arguments,
                             const std::vector<std::string>& environment = {},
                             const std::function<void()>& prepare = {});
bool is_running(RunningProgram& program);
ProgramResult wait_for_program(RunningProgram& program);

// The largest resident memory of the program so far, in bytes; 0 if it has ended.
int64_t peak_resident_bytes(const RunningProgram& program);

// Expects a program that failed with this exit code and wrote to stderr the one line "NAME: error: ..." which holds
// every one of `parts`. With exit code 1 lines of progress ("evaluating ...") may stand before it.
void expect_error(const ProgramResult& result, const std::string& name, int exit_code,
                  const std::vector<std::string>& parts);

// A zip archive of files, as name and contents; names in UTF-8.
std::string zip_of(const std::vector<std::pair<std::string, std::string>>& files);

// Whether the kernels run in the emulator, where a product of large sizes takes hours.
bool is_emulated();

// Whether the build is optimised, without a sanitizer and not the emulator, so that speed and memory can be judged.
bool is_fast_build();

// The lines of a text, without their line breaks; what follows the last line break counts if it is not empty.
std::vector<std::string> lines_of(const std::string& text);

}  // namespace jetlag::test

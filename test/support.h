// Helpers of the tests: the shared reference data, running a program, temporary folders.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
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
};
std::filesystem::path program_path(const std::string& name);
ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& environment = {});

}  // namespace jetlag::test

#include "test/support.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "src/files.h"

namespace jetlag::test {

std::filesystem::path shared_folder() {
    const char* from_environment = std::getenv("JETLAG_SHARED");
    return from_environment != nullptr ? from_environment : "../shared";
}

bool have_shared() {
    return std::filesystem::exists(shared_folder() / "golden" / "torch_rng.json");
}

TemporaryFolder::TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "jetlag-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed for " + name);
    path = name;
}

TemporaryFolder::~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

std::filesystem::path program_path(const std::string& name) {
    const char* build = std::getenv("JETLAG_BUILD");
    return std::filesystem::path(build != nullptr ? build : "build/cpu") / name;
}

ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& environment) {
    TemporaryFolder folder;
    const std::string out = folder.path / "out", err = folder.path / "err";
    const std::string program = program_path(name);
    const pid_t child = fork();
    if (child == 0) {
        const int in_fd = open("/dev/null", O_RDONLY);
        const int out_fd = open(out.c_str(), O_WRONLY | O_CREAT, 0600);
        const int err_fd = open(err.c_str(), O_WRONLY | O_CREAT, 0600);
        dup2(in_fd, 0);
        dup2(out_fd, 1);
        dup2(err_fd, 2);
        for (const std::string& variable : environment) putenv(strdup(variable.c_str()));
        std::vector<char*> argv = {strdup(program.c_str())};
        for (const std::string& argument : arguments) argv.push_back(strdup(argument.c_str()));
        argv.push_back(nullptr);
        execv(program.c_str(), argv.data());
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return {code, read_file(out), read_file(err)};
}

}  // namespace jetlag::test

#include "test/support.h"

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "kernels/ops.h"
#include "src/error.h"
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

RunningProgram::RunningProgram(RunningProgram&& other) noexcept
    : pid(std::exchange(other.pid, -1)), folder(std::move(other.folder)) {}

RunningProgram::~RunningProgram() {
    if (pid < 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
}

RunningProgram start_program(const std::string& name, const std::vector<std::string>& arguments,
                             const std::vector<std::string>& environment, const std::function<void()>& prepare) {
    RunningProgram running;
    running.folder = std::make_unique<TemporaryFolder>();
    const std::string out = running.folder->path / "out", err = running.folder->path / "err";
    const std::string program = program_path(name);
    running.pid = fork();
    if (running.pid < 0) throw std::runtime_error("fork failed");
    if (running.pid == 0) {
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
        if (prepare) prepare();
        execv(program.c_str(), argv.data());
        _exit(127);
    }
    return running;
}

bool is_running(RunningProgram& program) {
    siginfo_t info = {};
    return waitid(P_PID, static_cast<id_t>(program.pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

ProgramResult wait_for_program(RunningProgram& program) {
    int status = 0;
    rusage usage = {};
    wait4(program.pid, &status, 0, &usage);
    program.pid = -1;
    const auto seconds = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    const auto text = [&](const char* name) {
        const std::filesystem::path file = program.folder->path / name;
        return std::filesystem::exists(file) ? read_file(file) : "";
    };
    return {code, text("out"), text("err"), seconds(usage.ru_utime) + seconds(usage.ru_stime)};
}

ProgramResult run_program(const std::string& name, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& environment) {
    RunningProgram program = start_program(name, arguments, environment);
    return wait_for_program(program);
}

int64_t peak_resident_bytes(const RunningProgram& program) {
    std::ifstream status("/proc/" + std::to_string(program.pid) + "/status");
    for (std::string line; std::getline(status, line);)
        if (line.starts_with("VmHWM:")) return std::atoll(line.c_str() + 6) * 1024;
    return 0;
}

void expect_error(const ProgramResult& result, const std::string& name, int exit_code,
                  const std::vector<std::string>& parts) {
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_TRUE(result.err.ends_with('\n')) << result.err;
    std::vector<std::string> lines = lines_of(result.err);
    if (exit_code == kExitFailed)
        std::erase_if(lines, [](const std::string& line) { return line.starts_with("evaluating "); });
    ASSERT_EQ(lines.size(), 1u) << result.err;
    EXPECT_TRUE(lines[0].starts_with(name + ": error: ")) << lines[0];
    for (const std::string& part : parts)
        EXPECT_NE(lines[0].find(part), std::string::npos) << lines[0] << "\nhas no: " << part;
}

std::string zip_of(const std::vector<std::pair<std::string, std::string>>& files) {
    std::string zip(1 << 20, '\0');
    size_t used = 0;
    struct archive* writer = archive_write_new();
    EXPECT_EQ(archive_write_set_format_zip(writer), ARCHIVE_OK);
    EXPECT_EQ(archive_write_set_options(writer, "hdrcharset=UTF-8"), ARCHIVE_OK);
    EXPECT_EQ(archive_write_open_memory(writer, zip.data(), zip.size(), &used), ARCHIVE_OK);
    for (const auto& [name, content] : files) {
        struct archive_entry* entry = archive_entry_new();
        archive_entry_set_pathname_utf8(entry, name.c_str());
        archive_entry_set_size(entry, static_cast<la_int64_t>(content.size()));
        archive_entry_set_filetype(entry, AE_IFREG);
        archive_entry_set_perm(entry, 0644);
        EXPECT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
        EXPECT_EQ(archive_write_data(writer, content.data(), content.size()), static_cast<la_ssize_t>(content.size()));
        archive_entry_free(entry);
    }
    EXPECT_EQ(archive_write_close(writer), ARCHIVE_OK);
    archive_write_free(writer);
    zip.resize(used);
    return zip;
}

bool is_emulated() {
    return std::string(backend_name()) == "emu";
}

bool is_fast_build() {
#if !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(undefined_behavior_sanitizer)
    return false;
#endif
#endif
    return !is_emulated();
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

}  // namespace jetlag::test

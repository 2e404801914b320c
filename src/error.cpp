#include "src/error.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>

namespace jetlag {

static void print_error(const char* program, std::string message) {
    for (char& c : message)
        if (c == '\n' || c == '\r') c = ' ';
    fmt::print(stderr, "{}: error: {}\n", program, message);
}

static const char* program_name = "";

// Only what is safe in a signal handler.
static void on_interrupt(int) {
    for (const char* part : {program_name, ": error: interrupted\n"})
        if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
    _exit(kExitFailed);
}

// Reading a mapped file beyond its end: somebody cut the corpus short while it was in use.
static void on_bus_error(int) {
    for (const char* part : {program_name, ": error: a file became shorter while it was in use as a corpus\n"})
        if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
    _exit(kExitFailed);
}

int run_main(const char* program, const std::function<int()>& body) {
    program_name = program;
    for (int signal : {SIGINT, SIGTERM}) {
        struct sigaction action = {};
        action.sa_handler = on_interrupt;
        sigaction(signal, &action, nullptr);
    }
    struct sigaction bus_error = {};
    bus_error.sa_handler = on_bus_error;
    sigaction(SIGBUS, &bus_error, nullptr);
    try {
        const int code = body();
        if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
            fail("cannot write to standard output: {}", std::strerror(errno));
        return code;
    } catch (const Error& e) {
        print_error(program, e.what());
        return e.exit_code;
    } catch (const std::bad_alloc&) {
        print_error(program, "out of memory");
        return kExitFailed;
    } catch (const std::exception& e) {
        print_error(program, e.what());
        return kExitFailed;
    }
}

}  // namespace jetlag

#include "src/error.h"

#include <unistd.h>

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

int run_main(const char* program, const std::function<int()>& body) {
    program_name = program;
    for (int signal : {SIGINT, SIGTERM}) {
        struct sigaction action = {};
        action.sa_handler = on_interrupt;
        sigaction(signal, &action, nullptr);
    }
    try {
        return body();
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

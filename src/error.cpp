#include "src/error.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>

namespace jetlag {

std::string one_line(std::string text) {
    for (char& c : text)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    return text;
}

static void print_error(const char* program, const std::string& message) {
    print_note("{}: error: {}\n", program, one_line(message));
}

static const char* program_name = "";

// Ends the program with a line, by only what is safe in a signal handler.
static void end_in_handler(const char* message) {
    for (const char* part : {program_name, message})
        if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
    _exit(kExitFailed);
}

static void on_interrupt(int) {
    end_in_handler(": error: interrupted\n");
}

// Reading a mapped file beyond its end: somebody cut the corpus short while it was in use.
static void on_bus_error(int) {
    end_in_handler(": error: a file became shorter while it was in use as a corpus\n");
}

static void handle(int signal, void (*handler)(int)) {
    struct sigaction action = {};
    action.sa_handler = handler;
    sigaction(signal, &action, nullptr);
}

int run_main(const char* program, const std::function<int()>& body) {
    program_name = program;
    handle(SIGINT, on_interrupt);
    handle(SIGTERM, on_interrupt);
    handle(SIGBUS, on_bus_error);
    handle(SIGXFSZ, SIG_IGN);  // so that a write beyond the limit on a file's size is an error with a message
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

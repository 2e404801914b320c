#include "src/error.h"

#include <cstdio>
#include <new>

namespace jetlag {

static void print_error(const char* program, std::string message) {
    for (char& c : message)
        if (c == '\n' || c == '\r') c = ' ';
    fmt::print(stderr, "{}: error: {}\n", program, message);
}

int run_main(const char* program, const std::function<int()>& body) {
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

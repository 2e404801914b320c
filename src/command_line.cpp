#include "src/command_line.h"

#include "src/error.h"

namespace jetlag {

bool parse_command_line(CLI::App& app, int argc, char** argv) {
    try {
        app.parse(argc, argv);
        return true;
    } catch (const CLI::CallForHelp&) {
        fmt::print("{}", app.help());
        return false;
    } catch (const CLI::ParseError& e) {
        fail_usage("{} (see --help)", e.what());
    }
}

}  // namespace jetlag

#include "src/command_line.h"

#include <charconv>

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

// The number that fills the whole text; false if there is none.
template <typename Number>
static bool read_number(const std::string& text, Number& value) {
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    return error == std::errc() && rest == end;
}

int64_t parse_whole(const std::string& option, const std::string& text, int64_t min, int64_t max) {
    int64_t value = 0;
    if (!read_number(text, value) || value < min || value > max)
        fail_usage("{}: found {}, wanted a whole number from {} to {}", option, text, min, max);
    return value;
}

double parse_real(const std::string& option, const std::string& text, bool (*is_good)(double), const char* wanted) {
    double value = 0;
    if (!read_number(text, value) || !is_good(value)) fail_usage("{}: found {}, wanted {}", option, text, wanted);
    return value;
}

std::vector<std::string> split_list(const std::string& text) {
    std::vector<std::string> parts;
    for (size_t start = 0; start <= text.size();) {
        const size_t end = std::min(text.find(',', start), text.size());
        parts.push_back(text.substr(start, end - start));
        start = end + 1;
    }
    return parts;
}

}  // namespace jetlag

#include "src/text_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

namespace jetlag {

std::string aligned_table(const std::vector<std::vector<std::string>>& rows, size_t left) {
    if (rows.empty()) return "";
    std::vector<size_t> width(rows[0].size(), 0);
    for (const auto& row : rows) {
        if (row.size() != width.size())
            throw std::logic_error(
                fmt::format("a table of {} columns has a row of {} cells", width.size(), row.size()));
        for (size_t c = 0; c < row.size(); c++) width[c] = std::max(width[c], row[c].size());
    }
    std::string text;
    for (const auto& row : rows) {
        std::string line;
        for (size_t c = 0; c < row.size(); c++)
            line += c < left ? fmt::format("{:<{}}  ", row[c], width[c]) : fmt::format("{:>{}}  ", row[c], width[c]);
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}

std::string csv_cell(const std::string& text) {
    if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
    std::string quoted = "\"";
    for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    return quoted + "\"";
}

}  // namespace jetlag

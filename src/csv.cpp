#include "src/csv.h"

#include <csv.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "src/error.h"

namespace jetlag {

CsvTable read_csv(std::string_view bytes, const std::string& label) {
    constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
    if (bytes.starts_with(kByteOrderMark)) bytes.remove_prefix(kByteOrderMark.size());
    struct Rows {
        std::vector<std::vector<std::string>> rows = {{}};
    } parsed;
    const auto on_field = [](void* text, size_t size, void* user) {
        static_cast<Rows*>(user)->rows.back().emplace_back(static_cast<const char*>(text), size);
    };
    const auto on_row = [](int, void* user) { static_cast<Rows*>(user)->rows.emplace_back(); };

    csv_parser parser;
    if (csv_init(&parser, CSV_STRICT | CSV_STRICT_FINI) != 0) fail("{}: libcsv cannot be initialized", label);
    // Blanks around a field belong to it.
    csv_set_space_func(&parser, [](unsigned char) { return 0; });
    const bool is_good = csv_parse(&parser, bytes.data(), bytes.size(), on_field, on_row, &parsed) == bytes.size() &&
                         csv_fini(&parser, on_field, on_row, &parsed) == 0;
    const char* reason = csv_strerror(csv_error(&parser));
    const size_t row = parsed.rows.size();
    csv_free(&parser);
    if (!is_good) fail("{}: row {}: cannot be read as comma-separated values: {}", label, row, reason);
    if (parsed.rows.back().empty()) parsed.rows.pop_back();
    if (parsed.rows.empty()) fail("{}: is empty, wanted comma-separated values with a line of column names", label);

    CsvTable table;
    table.label = label;
    table.columns = parsed.rows.front();
    table.rows.assign(std::make_move_iterator(parsed.rows.begin() + 1), std::make_move_iterator(parsed.rows.end()));
    for (size_t i = 0; i < table.rows.size(); i++)
        if (table.rows[i].size() != table.columns.size())
            fail("{}: row {} has {} fields, wanted {} ({})", label, i + 2, table.rows[i].size(), table.columns.size(),
                 fmt::join(table.columns, ", "));
    return table;
}

size_t csv_column(const CsvTable& table, const std::string& name) {
    const auto at = std::find(table.columns.begin(), table.columns.end(), name);
    if (at == table.columns.end())
        fail("{}: has no column {}, found {}", table.label, name, fmt::join(table.columns, ", "));
    return static_cast<size_t>(at - table.columns.begin());
}

}  // namespace jetlag

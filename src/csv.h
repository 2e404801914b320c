// Tables of comma-separated values with a line of column names (libcsv).
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

struct CsvTable {
    std::string label;
    std::vector<std::string> columns;
    std::vector<std::vector<std::string>> rows;  // each as long as `columns`
};

// Errors, naming the table by `label`: no line of names, a quote that is not closed, a row with more or fewer fields
// than there are columns.
CsvTable read_csv(std::string_view bytes, const std::string& label);

// The place of a column. Errors name the label and the column.
size_t csv_column(const CsvTable& table, const std::string& name);

}  // namespace jetlag

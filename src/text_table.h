// Tables as text: aligned for a terminal, and as comma-separated values.
#pragma once

#include <string>
#include <vector>

namespace jetlag {

// Rows of cells, all of one length; the first row holds the column names. Columns are as wide as their widest cell, two
// blanks apart; the first `left` columns (texts) are aligned to the left, the others (numbers) to the right. Throws
// std::logic_error if the rows differ in length.
std::string aligned_table(const std::vector<std::vector<std::string>>& rows, size_t left);

// A cell of a CSV file (RFC 4180): in quotes if it must be.
std::string csv_cell(const std::string& text);

}  // namespace jetlag

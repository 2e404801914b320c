// What a diagnostic of the laboratory gives out: a CSV and a JSON file with every number and every setting, a table for
// the terminal, a figure as SVG, and an HTML page that holds several diagnostics and needs no network.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace jetlag {

using Json = nlohmann::ordered_json;

// A cell is a text or a number.
struct LabTable {
    std::vector<std::string> columns;
    std::vector<std::vector<Json>> rows;
};

struct LabSeries {
    std::string name;
    std::vector<double> x, y;  // a y that is not finite, or not positive on a logarithmic axis, is left out
};

struct LabPanel {
    std::string title, x_label, y_label;
    bool log_x = false, log_y = false;
    bool lines = true;                 // between points; false: their order means nothing
    bool stacked = false;              // bars on each other, one bar per x
    std::vector<std::string> x_names;  // names of x = 0, 1, ...; empty: x is a number
    std::vector<LabSeries> series;
};

struct LabSummary {
    std::string title;
    LabTable table;
    LabTable numbers;  // for the JSON, where cells of `table` are texts of several numbers; empty: `table`
};

struct LabResult {
    std::string name;   // of the files: NAME.csv, NAME.json, NAME.svg
    std::string title;  // one line
    Json settings;      // everything that the numbers depend on
    LabTable table;     // every number
    std::vector<LabSummary> summaries;
    std::vector<std::string> notes;  // lines on what a reader must know of the numbers
    std::vector<LabPanel> panels;
};

// A number for reading: four significant digits; "nan" without a sign.
std::string short_number(double value);

std::string result_csv(const LabResult& result);

// {"diagnostic": NAME, "settings": {...}, "summaries": [{"title": TITLE, "rows": [...]}, ...], "notes": [...],
// "rows": [{column: value, ...}, ...]}; a number that is not finite is null.
std::string result_json(const LabResult& result);

// The summaries as aligned tables.
std::string result_text(const LabResult& result);

// Errors, with exit code 2, if the file is a folder, or is there already and `force` is false.
void check_lab_file(const std::filesystem::path& file, bool force);

// Errors, with exit code 2, if the folder holds files of one of these diagnostics already and `force` is false; creates
// the folder. Errors: it cannot be created, gnuplot is not there.
void check_lab_folder(const std::filesystem::path& folder, const std::vector<std::string>& names, bool force);

// Writes NAME.csv, NAME.json and NAME.svg.
void write_result(const std::filesystem::path& folder, const LabResult& result);

// The page of several results that were written to `folder` before: tables, figures, settings.
std::string result_page(const std::filesystem::path& folder, const std::vector<LabResult>& results);

}  // namespace jetlag

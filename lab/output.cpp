#include "lab/output.h"

#include <algorithm>
#include <cmath>

#include "src/error.h"
#include "src/files.h"
#include "src/gnuplot.h"
#include "src/text_table.h"

namespace jetlag {

std::string short_number(double value) {
    return std::isnan(value) ? "nan" : fmt::format("{:.4g}", value);
}

static std::string exact_cell(const Json& cell) {
    if (cell.is_string()) return cell.get<std::string>();
    if (cell.is_number_float()) return std::isnan(cell.get<double>()) ? "nan" : fmt::format("{}", cell.get<double>());
    return cell.dump();
}

static std::string short_cell(const Json& cell) {
    return cell.is_number_float() ? short_number(cell.get<double>()) : exact_cell(cell);
}

std::string result_csv(const LabResult& result) {
    const auto line = [](const std::vector<std::string>& cells) {
        std::string text;
        for (size_t c = 0; c < cells.size(); c++) text += (c > 0 ? "," : "") + csv_cell(cells[c]);
        return text + "\n";
    };
    std::string text = line(result.table.columns);
    for (const auto& row : result.table.rows) {
        std::vector<std::string> cells;
        for (const Json& cell : row) cells.push_back(exact_cell(cell));
        text += line(cells);
    }
    return text;
}

static Json rows_json(const LabTable& table) {
    Json rows = Json::array();
    for (const auto& row : table.rows) {
        Json object = Json::object();
        for (size_t c = 0; c < row.size(); c++) object[table.columns[c]] = row[c];
        rows.push_back(object);
    }
    return rows;
}

std::string result_json(const LabResult& result) {
    Json summaries = Json::array();
    for (const LabSummary& summary : result.summaries) {
        const LabTable& table = summary.numbers.columns.empty() ? summary.table : summary.numbers;
        summaries.push_back({{"title", summary.title}, {"rows", rows_json(table)}});
    }
    Json document = {{"diagnostic", result.name}, {"settings", result.settings}};
    document["summaries"] = summaries;
    document["notes"] = result.notes;
    document["rows"] = rows_json(result.table);
    return document.dump(1) + "\n";
}

static size_t text_columns(const LabTable& table) {
    size_t count = 0;
    while (!table.rows.empty() && count < table.columns.size() && table.rows[0][count].is_string()) count++;
    return count;
}

std::string result_text(const LabResult& result) {
    std::string text = result.title + "\n";
    for (const LabSummary& summary : result.summaries) {
        std::vector<std::vector<std::string>> rows = {summary.table.columns};
        for (const auto& row : summary.table.rows) {
            rows.emplace_back();
            for (const Json& cell : row) rows.back().push_back(short_cell(cell));
        }
        text += "\n" + summary.title + "\n" + aligned_table(rows, text_columns(summary.table));
    }
    for (size_t i = 0; i < result.notes.size(); i++) text += (i == 0 ? "\nnote: " : "note: ") + result.notes[i] + "\n";
    return text;
}

// ---------------------------------------------------------------------------------------------------------------

static const char* const kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                       "#e69f00", "#56b4e9", "#000000", "#999999"};

static std::string panel_script(const LabPanel& panel, size_t number) {
    std::string script = "set title " + plot_text(panel.title) + " noenhanced\n";
    script += "set xlabel " + plot_text(panel.x_label) + " noenhanced\n";
    script += "set ylabel " + plot_text(panel.y_label) + " noenhanced\n";
    script += panel.log_x ? "set logscale x 2\n" : "unset logscale x\n";
    script += panel.log_y ? "set logscale y\nset format y '10^{%L}'\n" : "unset logscale y\nset format y '%g'\n";
    script += panel.stacked ? "set yrange [0:*]\n" : "set yrange [*:*]\n";
    if (panel.x_names.empty()) {
        script += "set xtics autofreq norotate\nset xrange [*:*]\n";
    } else {
        std::string tics;
        for (size_t i = 0; i < panel.x_names.size(); i++)
            tics += fmt::format("{}{} {}", i > 0 ? ", " : "", plot_text(panel.x_names[i]), i);
        script += fmt::format("set xtics ({}) rotate by -30 noenhanced\nset xrange [-0.6:{}.6]\n", tics,
                              panel.x_names.size() - 1);
    }
    // Stacked bars are boxes from the sum of the series before.
    std::vector<double> below(panel.x_names.size(), 0.0);
    std::string plots;
    for (size_t s = 0; s < panel.series.size(); s++) {
        const LabSeries& series = panel.series[s];
        const std::string data = fmt::format("$data{}_{}", number, s);
        script += data + " << EOD\n";
        bool is_empty = true;
        for (size_t i = 0; i < series.x.size(); i++) {
            if (!std::isfinite(series.y[i]) || (panel.log_y && series.y[i] <= 0)) continue;
            is_empty = false;
            if (panel.stacked) {
                const size_t x = static_cast<size_t>(series.x[i]);
                script += fmt::format("{} {} {} {}\n", series.x[i], below[x], below[x], below[x] + series.y[i]);
                below[x] += series.y[i];
            } else {
                script += fmt::format("{} {}\n", series.x[i], series.y[i]);
            }
        }
        script += "EOD\n";
        if (is_empty) continue;
        const char* colour = kColours[s % std::size(kColours)];
        // Of lines (and points) that lie on each other the later is thinner, so that all show.
        const double behind = static_cast<double>(panel.series.size() - 1 - s);
        const std::string style =
            panel.stacked
                ? fmt::format("using 1:2:3:4:4 with candlesticks fs solid 0.85 noborder lc rgb '{}'", colour)
                : fmt::format("using 1:2 with {} lw {:.2f} pt 7 ps {:.2f} lc rgb '{}'",
                              panel.lines ? "linespoints" : "points", 1.5 + 0.5 * behind, 0.4 + 0.08 * behind, colour);
        plots += fmt::format("{}{} {} title {}", plots.empty() ? "" : ", ", data, style, plot_text(series.name));
    }
    // Where nothing can be shown (all values zero on a logarithmic axis) the panel stays empty.
    if (plots.empty()) return script + "unset logscale y\nset yrange [0:1]\nplot NaN notitle\n";
    return script + "plot " + plots + "\n";
}

static std::string figure_script(const LabResult& result) {
    const size_t columns = std::min<size_t>(result.panels.size(), 2), rows = (result.panels.size() + 1) / 2;
    std::string script =
        fmt::format("set terminal svg size {},{} dynamic background rgb 'white' font 'sans-serif,12' name {}\n",
                    columns == 1 ? 900 : 1200, 60 + 430 * rows, plot_text("lab_" + result.name));
    script += fmt::format("set multiplot layout {},{} title {} noenhanced\n", rows, columns, plot_text(result.title));
    script += "set key below noenhanced\nset grid lc rgb '#dddddd'\nset boxwidth 0.7\n";
    for (size_t p = 0; p < result.panels.size(); p++) script += panel_script(result.panels[p], p);
    return script + "unset multiplot\n";
}

static const char* const kExtensions[] = {".csv", ".json", ".svg"};

void check_lab_file(const std::filesystem::path& file, bool force) {
    if (std::filesystem::is_directory(file)) fail_usage("{}: is a folder (wanted a file)", file.string());
    if (!force && std::filesystem::exists(file))
        fail_usage("{}: exists already; give another folder with --out, or --force to replace it", file.string());
}

void check_lab_folder(const std::filesystem::path& folder, const std::vector<std::string>& names, bool force) {
    for (const std::string& name : names)
        for (const char* extension : kExtensions) check_lab_file(folder / (name + extension), force);
    check_gnuplot(folder / (names.front() + ".svg"));
    make_folder(folder);
}

void write_result(const std::filesystem::path& folder, const LabResult& result) {
    write_file_atomically(folder / (result.name + ".csv"), result_csv(result));
    write_file_atomically(folder / (result.name + ".json"), result_json(result));
    draw_svg(folder / (result.name + ".svg"), figure_script(result));
}

// ---------------------------------------------------------------------------------------------------------------

static std::string html_text(const std::string& text) {
    std::string escaped;
    for (char c : text) {
        if (c == '&')
            escaped += "&amp;";
        else if (c == '<')
            escaped += "&lt;";
        else if (c == '>')
            escaped += "&gt;";
        else
            escaped += c;
    }
    return escaped;
}

static std::string html_table(const LabTable& table) {
    std::string text = "<table>\n<tr>";
    for (const std::string& column : table.columns) text += "<th>" + html_text(column) + "</th>";
    text += "</tr>\n";
    for (const auto& row : table.rows) {
        text += "<tr>";
        for (const Json& cell : row)
            text += (cell.is_string() ? "<td class=\"text\">" : "<td>") + html_text(short_cell(cell)) + "</td>";
        text += "</tr>\n";
    }
    return text + "</table>\n";
}

// Gnuplot names the parts of every picture alike; on one page they need names of their own.
static std::string svg_element(std::string svg, const std::string& name) {
    svg = svg.substr(svg.find("<svg"));
    for (const std::string id : {"gpPt", "gpDot", "gnuplot_canvas", "textbox", "greybox"})
        for (size_t at = svg.find(id); at != std::string::npos; at = svg.find(id, at + name.size() + 1 + id.size()))
            svg.insert(at, name + "_");
    return svg;
}

std::string result_page(const std::filesystem::path& folder, const std::vector<LabResult>& results) {
    std::string page =
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>jetlag: kernel "
        "laboratory</title>\n"
        "<style>\nbody { font-family: sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }\n"
        "table { border-collapse: collapse; font-size: 0.85em; margin: 0.5em 0 1.5em; }\n"
        "th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.6em; text-align: right; white-space: nowrap; }\n"
        ".text { text-align: left; }\nsvg { max-width: 100%; height: auto; }\npre { white-space: pre-wrap; }\n"
        ".wide { overflow-x: auto; }\n</style>\n</head>\n<body>\n<h1>Kernel laboratory</h1>\n<ul>\n";
    for (const LabResult& result : results)
        page += fmt::format("<li><a href=\"#{}\">{}</a></li>\n", result.name, html_text(result.title));
    page += "</ul>\n";
    for (const LabResult& result : results) {
        page += fmt::format("<h2 id=\"{}\">{}</h2>\n", result.name, html_text(result.title));
        page += svg_element(read_file(folder / (result.name + ".svg")), result.name);
        for (const LabSummary& summary : result.summaries)
            page += "<h3>" + html_text(summary.title) + "</h3>\n<div class=\"wide\">" + html_table(summary.table) +
                    "</div>\n";
        for (const std::string& note : result.notes) page += "<p>" + html_text(note) + "</p>\n";
        page += "<details><summary>Settings</summary>\n<pre>" + html_text(result.settings.dump(1)) +
                "</pre></details>\n<details><summary>All numbers</summary>\n<div class=\"wide\">" +
                html_table(result.table) + "</div></details>\n";
    }
    return page + "</body>\n</html>\n";
}

}  // namespace jetlag

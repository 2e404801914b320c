// SVG pictures, drawn by gnuplot.
#pragma once

#include <filesystem>
#include <string>

namespace jetlag {

// Errors if gnuplot is not installed, naming the picture that wants it.
void check_gnuplot(const std::filesystem::path& svg);

// A text as a gnuplot string: single quotes are doubled, control characters dropped.
std::string plot_text(const std::string& text);

// Runs a script that draws one picture and writes it to `svg`, whole or not at all. The script sets the terminal, not
// the output. Errors: gnuplot fails.
void draw_svg(const std::filesystem::path& svg, const std::string& script);

}  // namespace jetlag

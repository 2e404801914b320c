// A line that is rewritten in place on a terminal; nothing where stderr is not one.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace jetlag {

struct Progress {
    bool is_terminal = false;
    bool is_shown = false;
    std::chrono::steady_clock::time_point last_drawn;
};

Progress make_progress();

// Draws "label [=====>    ] 40% text", at most ten times a second. share is in [0, 1].
void draw_progress(Progress& progress, const std::string& label, double share, const std::string& text);

// Removes the line, so that something else can be printed.
void clear_progress(Progress& progress);

// "1:02:03", "2:03" or "4.1 s".
std::string duration_text(double seconds);

}  // namespace jetlag

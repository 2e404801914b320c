#include "src/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "src/error.h"

namespace jetlag {

Progress make_progress() {
    Progress progress;
    progress.is_terminal = isatty(STDERR_FILENO) != 0;
    return progress;
}

void draw_progress(Progress& progress, const std::string& label, double share, const std::string& text) {
    const auto now = std::chrono::steady_clock::now();
    if (!progress.is_terminal || (progress.is_shown && now - progress.last_drawn < std::chrono::milliseconds(100)))
        return;
    const int width = 24, filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * width);
    print_note("\r\x1b[K{} [{}{}] {:3.0f}% {}", label, std::string(static_cast<size_t>(filled), '='),
               std::string(static_cast<size_t>(width - filled), ' '), 100 * share, text);
    std::fflush(stderr);
    progress.is_shown = true;
    progress.last_drawn = now;
}

void clear_progress(Progress& progress) {
    if (progress.is_shown) print_note("\r\x1b[K");
    std::fflush(stderr);
    progress.is_shown = false;
}

std::string duration_text(double seconds) {
    if (!std::isfinite(seconds)) return "?";
    if (seconds < 60) return fmt::format("{:.1f} s", seconds);
    const int64_t whole = static_cast<int64_t>(seconds + 0.5);
    if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
    return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace jetlag

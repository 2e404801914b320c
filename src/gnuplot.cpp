#include "src/gnuplot.h"

#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "src/error.h"
#include "src/files.h"

namespace jetlag {

void check_gnuplot(const std::filesystem::path& svg) {
    if (std::system("command -v gnuplot >/dev/null 2>&1") != 0)
        fail("{}: gnuplot, which draws it, is not installed (scripts/setup installs it)", svg.string());
}

std::string plot_text(const std::string& text) {
    std::string quoted = "'";
    for (char c : text) {
        if (c == '\'') quoted += "'";
        if (static_cast<unsigned char>(c) >= 32) quoted += c;
    }
    return quoted + "'";
}

void draw_svg(const std::filesystem::path& svg, const std::string& script) {
    const std::filesystem::path drawn = svg.string() + ".tmp";  // moved into place when it is whole
    const std::string whole = "set output " + plot_text(drawn.string()) + "\n" + script;
    FILE* gnuplot = popen("gnuplot >/dev/null 2>&1", "w");
    if (gnuplot == nullptr) fail("{}: cannot start gnuplot", svg.string());
    void (*const old_action)(int) = std::signal(SIGPIPE, SIG_IGN);
    std::fwrite(whole.data(), 1, whole.size(), gnuplot);
    const int status = pclose(gnuplot);
    std::signal(SIGPIPE, old_action);
    std::error_code error;
    const bool is_drawn = status == 0 && std::filesystem::exists(drawn) && std::filesystem::file_size(drawn, error) > 0;
    const std::string picture = is_drawn ? read_file(drawn) : "";
    std::filesystem::remove(drawn, error);
    // Gnuplot does not look at whether its writes succeed: a picture that stops early was cut off by the disk, and
    // writing as much again says why.
    if (status == 0 && picture.find("</svg>") == std::string::npos) {
        write_file_atomically(drawn, std::string(2 * picture.size() + (1 << 20), ' '));
        std::filesystem::remove(drawn, error);
        fail("{}: gnuplot wrote only the first {} bytes of it", svg.string(), picture.size());
    }
    if (!is_drawn)
        fail("{}: gnuplot could not draw it (exit code {})", svg.string(),
             WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    write_file_atomically(svg, picture);
}

}  // namespace jetlag

#include "src/interrupt.h"

#include <initializer_list>

namespace jetlag {

volatile std::sig_atomic_t caught_signal = 0;

static void on_signal(int signal) {
    caught_signal = signal;
}

void catch_signals() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
        struct sigaction action = {};
        action.sa_handler = on_signal;
        action.sa_flags = (signal == SIGPIPE ? 0 : static_cast<int>(SA_RESETHAND)) | SA_RESTART;
        sigaction(signal, &action, nullptr);
    }
}

}  // namespace jetlag

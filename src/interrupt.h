// Signals that ask a long-running loop to stop and keep what it has.
#pragma once

#include <csignal>

namespace jetlag {

// The signal that came last, 0 if none; loops look at it.
extern volatile std::sig_atomic_t caught_signal;

// From here on SIGINT, SIGTERM, SIGHUP and SIGPIPE only set caught_signal. A second SIGINT, SIGTERM or SIGHUP has its
// default action. A broken pipe (the output went to `head`) comes again with every write, and each fails.
void catch_signals();

}  // namespace jetlag

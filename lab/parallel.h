// Loops over independent jobs, on all threads.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace jetlag {

// job(i) for i = 0..count-1, in any order. An exception in a job, which must not leave its thread, is thrown here once
// all are done (the first of several); a job that runs out of memory becomes the error "no memory for WHAT".
void run_jobs(size_t count, const std::string& what, const std::function<void(size_t)>& job);

}  // namespace jetlag

#include "lab/parallel.h"

#include <exception>
#include <new>

#include "src/error.h"

namespace jetlag {

void run_jobs(size_t count, const std::string& what, const std::function<void(size_t)>& job) {
    std::exception_ptr first;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < count; i++) {
        try {
            job(i);
        } catch (...) {
#pragma omp critical(run_jobs)
            if (!first) first = std::current_exception();
        }
    }
    if (!first) return;
    try {
        std::rethrow_exception(first);
    } catch (const std::bad_alloc&) {
        fail("no memory for {}", what);
    }
}

}  // namespace jetlag

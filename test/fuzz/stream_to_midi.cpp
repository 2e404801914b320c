#include <cstddef>

#include "test/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    jetlag::test::fuzz_stream_to_midi({data, size});
    return 0;
}

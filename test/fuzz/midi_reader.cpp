#include <cstddef>

#include "test/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    jetlag::test::fuzz_midi_reader({data, size});
    return 0;
}

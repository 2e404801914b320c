// The fuzzers: what they once found, and a short run of each.
#include <gtest/gtest.h>

#include <filesystem>

#include "src/files.h"
#include "test/fuzz_targets.h"
#include "test/support.h"

namespace jetlag {
namespace {

void run_kept_inputs(const std::string& name, void (*target)(std::span<const uint8_t>)) {
    int inputs = 0;
    for (const auto& entry : std::filesystem::directory_iterator("test/fuzz/" + name)) {
        SCOPED_TRACE(entry.path());
        const std::string bytes = read_file(entry.path());
        target({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
        inputs++;
    }
    EXPECT_GT(inputs, 0);
}

TEST(Fuzz, KeptInputsOfTheMidiReader) {
    run_kept_inputs("midi_reader", test::fuzz_midi_reader);
}

TEST(Fuzz, KeptInputsOfTheWayBackToMidi) {
    run_kept_inputs("stream_to_midi", test::fuzz_stream_to_midi);
}

// Five seconds from the kept inputs on.
void run_fuzzer(const std::string& name) {
    if (!std::filesystem::exists("build/fuzz/fuzz_" + name)) GTEST_SKIP() << "make fuzz was not run";
    const test::TemporaryFolder folder;
    std::filesystem::create_directory(folder.path / "found");
    const test::ProgramResult result = test::run_program(
        "../fuzz/fuzz_" + name,
        {"-max_total_time=5", "-timeout=5", "-rss_limit_mb=1024", "-max_len=4096", "-verbosity=0",
         "-artifact_prefix=" + (folder.path / "crash-").string(), folder.path / "found", "test/fuzz/" + name},
        {"ASAN_OPTIONS=", "UBSAN_OPTIONS="});
    EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(Fuzz, MidiReader) {
    run_fuzzer("midi_reader");
}

TEST(Fuzz, StreamToMidi) {
    run_fuzzer("stream_to_midi");
}

}  // namespace
}  // namespace jetlag

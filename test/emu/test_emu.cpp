// The emulator reports what is no valid CUDA program, and shows by other results under other seeds what depends on the
// order of threads.
#include <fmt/format.h>

#include <cstdlib>
#include <set>

#include "test/emu/faults.h"
#include "test/kernel_support.h"

namespace jetlag::test {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

// The different results, bit for bit, under the seeds 1 .. 10.
std::set<std::string> results_of_seeds(int64_t n, const std::function<void(float*)>& run) {
    std::set<std::string> results;
    for (int seed = 1; seed <= 10; seed++) {
        const EmulatorSeed emulator_seed(seed);
        const FloatBuffer out(Floats(static_cast<size_t>(n), 0.0f));
        run(out.data());
        const Floats values = out.read();
        results.insert(std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
    }
    return results;
}

// A process that dies starts anew for its test, as OpenMP's threads do not outlive a fork.
struct Emulator : testing::Test {
    FloatBuffer out{Floats(64, 0.0f)};
    Emulator() { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }

    // One line with the kernel, a block of two, a thread, and what the rest of the expression says.
    void expect_report(Fault fault, const std::string& kernel, const std::string& message) const {
        EXPECT_EXIT(run_fault(fault, out.data()), testing::ExitedWithCode(70),
                    "emulator: error: " + kernel + ": block \\([01],0,0\\) thread \\([0-9]+,0,0\\): " + message);
    }
};
using EmulatorDeathTest = Emulator;

TEST_F(Emulator, MissingBarriersChangeResults) {
    Floats x(128);
    for (size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>(i);
    const FloatBuffer device_x(x);
    EXPECT_EQ(results_of_seeds(1, [&](float* o) { run_sum(o, device_x.data(), true); }).size(), 1u);
    EXPECT_GT(results_of_seeds(1, [&](float* o) { run_sum(o, device_x.data(), false); }).size(), 1u);
    EXPECT_EQ(results_of_seeds(64, [&](float* o) { run_refetch(o, device_x.data(), true); }).size(), 1u);
    EXPECT_GT(results_of_seeds(64, [&](float* o) { run_refetch(o, device_x.data(), false); }).size(), 1u);
}

TEST_F(Emulator, RacesChangeResults) {
    EXPECT_GT(results_of_seeds(1, run_race).size(), 1u);
}

TEST_F(Emulator, SharedMemoryStartsAsNans) {
    for (int run = 0; run < 2; run++) {
        run_unwritten(out.data());
        for (const float value : out.read()) EXPECT_TRUE(std::isnan(value));
        Floats x(128, 1.0f);
        run_sum(out.data(), FloatBuffer(x).data(), true);
    }
}

TEST_F(Emulator, CopiesArriveAtTheWait) {
    run_without_wait(out.data(), FloatBuffer(Floats(64, 1.0f)).data());
    for (const float value : out.read()) EXPECT_TRUE(std::isnan(value));
}

TEST_F(EmulatorDeathTest, Barriers) {
    expect_report(
        Fault::barrier_in_branch, "barrier_in_branch_kernel",
        "(ends without reaching __syncthreads at .*faults.cu:[0-9]+, where [0-9]+ of 64 threads wait|waits at "
        "__syncthreads at .*faults.cu:[0-9]+, but thread \\([0-9]+,0,0\\) has ended)\n");
    expect_report(Fault::barriers_in_two_branches, "barriers_in_two_branches_kernel",
                  "waits at __syncthreads at .*faults.cu:[0-9]+, while others wait at __syncthreads at "
                  ".*faults.cu:[0-9]+\n");
    expect_report(Fault::barrier_against_shuffle, "barrier_against_shuffle_kernel",
                  "waits at a shuffle with mask 0xffffffff at .*faults.cu:[0-9]+, but thread \\([0-9]+,0,0\\) waits at "
                  "__syncthreads at .*faults.cu:[0-9]+\n");
}

TEST_F(EmulatorDeathTest, WarpOperations) {
    const std::string waits = "waits at a shuffle with mask 0x[0-9a-f]+ at .*faults.cu:[0-9]+, but thread ";
    expect_report(
        Fault::shuffle_of_ended_lanes, "shuffle_of_ended_lanes_kernel",
        "waits at warp_sum with mask 0xffffffff at .*faults.cu:[0-9]+, but thread \\([0-9]+,0,0\\) has ended\n");
    expect_report(Fault::shuffle_then_end, "shuffle_then_end_kernel",
                  "waits at warp_sum with mask 0xffffffff at .*faults.cu:[0-9]+, but thread \\(40,0,0\\) has ended\n");
    expect_report(Fault::different_masks, "different_masks_kernel",
                  waits + "\\([0-9]+,0,0\\) waits at a shuffle with mask 0xfffff");
    expect_report(Fault::different_operations, "different_operations_kernel",
                  "waits at (a shuffle|__syncwarp) with mask 0xffffffff at .*faults.cu:[0-9]+, but thread "
                  "\\([0-9]+,0,0\\) waits at (a shuffle|__syncwarp) with mask 0xffffffff at .*faults.cu:[0-9]+\n");
    expect_report(Fault::different_shuffles, "different_shuffles_kernel",
                  waits + "\\([0-9]+,0,0\\) waits at a shuffle with mask 0xffffffff");
    expect_report(Fault::mma_in_two_branches, "mma_in_two_branches_kernel",
                  "waits at mma_bf16 with mask 0xffffffff at .*faults.cu:[0-9]+, but thread \\([0-9]+,0,0\\) waits at "
                  "mma_bf16 with mask 0xffffffff at .*faults.cu:[0-9]+\n");
    expect_report(Fault::own_lane_not_named, "own_lane_not_named_kernel", ".* which does not name its own lane 31\n");
    expect_report(Fault::source_not_named, "source_not_named_kernel",
                  ".* from lane 20, which the mask does not name\n");
    expect_report(Fault::lanes_beyond_block, "lanes_beyond_block_kernel", "a vote .*, but the warp has 8 threads\n");
    expect_report(Fault::crossed_shuffles, "crossed_shuffles_kernel", waits);
    expect_report(Fault::load_matrix_from_global, "load_matrix_kernel",
                  "load_matrix at .* of a row that is not 16 aligned bytes of shared memory\n");
    expect_report(Fault::load_matrix_unaligned, "load_matrix_kernel",
                  "load_matrix at .* of a row that is not 16 aligned bytes of shared memory\n");
}

TEST_F(EmulatorDeathTest, SeedsThatAreNone) {
    for (const char* seed : {"abc", "", "1x", "-1", "99999999999999999999"}) {
        setenv("JETLAG_EMU_SEED", seed, 1);
        try {
            run_unwritten(out.data());
            ADD_FAILURE() << seed;
        } catch (const std::runtime_error& e) {
            EXPECT_EQ(e.what(), fmt::format("JETLAG_EMU_SEED={}: wanted a number", seed));
        }
    }
    unsetenv("JETLAG_EMU_SEED");
}

TEST_F(EmulatorDeathTest, AsynchronousCopies) {
    const std::string message = "copy_async_16 to what is not 16 aligned bytes of shared memory\n";
    expect_report(Fault::copy_async_to_local, "copy_async_kernel", message);
    expect_report(Fault::copy_async_unaligned, "copy_async_kernel", message);
    expect_report(Fault::copy_async_from_shared, "copy_async_from_shared_kernel", "copy_async_16 from shared memory\n");
}

TEST_F(EmulatorDeathTest, SharedMemory) {
    expect_report(Fault::too_much_shared, "too_much_shared_kernel",
                  "static shared memory over 49152 bytes with second\n");
    expect_report(Fault::too_much_with_dynamic_shared, "shared_write_kernel",
                  "shared memory over 101376 bytes with values\n");
    expect_report(Fault::wrong_dynamic_shared, "wrong_dynamic_shared_kernel",
                  "512 bytes of dynamic shared memory, but the launch gave 256\n");
    if (kAddressSanitizer) {
        const std::string thread = " thread \\([0-9]+,0,0\\): bad access:\n";
        for (const Fault fault : {Fault::shared_write, Fault::shared_write_before})
            EXPECT_DEATH(
                run_fault(fault, out.data()),
                "error: shared_write_kernel: block \\(1,0,0\\) thread \\(5,0,0\\): bad access:\n(.*\n)*.*use-after-"
                "poison");
        EXPECT_DEATH(run_fault(Fault::shared_read, out.data()), "shared_read_kernel: block \\([01],0,0\\)" + thread);
        EXPECT_DEATH(run_fault(Fault::dynamic_shared_read, out.data()),
                     "dynamic_shared_read_kernel: block \\([01],0,0\\)" + thread);
    } else {
        // Red zones are looked at when a block ends, and are NaNs to what reads them.
        EXPECT_EXIT(
            run_fault(Fault::shared_write, out.data()), testing::ExitedWithCode(70),
            "shared_write_kernel: block \\(1,0,0\\): a thread has written outside of values, 256 bytes from its "
            "start\n");
        EXPECT_EXIT(
            run_fault(Fault::shared_write_before, out.data()), testing::ExitedWithCode(70),
            "shared_write_kernel: block \\(1,0,0\\): a thread has written outside of values, -[1-4] bytes from its "
            "start\n");
        for (const Fault fault : {Fault::shared_read, Fault::dynamic_shared_read}) {
            run_fault(fault, out.data());
            const Floats values = out.read();
            for (size_t i = 0; i < 64; i++) EXPECT_EQ(std::isnan(values[i]), i == 63);
        }
    }
}

TEST_F(EmulatorDeathTest, GlobalMemory) {
    if (!kAddressSanitizer) GTEST_SKIP() << "out-of-range accesses to global memory show with SAN=address only";
    const DeviceArray<float> x(64);
    const std::string where = " block \\(0,0,0\\) thread \\(2,0,0\\): bad access:\n(.*\n)*.*heap-buffer-overflow";
    EXPECT_DEATH(run_global_access(x.data, 64, false), "global_access_kernel:" + where);
    EXPECT_DEATH(run_global_access(x.data, 64, true), "global_access_kernel:" + where);
    EXPECT_DEATH(run_global_access(x.data, -1, false), "global_access_kernel:" + where);
    EXPECT_DEATH(run_global_copy(x.data, 64), "global_copy_kernel:" + where);
}

TEST_F(EmulatorDeathTest, HostAccessesDeviceMemory) {
    // The process of a death test starts anew, and reads the environment then.
    const char* before = std::getenv("JETLAG_EMU_GUARD");
    if (before == nullptr) setenv("JETLAG_EMU_GUARD", "1", 1);
    const auto expect_exit = [&](const std::function<void(float*)>& access, int code, const char* message) {
        EXPECT_EXIT(
            {
                const FloatBuffer values(Floats(64, 1.0f));
                access(values.data());
                std::exit(0);
            },
            testing::ExitedWithCode(code), message);
    };
    const char* message = "^emulator: error: the host itself accesses device memory\n$";
    expect_exit([](float* x) { std::exit(*x > 0 ? 0 : 1); }, 70, message);
    expect_exit([](float* x) { x[63] = 2; }, 70, message);
    expect_exit(
        [](float* x) {
            EXPECT_THROW(copy_to_device(x, x + 1, sizeof(float)), std::runtime_error);
            std::exit(testing::Test::HasFailure() ? 1 : 0);
        },
        0, "");
    expect_exit([](float* x) { std::exit(read_device(x, 64)[63] == 1 ? 0 : 1); }, 0, "");
    if (before == nullptr) unsetenv("JETLAG_EMU_GUARD");
}

TEST_F(EmulatorDeathTest, StackOverflow) {
    EXPECT_DEATH(run_fault(Fault::deep_recursion, out.data()), "");
}

TEST(EmulatorLinear, RoundsOperandsInTf32) {
    const int64_t N = 5, C = 64, OC = 3;
    const float x = rounded(1 + 0x1p-12f), product = kTf32 ? 1 : x;
    const auto all = [](int64_t n, float value) { return Floats(static_cast<size_t>(n), value); };
    const RealBuffer inp(all(N * C, x)), weight(all(OC * C, 1)), bias(all(OC, x)), out(N * OC);
    linear_forward(out.data(), inp.data(), weight.data(), bias.data(), N, C, OC);
    EXPECT_EQ(out.read(), all(N * OC, rounded(C * product + x)));
    const RealBuffer dout(all(N * OC, x)), ones(all(N * C, 1)), dinp(N * C);
    const FloatBuffer dweight(all(OC * C, 0)), dbias(all(OC, 0)), workspace(linear_workspace_floats(N, C, OC));
    linear_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), ones.data(), weight.data(),
                    workspace.data(), N, C, OC);
    EXPECT_EQ(dinp.read(), all(N * C, rounded(OC * product)));
    EXPECT_EQ(dweight.read(), all(OC * C, N * product));
    EXPECT_EQ(dbias.read(), all(OC, N * x));
}

}  // namespace
}  // namespace jetlag::test

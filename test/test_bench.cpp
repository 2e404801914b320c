// The benchmark program as a user runs it: what it lists, measures and writes, and what it says of bad usage.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "kernels/position/registry.h"
#include "models/checkpoint.h"
#include "src/error.h"
#include "src/files.h"
#include "test/support.h"

namespace jetlag {
namespace {

using nlohmann::json;
using test::lines_of;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

TEST(Bench, ListsEveryOpAndEveryMethod) {
    const ProgramResult result = run_program("bench", {"--list"});
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;
    const std::vector<std::string> names = lines_of(result.out);
    const auto lists = [&names](const std::string& name) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    for (const char* op :
         {"linear_forward/qkv/N8192", "linear_backward/mlp.2/N32768", "layernorm_backward/N8192", "gelu_forward/N8192",
          "attention_decode/full/T32768/D24", "cross_entropy/N8192", "embedding_backward/N8192", "adamw/n199408"})
        EXPECT_TRUE(lists(op)) << op;
    for (const Method& method : methods()) {
        for (const char* rest : {"T512/B8/D24", "T1024/B8/D24", "T8192/B1/D24", "T32768/B1/D64"})
            for (const char* pass : {"attention_forward", "attention_backward"})
                EXPECT_TRUE(lists(fmt::format("{}/{}/{}", pass, method.name, rest))) << method.name << rest;
        for (const char* rest : {"train/{}/T1024/B8", "train/{}/T1024/B32", "eval/{}/T32768/B1"})
            EXPECT_TRUE(lists(fmt::format(fmt::runtime(rest), method.name))) << method.name << rest;
    }
    EXPECT_EQ(lines_of(run_program("bench", {"--list", "--filter", "^adamw"}).out).size(), 1u);
    EXPECT_EQ(run_program("bench", {"--list", "--large", "--filter", "^train/full/T8192"}).out,
              "train/full/T8192/B1/L12/C768\n");
}

TEST(Bench, MeasuresAndWritesJson) {
    const TemporaryFolder folder;
    const std::string file = folder.path / "bench.json";
    const ProgramResult result = run_program(
        "bench", {"--filter", "^(adamw|eval/affine/T1024/B1$|train/rope/T1024/B8$|attention_forward/full/T512/B8/D24)",
                  "--repeat", "3", "--threads", "1", "--json", file});
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;
    const json bench = json::parse(read_file(file));
    EXPECT_EQ(bench["machine"]["threads"], 1);
    EXPECT_GT(bench["machine"]["peak_gflops"].get<double>(), 0);
    EXPECT_GT(bench["machine"]["copy_gbytes_per_s"].get<double>(), 0);
    EXPECT_EQ(bench["machine"]["gflops"].size(), bench["machine"]["gflops_one_thread"].size());
    std::map<std::string, json> rows;
    for (const json& row : bench["rows"]) {
        rows[row["kind"]] = row;
        const std::vector<double> seconds = row["seconds"];
        ASSERT_EQ(seconds.size(), 3u);
        EXPECT_TRUE(std::is_sorted(seconds.begin(), seconds.end()));
        EXPECT_EQ(row["median"].get<double>(), seconds[1]);
        EXPECT_NE(result.out.find(row["name"].get<std::string>()), std::string::npos);
    }
    ASSERT_EQ(rows.size(), 4u);
    EXPECT_EQ(rows["attention_forward"]["method"], "full");
    // 4 C operations for each of B T (T + 1) / 2 pairs.
    EXPECT_EQ(rows["attention_forward"]["flops"], 4.0 * 96 * 8 * 512 * 513 / 2);
    EXPECT_EQ(rows["train"]["losses"].size(), 3u);
    EXPECT_EQ(rows["eval"]["losses"].size(), 1u);
    EXPECT_LT(rows["train"]["losses"][2], rows["train"]["losses"][0]) << "training does not learn";
    double whole = 0;
    for (const auto& share : rows["train"]["share"].items()) whole += share.value().get<double>();
    EXPECT_NEAR(whole, 1, 1e-9);
    EXPECT_GT(rows["train"]["share"]["attention backward"].get<double>(), 0.1);
}

TEST(Bench, WritesTheInputsOfTheBaseline) {
    const TemporaryFolder folder;
    const ProgramResult result = run_program("bench", {"--inputs", folder.path / "in"});
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;
    EXPECT_GT(std::filesystem::file_size(folder.path / "in" / "tokens.bin"), 32768u);
    for (const Method& method : methods()) {
        const Checkpoint checkpoint =
            load_checkpoint(folder.path / "in" / fmt::format("{}.safetensors", method.name), {});
        EXPECT_EQ(checkpoint.model.shape.position, method.name);
        EXPECT_EQ(checkpoint.model.shape.embed_dim, 96);
    }
}

TEST(Bench, BadUsage) {
    const TemporaryFolder folder;
    const std::string file = folder.path / "file";
    write_file_atomically(file, "text");
    test::expect_error(run_program("bench", {"--filter", "("}), "bench", kExitUsage,
                       {"--filter (", "regular expression"});
    test::expect_error(run_program("bench", {"--filter", "no such row"}), "bench", kExitUsage,
                       {"--filter no such row: matches no row"});
    test::expect_error(run_program("bench", {"--repeat", "0"}), "bench", kExitUsage, {"--repeat"});
    test::expect_error(run_program("bench", {"--threads", "many"}), "bench", kExitUsage, {"--threads"});
    test::expect_error(run_program("bench", {"--filter", "^adamw", "--json", folder.path / "no" / "x.json"}), "bench",
                       kExitUsage, {"--json", "no folder"});
    test::expect_error(run_program("bench", {"--inputs", file}), "bench", kExitFailed, {file});
}

// scripts/gpu_check where there is no GPU: one line, at once, and nothing is made.
TEST(GpuCheck, NeedsAGpu) {
    if (std::system("nvidia-smi -L >/dev/null 2>&1") == 0 || std::filesystem::exists("/dev/nvidia0"))
        GTEST_SKIP() << "this machine has a GPU";
    const test::TemporaryFolder folder;
    const std::string err = folder.path / "err", out = folder.path / "out";
    const std::string command = fmt::format("OUT={} scripts/gpu_check 2>{}", out, err);
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 1);
    EXPECT_EQ(read_file(err), "gpu_check: error: no GPU: nvidia-smi -L lists none, and there is no /dev/nvidia0\n");
    EXPECT_FALSE(std::filesystem::exists(out));
}

}  // namespace
}  // namespace jetlag

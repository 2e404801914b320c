#include "src/safetensors.h"

#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "src/error.h"
#include "test/support.h"

namespace jetlag {
namespace {

using namespace std::string_literals;

// The bytes of a file: length, header, data.
std::string raw_file(const std::string& header, const std::string& data, uint64_t header_size) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &header_size, 8);
    return bytes + header + data;
}
std::string raw_file(const std::string& header, const std::string& data = "") {
    return raw_file(header, data, header.size());
}

// The message with which the reader refuses these bytes, or "" if it accepts them.
std::string refusal(const std::string& bytes) {
    try {
        parse_safetensors(bytes, "under_test");
    } catch (const Error& e) {
        EXPECT_EQ(e.exit_code, kExitFailed);
        EXPECT_TRUE(std::string(e.what()).starts_with("under_test")) << e.what();
        return e.what();
    }
    return "";
}

void expect_refused(const std::string& bytes, const std::string& reason) {
    const std::string message = refusal(bytes);
    EXPECT_NE(message.find(reason), std::string::npos)
        << "wanted a refusal with: " << reason << "\nfound: " << (message.empty() ? "no refusal" : message);
}

SafetensorsFile sample() {
    SafetensorsFile file;
    file.metadata = {{"config", R"({"model": {"position": "full"}})"}, {"note", "\"quotes\", \xc3\xbc\n"}};
    file.tensors.push_back(make_f32_tensor("b.weight", {2, 3}, std::vector<float>{1, -2, 3.5f, 0, 1e-30f, 1e30f}));
    file.tensors.push_back({"a.step", "I64", {}, std::vector<std::byte>(8, std::byte{7})});
    file.tensors.push_back({"empty", "F32", {0, 4}, {}});
    file.tensors.push_back({"c.bytes", "U8", {3}, {std::byte{0}, std::byte{255}, std::byte{'"'}}});
    file.tensors.push_back({"empty_end", "U8", {0}, {}});
    return file;
}

std::string sample_bytes() {
    const std::vector<std::byte> bytes = safetensors_bytes(sample());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void expect_same(const SafetensorsFile& a, const SafetensorsFile& b) {
    EXPECT_EQ(a.metadata, b.metadata);
    ASSERT_EQ(a.tensors.size(), b.tensors.size());
    for (size_t i = 0; i < a.tensors.size(); ++i) {
        EXPECT_EQ(a.tensors[i].name, b.tensors[i].name);
        EXPECT_EQ(a.tensors[i].dtype, b.tensors[i].dtype);
        EXPECT_EQ(a.tensors[i].shape, b.tensors[i].shape);
        EXPECT_EQ(a.tensors[i].bytes, b.tensors[i].bytes);
    }
}

TEST(Safetensors, RoundTrips) {
    test::TemporaryFolder folder;
    write_safetensors(folder.path / "file.safetensors", sample());
    expect_same(read_safetensors(folder.path / "file.safetensors"), sample());
    write_safetensors(folder.path / "none.safetensors", {});
    expect_same(read_safetensors(folder.path / "none.safetensors"), {});
}

TEST(Safetensors, BytesAreAFunctionOfTheInputAndDataAreAligned) {
    const std::string bytes = sample_bytes();
    EXPECT_EQ(bytes, sample_bytes());
    uint64_t header_size = 0;
    std::memcpy(&header_size, bytes.data(), 8);
    EXPECT_EQ(header_size % 8, 0u);
    EXPECT_EQ(bytes.size(), 8 + header_size + 24 + 8 + 3);
    EXPECT_EQ(bytes[8], '{');
}

TEST(Safetensors, FindsTensorsAndTheirValues) {
    const SafetensorsFile file = sample();
    const Tensor* weight = find_tensor(file, "b.weight");
    ASSERT_NE(weight, nullptr);
    EXPECT_EQ(find_tensor(file, "b.weigh"), nullptr);
    const std::span<const float> values = f32_values(*weight, "FILE");
    ASSERT_EQ(values.size(), 6u);
    EXPECT_EQ(values[2], 3.5f);
    try {
        f32_values(*find_tensor(file, "a.step"), "FILE");
        ADD_FAILURE() << "an I64 tensor was taken for F32";
    } catch (const Error& e) {
        EXPECT_STREQ(e.what(), "FILE: tensor \"a.step\" has dtype \"I64\", wanted F32");
    }
    const std::vector<int64_t> shape = {288, 96};
    EXPECT_EQ(shape_text(shape), "(288, 96)");
    EXPECT_EQ(shape_text({}), "()");
}

TEST(Safetensors, RefusesToWriteWhatItWouldNotRead) {
    SafetensorsFile file = sample();
    file.metadata["sha256"] = "0";
    EXPECT_THROW(safetensors_bytes(file), Error);
    file = sample();
    file.metadata["checksum"] = "sha256";
    EXPECT_THROW(safetensors_bytes(file), Error);
    for (const char* name : {"b.weight", "__metadata__"}) {
        file = sample();
        file.tensors[1].name = name;
        EXPECT_THROW(safetensors_bytes(file), Error) << name;
    }
    file = sample();
    file.tensors[0].shape = {2, 4};
    EXPECT_THROW(safetensors_bytes(file), Error);
    file.tensors[0].shape = {-2, -3};
    EXPECT_THROW(safetensors_bytes(file), Error);
    file = sample();
    file.tensors[0].dtype = "FLOAT";
    EXPECT_THROW(safetensors_bytes(file), Error);
    file = sample();
    file.metadata["path"] = "\xff";
    EXPECT_THROW(safetensors_bytes(file), Error);
}

TEST(Safetensors, ReadsFilesOfOtherPrograms) {
    // No checksum, spaces in the header, no metadata, data in another order than the header.
    const SafetensorsFile file =
        parse_safetensors(raw_file(R"({ "x": {"shape": [1, 2], "data_offsets": [2, 6], "dtype": "F16"},
        "y": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]} }   )",
                                   "abcdef"),
                          "foreign");
    ASSERT_EQ(file.tensors.size(), 2u);
    EXPECT_EQ(file.tensors[0].name, "y");
    EXPECT_EQ(file.tensors[1].name, "x");
    EXPECT_EQ(file.tensors[1].shape, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(file.tensors[1].bytes.at(3), std::byte{'f'});
    EXPECT_EQ(refusal(raw_file("{}")), "");
}

TEST(Safetensors, ReadsTheGoldenFiles) {
    NEEDS_SHARED();
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(test::shared_folder() / "golden" / "lm_parity")) {
        if (entry.path().extension() != ".safetensors") continue;
        ++files;
        const SafetensorsFile file = read_safetensors(entry.path());
        for (const auto& [name, dtype] : {std::pair("init.head.bias", "F32"), {"grad64.head.bias", "F64"}}) {
            const Tensor* tensor = find_tensor(file, name);
            ASSERT_NE(tensor, nullptr) << entry.path() << " " << name;
            EXPECT_EQ(tensor->dtype, dtype);
            EXPECT_EQ(tensor->shape, std::vector<int64_t>{256});
        }
    }
    EXPECT_EQ(files, 17);
}

TEST(Safetensors, RefusesWhatIsNotSafetensors) {
    expect_refused("", "is empty");
    expect_refused("1234567", "7 bytes found, wanted 8");
    expect_refused("model:\n  position: full\n", "is not a safetensors file");
    expect_refused("PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0 archive/data.pkl"s, "is not a safetensors file");
    expect_refused("\x80\x02}q\x01X\x06weights", "is not a safetensors file");
    expect_refused(std::string(100, '\0'), "is not a safetensors file");
    expect_refused(std::string("\x89PNG\r\n\x1a\n"), "is not a safetensors file");
    expect_refused(raw_file("{}", "", uint64_t{1} << 63), "header length of 9223372036854775808");
    expect_refused(raw_file("{}", "", ~uint64_t{0}), "header length of 18446744073709551615");
    expect_refused(raw_file("{}", "", 0), "is not a safetensors file");
    expect_refused(raw_file("{}", "", 1), "is not a safetensors file");
    for (const char* header : {"[]  ", "null", " {} ", "\xef\xbb\xbf{}", "1234"})
        expect_refused(raw_file(header), "is not a safetensors file: no JSON object");
    for (const char* header : {"{{}}", "{\"a\"}", "{}}", "{} {}", "{\"a\":", "{\"\xff\":{}}", "{\"a\":1e999}", "{\n\n"})
        expect_refused(raw_file(header), "its header is not JSON at byte");
    expect_refused(raw_file("{}\0\0"s), "its header is not JSON at byte 10");
    expect_refused(raw_file("{\"a\";1}"), "its header is not JSON at byte 12");
}

TEST(Safetensors, ErrorsNameTheFile) {
    test::TemporaryFolder folder;
    const std::filesystem::path damaged = folder.path / "damaged";
    std::ofstream(damaged, std::ios::binary) << sample_bytes() << "x";
    for (const std::filesystem::path& path : {folder.path / "missing", folder.path, damaged}) {
        try {
            read_safetensors(path);
            ADD_FAILURE() << path << " was read";
        } catch (const Error& e) {
            EXPECT_NE(std::string(e.what()).find(path.string()), std::string::npos) << e.what();
        }
    }
}

TEST(Safetensors, RefusesTruncatedFilesWithBothSizes) {
    const std::string good = sample_bytes();
    uint64_t header_size = 0;
    std::memcpy(&header_size, good.data(), 8);
    for (size_t size = 0; size < good.size(); ++size) {
        const std::string message = refusal(good.substr(0, size));
        ASSERT_NE(message, "") << size;
        if (size < 8) continue;
        const size_t wanted = size < 8 + header_size ? 8 + header_size : good.size();
        EXPECT_NE(message.find(" is truncated: " + std::to_string(size) + " bytes found"), std::string::npos)
            << message;
        EXPECT_NE(message.find(" " + std::to_string(wanted) + " wanted"), std::string::npos) << message;
    }
    expect_refused(good + "x", "bytes too many: " + std::to_string(good.size() + 1) + " bytes found, " +
                                   std::to_string(good.size()) + " wanted");
    expect_refused(raw_file(R"({"a":{"dtype":"U8","shape":[9223372036854775807],)"
                            R"("data_offsets":[0,9223372036854775807]}})"),
                   "is truncated");
}

TEST(Safetensors, RefusesMalformedHeaders) {
    const auto expect_header_refused = [](const std::string& header, const std::string& reason) {
        expect_refused(raw_file(header, std::string(8, 'x')), reason);
    };
    // One tensor "a" with these fields.
    const auto expect_entry_refused = [&](const std::string& fields, const std::string& reason) {
        expect_header_refused("{\"a\":{" + fields + "}}", reason);
    };
    const std::string dtype = R"("dtype":"U8",)", shape = R"("shape":[8],)", offsets = R"("data_offsets":[0,8])";
    EXPECT_EQ(refusal(raw_file("{\"a\":{" + dtype + shape + offsets + "}}", "12345678")), "");

    expect_header_refused(R"({"a":[]})", "header entry \"a\" is an array, wanted an object");
    expect_header_refused(R"({"a":null})", "header entry \"a\" is null, wanted an object");
    expect_header_refused("{\"a\":{" + dtype + shape + offsets + "},\"a\":{" + dtype + shape + offsets + "}}",
                          "tensor \"a\" is there twice");
    expect_header_refused(R"({"__metadata__":{},"__metadata__":{}})", "__metadata__ is there twice");
    expect_header_refused(R"({"__metadata__":3})", "header entry \"__metadata__\" is 3");
    expect_header_refused(R"({"__metadata__":{"k":1}})", "metadata \"k\" is 1, wanted a string");
    expect_header_refused(R"({"__metadata__":{"k":true}})", "metadata \"k\" is true");
    expect_header_refused(R"({"__metadata__":{"k":{}}})", "metadata \"k\" is an object");
    expect_header_refused(R"({"__metadata__":{"k":["v"]}})", "metadata \"k\" is an array");
    expect_header_refused(R"({"__metadata__":{"k":"1","k":"2"}})", "metadata \"k\" is there twice");

    expect_entry_refused(shape + offsets, "\"a\" has no dtype");
    expect_entry_refused(dtype + offsets, "\"a\" has no shape");
    expect_entry_refused(dtype + R"("shape":[8])", "\"a\" has no data_offsets");
    expect_entry_refused(dtype + dtype + shape + offsets, "\"a\" has two dtypes");
    expect_entry_refused(dtype + shape + shape + offsets, "\"a\" has two shapes");
    expect_entry_refused(dtype + shape + offsets + "," + offsets, "\"a\" has data_offsets twice");
    expect_entry_refused(dtype + shape + offsets + R"(,"stride":[1])", "unknown field \"stride\"");
    expect_entry_refused(R"("dtype":"FLOAT",)" + shape + offsets, "unknown dtype \"FLOAT\"");
    expect_entry_refused(R"("dtype":8,)" + shape + offsets, "\"dtype\" of tensor \"a\" is 8, wanted a string");
    expect_entry_refused(R"("dtype":["U8"],)" + shape + offsets, "is an array, wanted a string");
    expect_entry_refused(R"("shape":"8",)" + dtype + offsets, "is the string \"8\", wanted an array");
    expect_entry_refused(R"("shape":{"8":1},)" + dtype + offsets, "is an object, wanted an array");

    for (const char* bad : {"-8", "8.0", "8e0", "9223372036854775808", "1e30", "true", "[8]", "{}", "\"8\"", "null"})
        expect_entry_refused(dtype + "\"shape\":[" + bad + "]," + offsets, "the shape of tensor \"a\" holds ");
    for (const char* bad : {"-1", "0.0", "18446744073709551616", "false", "[0]", "{}", "\"0\"", "null"})
        expect_entry_refused(dtype + shape + "\"data_offsets\":[" + bad + ",8]",
                             "the data_offsets of tensor \"a\" hold ");
    expect_entry_refused(dtype + shape + R"("data_offsets":[0])", "has 1 data_offsets, wanted two");
    expect_entry_refused(dtype + shape + R"("data_offsets":[])", "has 0 data_offsets, wanted two");
    expect_entry_refused(dtype + shape + R"("data_offsets":[0,8,8])", "more than two data_offsets");
    expect_entry_refused(dtype + shape + R"("data_offsets":[8,0])", "ends at 0, before it begins at 8");
    expect_entry_refused(dtype + shape + R"("data_offsets":[0,18446744073709551615])", "wanted 8 for U8 (8)");
    expect_entry_refused(dtype + R"("shape":[7],)" + offsets, "has 8 bytes (data_offsets 0 to 8), wanted 7 for U8 (7)");
    expect_entry_refused(R"("dtype":"F64","shape":[2],)" + offsets, "wanted 16 for F64 (2)");
    for (const char* huge : {"4294967296,4294967296", "9223372036854775807,9223372036854775807",
                             "9223372036854775807,9223372036854775807,0"})
        expect_entry_refused(dtype + "\"shape\":[" + huge + "]," + offsets, "is larger than 2^64 bytes");
    std::string ones = "1";
    for (int i = 0; i < 64; ++i) ones += ",1";
    expect_entry_refused(dtype + "\"shape\":[" + ones + "]," + offsets, "has more than 64 dimensions");
}

TEST(Safetensors, RefusesDataThatOverlapOrLeaveHoles) {
    const auto header = [](const std::string& a, const std::string& b) {
        return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
               R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
    };
    EXPECT_EQ(refusal(raw_file(header("[0,4]", "[4,8]"), "12345678")), "");
    expect_refused(raw_file(header("[0,4]", "[3,7]"), "1234567"), "\"b\" begins at 3, inside the tensor before it");
    expect_refused(raw_file(header("[0,4]", "[0,4]"), "1234"), "\"b\" begins at 0, inside the tensor before it");
    expect_refused(raw_file(header("[0,4]", "[5,9]"), "123456789"), "nothing describes the data from 4 to 5");
    expect_refused(raw_file(header("[1,5]", "[5,9]"), "123456789"), "nothing describes the data from 0 to 1");
    expect_refused(raw_file(header("[0,4]", "[4,8]"), "123456789"), "bytes too many");
    expect_refused(raw_file(header("[0,4]", "[4,8]"), "1234567"), "is truncated");
    expect_refused(raw_file("{}", "1"), "bytes too many");
}

TEST(Safetensors, RefusesHeadersMadeToExhaustMemory) {
    const size_t size = 20'000'000;
    expect_refused(raw_file("{\"a\":" + std::string(size, '[')), "is an array");
    std::string nested = "{";
    while (nested.size() < size) nested += "\"a\":{";
    expect_refused(raw_file(nested), "\"a\" has the unknown field \"a\"");
    std::string metadata = "{\"__metadata__\":{\"x\":\"\"";
    for (int i = 0; i < 20'000; ++i) metadata += ",\"" + std::to_string(i) + "\":\"\"";
    expect_refused(raw_file(metadata + "}}"), "more than 10000 metadata entries");
    // A long hostile name is not repeated in full.
    EXPECT_LT(refusal(raw_file("{\"" + std::string(100'000, 'a') + "\":1}")).size(), 500u);
}

TEST(Safetensors, EveryFlippedBitIsNoticed) {
    const std::string good = sample_bytes();
    ASSERT_EQ(refusal(good), "");
    for (size_t i = 0; i < good.size(); ++i)
        for (int bit = 0; bit < 8; ++bit) {
            std::string bad = good;
            bad[i] = static_cast<char>(bad[i] ^ 1 << bit);
            EXPECT_NE(refusal(bad), "") << "byte " << i << ", bit " << bit;
        }
}

TEST(Safetensors, DamagedDataAreCalledDamaged) {
    std::string bad = sample_bytes();
    bad.back() ^= 1;
    expect_refused(bad, "is damaged, or was changed by another program: its sha256 is ");
    // The value of a metadata text: still a well-formed file.
    bad = sample_bytes();
    bad.replace(bad.find("position"), 1, "P");
    expect_refused(bad, "is damaged, or was changed by another program: its sha256 is ");
    bad = sample_bytes();
    bad.replace(bad.find("\"sha256\":\""), 8, "\"sha257\"");
    expect_refused(bad, "is damaged: its sha256 checksum is missing");
    bad = sample_bytes();
    bad.replace(bad.find("\"sha256\":\"") + 10, 2, "\",");
    EXPECT_NE(refusal(bad), "");
    expect_refused(raw_file(R"({"__metadata__":{"sha256":"12"}})"), "is damaged: \"12\" is no sha256 checksum");
    expect_refused(raw_file(R"({"__metadata__":{"sha256":")" + std::string(64, '0') + "\"}}"), "is damaged");
}

TEST(Safetensors, MutatedFilesAreReadOrRefused) {
    // Without a checksum, so that mutations get past it. Any outcome but a result or an Error fails the test, and so
    // does a result whose tensors are not as large as they say.
    const std::string header =
        R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
        R"("b":{"dtype":"I64","shape":[],"data_offsets":[24,32]},"c":{"dtype":"U8","shape":[3],"data_offsets":[32,35]}})";
    const std::string good = raw_file(header, std::string(35, 'd'));
    ASSERT_EQ(refusal(good), "");
    const std::string pieces[] = {"[",
                                  "]",
                                  "{",
                                  "}",
                                  "\"",
                                  ",",
                                  ":",
                                  "0",
                                  "9223372036854775807",
                                  "18446744073709551615",
                                  "-1",
                                  "1e9",
                                  "null",
                                  "true",
                                  "\\u0000",
                                  "\"a\":",
                                  "\"dtype\":\"U8\",",
                                  std::string(1, '\0')};

    std::mt19937 random(20240601);
    const auto below = [&](size_t n) { return random() % n; };
    int accepted = 0;
    for (int round = 0; round < 20000; ++round) {
        std::string mutant = good;
        for (size_t changes = 1 + below(4); changes > 0; --changes) {
            const size_t at = below(mutant.size());
            switch (below(5)) {
                case 0:
                    mutant[at] = static_cast<char>(random());
                    break;
                case 1:
                    mutant.erase(at, 1 + below(8));
                    break;
                case 2:
                    mutant.insert(at, pieces[below(std::size(pieces))]);
                    break;
                case 3:
                    mutant.insert(at, mutant.substr(below(mutant.size()), 1 + below(40)));
                    break;
                case 4:
                    mutant[at] = static_cast<char>('0' + below(10));
                    break;
            }
            if (mutant.size() < 9) break;
        }
        // Most mutants change the length of the header; without this they would all fail for that reason alone.
        if (mutant.size() > 43 && below(4) != 0) {
            const uint64_t header_size = mutant.size() - 8 - 35;
            std::memcpy(mutant.data(), &header_size, 8);
        }
        try {
            const SafetensorsFile file = parse_safetensors(mutant, "mutant");
            ++accepted;
            for (const Tensor& tensor : file.tensors) {
                size_t values = 1;
                for (const int64_t n : tensor.shape) values *= static_cast<size_t>(n);
                ASSERT_EQ(tensor.bytes.size() % std::max<size_t>(values, 1), 0u);
                ASSERT_EQ(tensor.bytes.empty(), values == 0);
            }
        } catch (const Error&) {
        }
    }
    EXPECT_GT(accepted, 200);
    EXPECT_LT(accepted, 18000);
}

}  // namespace
}  // namespace jetlag

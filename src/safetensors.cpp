#include "src/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "src/error.h"
#include "src/files.h"

namespace jetlag {

static_assert(std::endian::native == std::endian::little, "tensors are copied between memory and file as they are");

// The largest header that the reference implementation of the format accepts.
static constexpr uint64_t kMaxHeader = 100'000'000;
// Bounds on what costs far more memory than text in the header; no real file comes near them.
static constexpr size_t kMaxDimensions = 64;
static constexpr size_t kMaxMetadata = 10'000;

// The checksum takes two keys, so that no single damaged byte can turn a checked file into an unchecked one.
static const std::string kChecksumKindKey = "checksum";
static const std::string kChecksumKind = "sha256";
static const std::string kChecksumKey = "sha256";
static constexpr size_t kChecksumDigits = 64;

// Bytes of one value; 0 for a dtype that does not exist.
static uint64_t dtype_size(std::string_view dtype) {
    static const std::map<std::string_view, uint64_t> sizes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
        {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
        {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8},
    };
    const auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

// A text from a file as it may stand in an error message: quoted, on one line, not endless.
static std::string shown(std::string_view text) {
    constexpr size_t kMaxShown = 80;
    std::string result(text.substr(0, kMaxShown));
    for (char& c : result)
        if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = '?';
    return "\"" + result + (text.size() > kMaxShown ? "...\"" : "\"");
}

// Bytes that dtype and shape make, or nothing if the dtype does not exist or the product leaves 64 bits.
static std::optional<uint64_t> tensor_size(std::string_view dtype, std::span<const int64_t> shape) {
    uint64_t size = dtype_size(dtype);
    if (size == 0) return std::nullopt;
    for (const int64_t n : shape)
        if (n < 0 || __builtin_mul_overflow(size, static_cast<uint64_t>(n), &size)) return std::nullopt;
    return size;
}

namespace {

struct HeaderEntry {
    Tensor tensor;  // without its bytes
    uint64_t begin = 0, end = 0;
};

// Receives the header's JSON from nlohmann's SAX parser, which neither recurses nor builds a tree: a hostile
// header is refused where it stops being one, before it costs memory.
struct HeaderReader {
    using json = nlohmann::json;

    std::string file;
    std::map<std::string, std::string> metadata;
    std::vector<HeaderEntry> entries;

    enum class Place { start, top, metadata, entry, shape, offsets, end } place = Place::start;
    std::string field;  // key of the innermost object
    bool has_metadata = false, has_dtype = false, has_shape = false;
    std::optional<size_t> offset_count;

    std::string entry_name() const { return "tensor " + shown(entries.back().tensor.name); }

    [[noreturn]] void refuse(std::string_view found) const {
        switch (place) {
            case Place::start:
            case Place::end:
                fail("{} is not a safetensors file: its header is {}, wanted a JSON object", file, found);
            case Place::top:
                fail("{}: header entry {} is {}, wanted an object", file, shown(field), found);
            case Place::metadata:
                fail("{}: metadata {} is {}, wanted a string", file, shown(field), found);
            case Place::entry:
                fail("{}: {} of {} is {}, wanted {}", file, shown(field), entry_name(), found,
                     field == "dtype" ? "a string" : "an array");
            case Place::shape:
                fail("{}: the shape of {} holds {}, wanted whole numbers from 0 to 2^63-1", file, entry_name(), found);
            case Place::offsets:
                fail("{}: the data_offsets of {} hold {}, wanted two whole numbers", file, entry_name(), found);
        }
        fail("{}: the header holds {}", file, found);
    }

    bool null() { refuse("null"); }
    bool boolean(bool value) { refuse(value ? "true" : "false"); }
    bool number_integer(json::number_integer_t value) { refuse(fmt::format("{}", value)); }  // these are negative
    bool number_float(json::number_float_t, const std::string& text) { refuse(shown(text)); }
    bool binary(json::binary_t&) { refuse("binary data"); }

    bool number_unsigned(json::number_unsigned_t value) {
        if (place == Place::shape && value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
            std::vector<int64_t>& shape = entries.back().tensor.shape;
            if (shape.size() == kMaxDimensions)
                fail("{}: {} has more than {} dimensions", file, entry_name(), kMaxDimensions);
            shape.push_back(static_cast<int64_t>(value));
        } else if (place == Place::offsets) {
            if (*offset_count == 2) fail("{}: {} has more than two data_offsets", file, entry_name());
            (*offset_count == 0 ? entries.back().begin : entries.back().end) = value;
            ++*offset_count;
        } else {
            refuse(fmt::format("{}", value));
        }
        return true;
    }

    bool string(std::string& value) {
        if (place == Place::metadata) {
            if (metadata.size() == kMaxMetadata) fail("{}: more than {} metadata entries", file, kMaxMetadata);
            if (!metadata.emplace(field, value).second) fail("{}: metadata {} is there twice", file, shown(field));
        } else if (place == Place::entry && field == "dtype") {
            if (has_dtype) fail("{}: {} has two dtypes", file, entry_name());
            if (dtype_size(value) == 0) fail("{}: {} has the unknown dtype {}", file, entry_name(), shown(value));
            entries.back().tensor.dtype = value;
            has_dtype = true;
        } else {
            refuse("the string " + shown(value));
        }
        return true;
    }

    bool start_object(size_t) {
        if (place == Place::start) {
            place = Place::top;
        } else if (place == Place::top && field == "__metadata__") {
            if (has_metadata) fail("{}: __metadata__ is there twice", file);
            has_metadata = true;
            place = Place::metadata;
        } else if (place == Place::top) {
            entries.emplace_back().tensor.name = field;
            has_dtype = has_shape = false;
            offset_count.reset();
            place = Place::entry;
        } else {
            refuse("an object");
        }
        return true;
    }

    bool key(std::string& name) {
        field = name;
        if (place == Place::entry && field != "dtype" && field != "shape" && field != "data_offsets")
            fail("{}: {} has the unknown field {}, wanted dtype, shape and data_offsets", file, entry_name(),
                 shown(field));
        return true;
    }

    bool end_object() {
        if (place == Place::entry) {
            if (!has_dtype) fail("{}: {} has no dtype", file, entry_name());
            if (!has_shape) fail("{}: {} has no shape", file, entry_name());
            if (!offset_count) fail("{}: {} has no data_offsets", file, entry_name());
        }
        place = place == Place::top ? Place::end : Place::top;
        return true;
    }

    bool start_array(size_t) {
        if (place == Place::entry && field == "shape") {
            if (has_shape) fail("{}: {} has two shapes", file, entry_name());
            has_shape = true;
            place = Place::shape;
        } else if (place == Place::entry && field == "data_offsets") {
            if (offset_count) fail("{}: {} has data_offsets twice", file, entry_name());
            offset_count = 0;
            place = Place::offsets;
        } else {
            refuse("an array");
        }
        return true;
    }

    bool end_array() {
        if (place == Place::offsets && *offset_count != 2)
            fail("{}: {} has {} data_offsets, wanted two", file, entry_name(), *offset_count);
        place = Place::entry;
        return true;
    }

    bool parse_error(size_t position, const std::string&, const json::exception&) { refuse_text(position); }

    // `position` counts from 1.
    [[noreturn]] void refuse_text(size_t position) const {
        fail("{} is not a safetensors file, or damaged: its header is not JSON at byte {}", file, 7 + position);
    }
};

}  // namespace

// Sorts the entries by offset and checks that they have different names, are as long as dtype and shape say, and
// lie back to back from the start of the data to the end of the file.
static void check_layout(std::vector<HeaderEntry>& entries, const std::string& file, uint64_t file_size,
                         uint64_t data_start) {
    std::vector<std::string_view> names;
    for (const HeaderEntry& entry : entries) names.push_back(entry.tensor.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) fail("{}: tensor {} is there twice", file, shown(*twice));

    for (const auto& [tensor, begin, end] : entries) {
        const std::string name = shown(tensor.name);
        const std::optional<uint64_t> size = tensor_size(tensor.dtype, tensor.shape);
        if (!size) fail("{}: tensor {} of shape {} is larger than 2^64 bytes", file, name, shape_text(tensor.shape));
        if (begin > end) fail("{}: tensor {} ends at {}, before it begins at {}", file, name, end, begin);
        if (end - begin != *size)
            fail("{}: tensor {} has {} bytes (data_offsets {} to {}), wanted {} for {} {}", file, name, end - begin,
                 begin, end, *size, tensor.dtype, shape_text(tensor.shape));
    }

    std::stable_sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    uint64_t position = 0;
    for (const auto& [tensor, begin, end] : entries) {
        if (begin < position)
            fail("{}: tensor {} begins at {}, inside the tensor before it, which ends at {}", file, shown(tensor.name),
                 begin, position);
        if (begin > position)
            fail("{}: nothing describes the data from {} to {}, before tensor {}", file, position, begin,
                 shown(tensor.name));
        position = end;
    }

    const uint64_t data_size = file_size - data_start;
    if (position > data_size) {
        uint64_t wanted = 0;
        if (__builtin_add_overflow(data_start, position, &wanted)) wanted = std::numeric_limits<uint64_t>::max();
        fail("{} is truncated: {} bytes found, {} wanted", file, file_size, wanted);
    }
    if (position < data_size)
        fail("{} has bytes too many: {} bytes found, {} wanted", file, file_size, data_start + position);
}

// Where the digits of the checksum stand in the header as this file writes it, or nothing. A JSON string cannot
// hold `"sha256":"`, since its quotes would have backslashes.
static std::optional<size_t> find_checksum(std::string_view contents, std::string_view digits) {
    const std::string prefix = "\"" + kChecksumKey + "\":\"";
    const size_t found = contents.find(prefix + std::string(digits) + "\"");
    if (digits.size() != kChecksumDigits || found == std::string_view::npos) return std::nullopt;
    return found + prefix.size();
}

// Checks the checksum if the file has one, and takes its keys out of the metadata. `contents` is the whole file.
static void check_checksum(std::map<std::string, std::string>& metadata, std::string& contents, size_t data_start,
                           const std::string& file) {
    const auto kind = metadata.find(kChecksumKindKey), checksum = metadata.find(kChecksumKey);
    const bool wants_checksum = kind != metadata.end() && kind->second == kChecksumKind;
    if (checksum == metadata.end()) {
        if (wants_checksum) fail("{} is damaged: its {} checksum is missing", file, kChecksumKind);
        return;
    }
    const std::string wanted = checksum->second;
    const std::optional<size_t> at = find_checksum(std::string_view(contents).substr(0, data_start), wanted);
    if (!at) fail("{} is damaged: {} is no {} checksum", file, shown(wanted), kChecksumKind);
    contents.replace(*at, kChecksumDigits, kChecksumDigits, '0');
    const std::string found = sha256_hex(contents);
    if (found != wanted)
        fail("{} is damaged, or was changed by another program: its {} is {}, wanted {}", file, kChecksumKind, found,
             wanted);
    metadata.erase(checksum);
    if (wants_checksum) metadata.erase(kChecksumKindKey);
}

SafetensorsFile read_safetensors(const std::filesystem::path& path) {
    return parse_safetensors(read_file(path), path.string());
}

SafetensorsFile parse_safetensors(std::string contents, const std::string& file) {
    const uint64_t size = contents.size();
    if (size == 0) fail("{} is empty, wanted a safetensors file", file);
    if (size < 8)
        fail("{} is not a safetensors file, or truncated: {} bytes found, wanted 8 for the header length alone", file,
             size);
    uint64_t header_size = 0;
    std::memcpy(&header_size, contents.data(), 8);
    if (header_size > kMaxHeader)
        fail("{} is not a safetensors file: its first 8 bytes would be a header length of {}, wanted at most {}", file,
             header_size, kMaxHeader);
    if (header_size < 2 || (size > 8 && contents[8] != '{'))
        fail("{} is not a safetensors file: no JSON object follows the header length of {}", file, header_size);
    if (header_size > size - 8)
        fail("{} is truncated: {} bytes found, at least {} wanted (8 and a header of {})", file, size, 8 + header_size,
             header_size);

    HeaderReader header;
    header.file = file;
    const std::string_view header_text = std::string_view(contents).substr(8, header_size);
    // The parser would take a NUL for the end of the text.
    if (const size_t nul = header_text.find('\0'); nul != std::string_view::npos) header.refuse_text(nul + 1);
    nlohmann::json::sax_parse(header_text.begin(), header_text.end(), &header);
    const size_t data_start = 8 + header_size;
    check_layout(header.entries, file, size, data_start);
    check_checksum(header.metadata, contents, data_start, file);

    SafetensorsFile result;
    result.metadata = std::move(header.metadata);
    for (HeaderEntry& entry : header.entries) {
        const auto data = std::as_bytes(std::span(contents).subspan(data_start + entry.begin, entry.end - entry.begin));
        entry.tensor.bytes.assign(data.begin(), data.end());
        result.tensors.push_back(std::move(entry.tensor));
    }
    return result;
}

std::vector<std::byte> safetensors_bytes(const SafetensorsFile& file) {
    nlohmann::ordered_json header;
    nlohmann::ordered_json& metadata = header["__metadata__"];
    for (const auto& [key, value] : file.metadata) {
        if (key == kChecksumKey || key == kChecksumKindKey)
            fail("the metadata key {} is for the checksum of a safetensors file", shown(key));
        metadata[key] = value;
    }
    if (file.metadata.size() + 2 > kMaxMetadata) fail("more than {} metadata entries", kMaxMetadata - 2);
    metadata[kChecksumKindKey] = kChecksumKind;
    metadata[kChecksumKey] = std::string(kChecksumDigits, '0');

    uint64_t position = 0;
    for (const Tensor& tensor : file.tensors) {
        const std::string name = shown(tensor.name);
        const std::optional<uint64_t> wanted = tensor_size(tensor.dtype, tensor.shape);
        if (header.contains(tensor.name)) fail("tensor name {} is taken", name);
        if (tensor.shape.size() > kMaxDimensions) fail("tensor {} has more than {} dimensions", name, kMaxDimensions);
        if (!wanted || tensor.bytes.size() != *wanted)
            fail("tensor {} has {} bytes, which do not make a tensor {} {}", name, tensor.bytes.size(),
                 shown(tensor.dtype), shape_text(tensor.shape));
        header[tensor.name] = {{"dtype", tensor.dtype},
                               {"shape", tensor.shape},
                               {"data_offsets", {position, position + tensor.bytes.size()}}};
        position += tensor.bytes.size();
    }

    std::string contents(8, '\0');
    try {
        contents += header.dump();
    } catch (const nlohmann::json::exception&) {
        fail("a tensor name or a metadata text is not UTF-8");
    }
    contents.resize((contents.size() + 7) / 8 * 8, ' ');
    const uint64_t header_size = contents.size() - 8;
    if (header_size > kMaxHeader) fail("the safetensors header has {} bytes, at most {} fit", header_size, kMaxHeader);
    std::memcpy(contents.data(), &header_size, 8);

    contents.reserve(contents.size() + position);
    for (const Tensor& tensor : file.tensors)
        contents.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    const std::string digits(kChecksumDigits, '0');
    contents.replace(find_checksum(contents, digits).value(), kChecksumDigits, sha256_hex(contents));

    const auto bytes = std::as_bytes(std::span(contents));
    return {bytes.begin(), bytes.end()};
}

void write_safetensors(const std::filesystem::path& path, const SafetensorsFile& file) {
    write_file_atomically(path, safetensors_bytes(file));
}

Tensor make_f32_tensor(std::string name, std::vector<int64_t> shape, std::span<const float> values) {
    const auto bytes = std::as_bytes(values);
    return {std::move(name), "F32", std::move(shape), {bytes.begin(), bytes.end()}};
}

std::span<const float> f32_values(const Tensor& tensor, const std::string& file) {
    if (tensor.dtype != "F32")
        fail("{}: tensor {} has dtype {}, wanted F32", file, shown(tensor.name), shown(tensor.dtype));
    return {reinterpret_cast<const float*>(tensor.bytes.data()), tensor.bytes.size() / sizeof(float)};
}

const Tensor* find_tensor(const SafetensorsFile& file, std::string_view name) {
    for (const Tensor& tensor : file.tensors)
        if (tensor.name == name) return &tensor;
    return nullptr;
}

std::string shape_text(std::span<const int64_t> shape) {
    return fmt::format("({})", fmt::join(shape, ", "));
}

}  // namespace jetlag

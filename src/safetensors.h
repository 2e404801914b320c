// The safetensors file format (https://github.com/huggingface/safetensors): 8 bytes of little-endian header
// length, a JSON header, then the tensors' bytes back to back.
//
// jetlag's own files carry "checksum": "sha256" and "sha256": the SHA-256 of the whole file with those 64 hex digits
// replaced by '0', in __metadata__. A file that has either is checked when read; a file of another program need not
// have them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace jetlag {

struct Tensor {
    std::string name;
    std::string dtype;  // as in the header: "F32", "F64", "I64", "U8", ...
    std::vector<int64_t> shape;
    std::vector<std::byte> bytes;  // row-major, little-endian
};

struct SafetensorsFile {
    std::map<std::string, std::string> metadata;  // __metadata__ without the checksum
    std::vector<Tensor> tensors;                  // in the order of their data
};

// Reads and checks a file. Every fault is an Error that names the file and says what was found and wanted:
// missing; empty or shorter than 8 bytes; not safetensors (header length impossible, header not a JSON object);
// truncated or with bytes too many; offsets that overlap, leave holes, or disagree with dtype and shape; unknown
// dtype; a name or key given twice; a checksum that does not match (the file is damaged). No input makes it crash or
// take more than a few times its own size.
SafetensorsFile read_safetensors(const std::filesystem::path& path);

// The same for contents in memory, which errors call `file`.
SafetensorsFile parse_safetensors(std::string contents, const std::string& file);

// Serialises the tensors in their order, with the checksum in __metadata__. The data start 8-byte aligned. The result
// is a pure function of its input: same tensors and metadata, same bytes. Errors: "checksum" or "sha256" among the
// metadata, a name given twice, bytes that do not fit dtype and shape, text that is not UTF-8.
std::vector<std::byte> safetensors_bytes(const SafetensorsFile& file);

// write_file_atomically of safetensors_bytes.
void write_safetensors(const std::filesystem::path& path, const SafetensorsFile& file);

// A tensor from values; the values of an F32 tensor. `file` names the file in errors (wrong dtype).
Tensor make_f32_tensor(std::string name, std::vector<int64_t> shape, std::span<const float> values);
std::span<const float> f32_values(const Tensor& tensor, const std::string& file);

// nullptr if there is none.
const Tensor* find_tensor(const SafetensorsFile& file, std::string_view name);

// "(288, 96)".
std::string shape_text(std::span<const int64_t> shape);

}  // namespace jetlag

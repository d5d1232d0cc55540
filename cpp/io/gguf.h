// GGUF, the model file: a mapping seen as metadata and named tensors. Opening one checks all of it,
// as hostile input. Nothing is copied: keys, strings and tensors live as long as the GgufFile.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "io/mapped_file.h"

namespace h2o {

// The type of a metadata value. The numbers are the file's.
enum class GgufType : uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

// A metadata value, still encoded: unaligned, and each string with its u64 length in front.
struct GgufValue {
  GgufType type = GgufType::u8;
  GgufType element_type = GgufType::u8;   // of an array's elements; else the same as `type`
  uint64_t count = 1;                     // of an array's elements; else 1
  std::span<const std::byte> bytes = {};  // the value, or the elements one after the other
};

std::string type_name(const GgufValue& value);  // "u32", "array of string"

struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;  // see find_dtype(); always one that it knows
  int n_dims = 0;
  std::array<int64_t, 4> dims = {1, 1, 1, 1};  // fastest first: [cols, rows, ...]
  std::span<const std::byte> data;
};

class GgufFile {
 public:
  // Throws FileError, or FormatError naming the key or tensor that is wrong.
  explicit GgufFile(const std::filesystem::path& path) : GgufFile(MappedFile(path)) {}
  explicit GgufFile(MappedFile file);

  const std::string& path() const { return file_.path(); }
  uint32_t version() const { return version_; }

  // Metadata, in the order of the file.
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }
  const GgufValue* find(std::string_view key) const;  // nullptr where there is none

  // The value of a key. A missing key and a value of another type are a FormatError.
  int64_t integer(std::string_view key) const;  // of any integer type, if it fits
  double number(std::string_view key) const;    // of any float or integer type
  bool boolean(std::string_view key) const;
  std::string_view string(std::string_view key) const;

  // The elements of a key's array, on the same terms.
  std::vector<int64_t> integers(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  std::vector<bool> booleans(std::string_view key) const;
  std::vector<std::string_view> strings(std::string_view key) const;

  // The value of a key that may be missing. A value of another type is still a FormatError.
  int64_t integer_or(std::string_view key, int64_t fallback) const {
    return find(key) ? integer(key) : fallback;
  }
  double number_or(std::string_view key, double fallback) const {
    return find(key) ? number(key) : fallback;
  }
  bool boolean_or(std::string_view key, bool fallback) const {
    return find(key) ? boolean(key) : fallback;
  }
  std::string_view string_or(std::string_view key, std::string_view fallback) const {
    return find(key) ? string(key) : fallback;
  }

  // Tensors, in the order of the file.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* find_tensor(std::string_view name) const;  // nullptr where there is none

  // One of these tensors as the kernels see it: a matrix, a vector as its single row, or the
  // n_matrices of three dimensions one below another. Throws FormatError for a type that h2o does
  // not compute on, for four dimensions, or for another number of matrices.
  // Its bytes are the mapping's: they can be read only.
  Tensor view(const GgufTensor& tensor, int64_t n_matrices = 1) const;

 private:
  class Reader;

  void read_metadata(Reader& reader, uint64_t n_keys);
  void read_tensors(Reader& reader, uint64_t n_tensors);
  uint64_t alignment() const;

  MappedFile file_;
  uint32_t version_ = 0;
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> metadata_index_;
  std::unordered_map<std::string_view, size_t> tensor_index_;
};

}  // namespace h2o

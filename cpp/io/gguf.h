// GgufFile: a memory-mapped GGUF file as metadata and named tensors. Opening validates everything
// as hostile input. Nothing is copied: keys, strings and tensors are valid as long as the GgufFile.
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
#include "io/gguf_value.h"
#include "io/mapped_file.h"

namespace h2o {

struct GgufTensor {
  std::string_view name;
  uint32_t type = 0;  // see find_dtype(); always a known type
  int n_dims = 0;
  std::array<int64_t, 4> dims = {1, 1, 1, 1};  // fastest first: [cols, rows, ...]
  std::span<const std::byte> data;
};

class GgufFile {
 public:
  // Throws FileError, or FormatError naming the invalid key or tensor.
  explicit GgufFile(const std::filesystem::path& path) : GgufFile(MappedFile(path)) {}
  explicit GgufFile(MappedFile file);

  const std::string& path() const { return file_.path(); }
  uint32_t version() const { return version_; }

  // Metadata, in file order.
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }
  const GgufValue* find(std::string_view key) const;  // nullptr if missing

  // The value of a key. Throws FormatError if the key is missing or has another type.
  int64_t integer(std::string_view key) const;  // of any integer type, if it fits
  double number(std::string_view key) const;    // of any float or integer type
  bool boolean(std::string_view key) const;
  std::string_view string(std::string_view key) const;

  // The elements of an array, under the same conditions.
  std::vector<int64_t> integers(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;
  std::vector<bool> booleans(std::string_view key) const;
  std::vector<std::string_view> strings(std::string_view key) const;

  // The value of an optional key. Throws FormatError if it has another type.
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

  // Tensors, in file order.
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* find_tensor(std::string_view name) const;  // nullptr if missing

  // The number of bytes of the file from a place in it on.
  size_t bytes_after(const std::byte* at) const {
    return static_cast<size_t>(file_.bytes().data() + file_.bytes().size() - at);
  }

  // A tensor as a matrix: a vector becomes one row, and the n_matrices of a 3-D tensor are stacked
  // vertically. Throws FormatError for an unsupported type, for four dimensions, or for another
  // number of matrices. The data is the read-only mapping.
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

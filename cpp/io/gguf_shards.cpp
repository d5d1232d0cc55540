#include "io/gguf_shards.h"

#include <cstdio>

#include "core/error.h"
#include "io/utf8_path.h"

namespace h2o {
namespace {

constexpr int64_t kMaxFiles = 99999;  // five digits in the file name

// "-00002-of-00003.gguf"; i is zero-based.
std::string ending(int64_t i, int64_t n) {
  char text[32];
  std::snprintf(text, sizeof(text), "-%05d-of-%05d.gguf", static_cast<int>(i + 1),
                static_cast<int>(n));
  return text;
}

}  // namespace

GgufShards::GgufShards(const std::filesystem::path& path) {
  files_->emplace_back(path);
  int64_t n_files = first_file().integer_or("split.count", 1);
  const auto fail = [](const GgufFile& file, const auto&... what) {
    throw FormatError(text("[gguf] ", file.path(), ": ", what...));
  };
  if (n_files < 0 || n_files > kMaxFiles) fail(first_file(), "split.count is ", n_files);
  if (n_files == 0) n_files = 1;  // a model merged by llama.cpp
  const int64_t number =
      n_files > 1 ? first_file().integer("split.no") : first_file().integer_or("split.no", 0);
  if (number < 0 || number > kMaxFiles) fail(first_file(), "split.no is ", number);
  if (number != 0) {
    fail(first_file(), "is file ", number + 1, " of ", n_files,
         " of a split model, open the first one");
  }
  const std::string name = utf8(path.filename());
  const std::string end = n_files > 1 ? ending(0, n_files) : "";
  if (!name.ends_with(end)) fail(first_file(), "the name of this split model must end in ", end);

  const std::string stem = name.substr(0, name.size() - end.size());
  size_t n_tensors = first_file().tensors().size();
  for (int64_t i = 1; i < n_files; ++i) {
    files_->emplace_back(path.parent_path() / path_of(stem + ending(i, n_files)));
    const GgufFile& file = files_->back();
    if (file.integer("split.count") != n_files || file.integer("split.no") != i) {
      fail(file, "is not file ", i + 1, " of ", n_files, " of ", utf8(path));
    }
    for (const GgufTensor& tensor : file.tensors()) {
      for (size_t earlier = 0; earlier + 1 < files_->size(); ++earlier) {
        if (files()[earlier].find_tensor(tensor.name) != nullptr) {
          fail(file, "tensor ", quoted(tensor.name), " is in ", files()[earlier].path(), " too");
        }
      }
    }
    n_tensors += file.tensors().size();
  }
  const int64_t expected =
      first_file().integer_or("split.tensors.count", static_cast<int64_t>(n_tensors));
  if (expected != static_cast<int64_t>(n_tensors)) {
    fail(first_file(), "the model has ", n_tensors, " tensors, split.tensors.count is ", expected);
  }
}

Tensor GgufShards::tensor(std::string_view name, int64_t n_matrices) const {
  for (const GgufFile& file : files()) {
    if (const GgufTensor* tensor = file.find_tensor(name)) return file.view(*tensor, n_matrices);
  }
  return {};
}

}  // namespace h2o

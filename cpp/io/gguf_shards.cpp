#include "io/gguf_shards.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

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

// "model.gguf.part1of2": bytes of a file that was cut, not a part that can be read alone.
bool is_cut(std::string_view name) {
  const auto digits = [&name] {
    const size_t n = name.size() - std::min(name.size(), name.find_last_not_of("0123456789") + 1);
    name.remove_suffix(n);
    return n > 0;
  };
  if (!digits() || !name.ends_with("of")) return false;
  name.remove_suffix(2);
  return digits() && name.ends_with(".part");
}

// Does another GGUF file follow the tensors of the first?
bool is_joined(const GgufFile& file) {
  const std::byte* end = nullptr;
  for (const GgufTensor& tensor : file.tensors()) {
    end = std::max(end, tensor.data.data() + tensor.data.size());
  }
  constexpr std::string_view kMagic = "GGUF";
  constexpr size_t kMostPadding = 4096;
  if (end == nullptr) return false;
  const auto* from = reinterpret_cast<const char*>(end);
  const std::string_view rest(from, std::min(file.bytes_after(end), kMostPadding + kMagic.size()));
  const size_t at = rest.find_first_not_of('\0');
  return at != rest.npos && rest.substr(at).starts_with(kMagic);
}

}  // namespace

GgufShards::GgufShards(const std::filesystem::path& path) {
  if (is_cut(utf8(path.filename())) && std::filesystem::exists(path)) {
    throw FormatError(concat("[gguf] ", utf8(path), ": a piece of a file that was cut; join all ",
                             "pieces in order (cat NAME.part1of2 NAME.part2of2 > NAME)"));
  }
  files_->emplace_back(path);
  if (first_file().integer_or("split.count", 1) > 1 && is_joined(first_file())) {
    throw FormatError(concat("[gguf] ", first_file().path(), ": several files of a split model ",
                             "that were joined byte by byte; take the files as they were and open ",
                             "the first, or join them by llama.cpp's llama-gguf-split --merge"));
  }
  int64_t n_files = first_file().integer_or("split.count", 1);
  const auto fail = [](const GgufFile& file, const auto&... what) {
    throw FormatError(concat("[gguf] ", file.path(), ": ", what...));
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

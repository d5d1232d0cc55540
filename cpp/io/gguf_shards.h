// GgufShards: one model in one GGUF file, or in several that were split.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf.h"

namespace h2o {

class GgufShards {
 public:
  // Opens `path` and, when its metadata has split.count > 1, the files
  // NAME-00002-of-0000N.gguf ... beside it. Throws FileError, FormatError.
  explicit GgufShards(const std::filesystem::path& path);

  // The first file: it has the model's metadata.
  const GgufFile& head() const { return files_.front(); }
  const std::vector<GgufFile>& files() const { return files_; }
  const std::string& path() const { return head().path(); }

  // A tensor of any of the files; an empty Tensor where there is none.
  // Throws FormatError where GgufFile::view() does.
  Tensor tensor(std::string_view name, int64_t n_matrices = 1) const;

 private:
  std::vector<GgufFile> files_;
};

}  // namespace h2o

// GgufShards: one model in one GGUF file or in several (split files).
#pragma once

#include <filesystem>
#include <memory>
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

  // The first file, which has the model's metadata.
  const GgufFile& first_file() const { return files_->front(); }
  // The same, with shared ownership.
  std::shared_ptr<GgufFile> shared_first_file() const { return {files_, files_->data()}; }
  const std::vector<GgufFile>& files() const { return *files_; }
  const std::string& path() const { return first_file().path(); }

  // The tensor from whichever file has it; an empty Tensor if none does. Throws FormatError as
  // GgufFile::view() does.
  Tensor tensor(std::string_view name, int64_t n_matrices = 1) const;

 private:
  std::shared_ptr<std::vector<GgufFile>> files_ = std::make_shared<std::vector<GgufFile>>();
};

}  // namespace h2o

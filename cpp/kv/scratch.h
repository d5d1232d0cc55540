// Memory that the layers of a cache use in each pass, one after another: staged rows, the back
// end's workspace, a table of rotations, and a list of the sequences' archives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "kv/archive.h"
#include "kv/shape.h"
#include "kv/view.h"

namespace h2o {

class KvScratch {
 public:
  KvScratch() = default;

  // Allocates what layers of this shape need for shape.max_rows rows. archive: null without one.
  // Throws OutOfMemory.
  KvScratch(Backend& backend, std::span<const KvView> layers, const KvShape& shape,
            const KvArchive* archive);

  // Makes the layers use it.
  void give_to(std::span<KvView> layers) const;

 private:
  struct Staging {
    int64_t k, v, scores, norms;  // offsets
  };

  bool archives(int32_t layer) const {
    return archive_ != nullptr && !archive_->kv_heads(layer).empty();
  }

  int32_t max_rows_ = 0;
  int32_t n_kv_heads_ = 0;
  const KvArchive* archive_ = nullptr;
  std::vector<Staging> staging_;  // of each layer
  int64_t archives_at_ = 0, heads_at_ = 0, workspace_at_ = 0;
  Buffer memory_;
  Buffer rope_table_;  // of all ranks, if sequences may roll
};

}  // namespace h2o

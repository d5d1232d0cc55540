// Memory that the layers of a cache use in each pass, one after another: staged rows, the back
// end's workspace, a table of rotations, and a list of the sequences' archives.
#pragma once

#include <span>

#include "backend/backend.h"
#include "kv/archive.h"
#include "kv/shape.h"
#include "kv/view.h"

namespace h2o {

class KvScratch {
 public:
  KvScratch() = default;

  // Allocates what layers of this shape need for shape.max_rows rows, and makes them use it.
  // archive: null without one. Throws OutOfMemory, and then leaves the layers as they are.
  KvScratch(Backend& backend, std::span<KvView> layers, const KvShape& shape,
            const KvArchive* archive);

 private:
  Buffer memory_;
  Buffer rope_table_;  // of all ranks, if sequences may roll
};

}  // namespace h2o

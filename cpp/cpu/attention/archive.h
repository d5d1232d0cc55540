// ArchiveWriter: archives the tokens that one kv_head evicts.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"
#include "kv/archive.h"
#include "kv/rows.h"

namespace h2o {

class ArchiveWriter {
 public:
  // `scratch`: [4, head_dim]
  ArchiveWriter(const CpuKernels& kernels, const KvView& cache, int32_t sequence, int32_t kv_head,
                float* scratch);

  // Adds the token in `row`, before it is overwritten. Call bound() after the last one of a page.
  void add(const KvRow& row, int32_t position) const;
  void bound(int32_t page) const;

 private:
  void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to) const;

  const CpuKernels& kernels_;
  const KvView& cache_;
  const KvArchive& archive_;
  const ArchiveHead head_;
  float* const scratch_;
};

}  // namespace h2o

// ArchiveWriter: archives the tokens that one kv_head evicts.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/kernels.h"
#include "kv/archive.h"
#include "kv/rows.h"

namespace h2o {

class ArchiveWriter {
 public:
  // `scratch`: [4, head_dim]
  ArchiveWriter(const CpuKernels& kernels, const KvView& cache, int32_t sequence, int32_t kv_head,
                float* scratch);

  int32_t page_of(int32_t position) const { return position / archive_.page_tokens(); }

  // Adds the token in `row`, before it is overwritten. Call bound() after the last one of a page.
  void add(const KvRow& row, int32_t position) const;
  void bound(int32_t page) const;

  // Removes the token that was added last, which is at `position`.
  void remove_last(int32_t position) const;

  // Is fit() to be called before the first token of this page is added?
  bool needs_fit(int32_t page) const { return archive_.has_grids() && head_.counts[page] == 0; }

  // Fits the KeyGrid of a page to the keys of its tokens, which are all still in the cache, in its
  // type. Keys that come later are limited to the range of these.
  void fit(int32_t page, std::span<const std::byte* const> keys) const;

 private:
  void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to) const;

  const CpuKernels& kernels_;
  const KvView& cache_;
  const KvArchive& archive_;
  const ArchiveHead head_;
  float* const scratch_;
};

}  // namespace h2o

#include "cpu/attention/archive.h"

#include <algorithm>

namespace h2o {

ArchiveWriter::ArchiveWriter(const CpuKernels& kernels, const KvView& cache, int32_t sequence,
                             int32_t kv_head, float* scratch)
    : kernels_(kernels),
      cache_(cache),
      archive_(*cache.archive),
      head_(archive_.head(cache.layer, sequence, kv_head)),
      scratch_(scratch) {}

void ArchiveWriter::add(const KvRow& row, int32_t position) const {
  const int32_t page = position / kPageTokens;
  const int64_t at = int64_t{page} * kPageTokens + head_.counts[page];
  std::byte* const k = head_.k + at * archive_.k_row_bytes();
  std::byte* const v = head_.v + at * archive_.v_row_bytes();
  convert(cache_.k_dtype, row.k, archive_.options().k_dtype, k);
  convert(cache_.v_dtype, row.v, archive_.options().v_dtype, v);
  widen_bounds(page, k);
  ++head_.counts[page];
}

void ArchiveWriter::convert(DType from_type, const std::byte* from, DType to_type,
                            std::byte* to) const {
  if (from_type == to_type) {
    std::copy_n(from, byte_size(to_type, cache_.head_dim), to);
  } else {
    kernels_.of(from_type).decode(scratch_, from, cache_.head_dim);
    kernels_.of(to_type).encode(to, scratch_, cache_.head_dim);
  }
}

// By a key as it is stored.
void ArchiveWriter::widen_bounds(int32_t page, const std::byte* k) const {
  const int64_t n = cache_.head_dim;
  const TypeKernels& type = kernels_.of(KvArchive::kBoundsType);
  std::byte* const stored = head_.bounds + page * archive_.bounds_bytes();
  float* const key = scratch_;
  float* const largest = scratch_ + n;
  float* const smallest = scratch_ + 2 * n;
  kernels_.of(archive_.options().k_dtype).decode(key, k, n);
  if (head_.counts[page] == 0) {
    std::copy_n(key, n, largest);
    std::copy_n(key, n, smallest);
  } else {
    type.decode(largest, stored, 2 * n);
    for (int64_t i = 0; i < n; ++i) {
      largest[i] = std::max(largest[i], key[i]);
      smallest[i] = std::min(smallest[i], key[i]);
    }
  }
  type.encode(stored, largest, 2 * n);
}

}  // namespace h2o

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

// From the keys as stored.
void ArchiveWriter::bound(int32_t page) const {
  const int64_t n = cache_.head_dim;
  const int32_t count = head_.counts[page];
  const auto decode = kernels_.of(archive_.options().k_dtype).decode;
  float* const largest = scratch_;
  float* const smallest = scratch_ + n;
  float* const sum = scratch_ + 2 * n;
  float* const key = scratch_ + 3 * n;
  const std::byte* k = head_.k + page * kPageTokens * archive_.k_row_bytes();
  decode(sum, k, n);
  std::copy_n(sum, n, largest);
  std::copy_n(sum, n, smallest);
  for (int32_t t = 1; t < count; ++t) {
    decode(key, k += archive_.k_row_bytes(), n);
    for (int64_t i = 0; i < n; ++i) {
      largest[i] = std::max(largest[i], key[i]);
      smallest[i] = std::min(smallest[i], key[i]);
      sum[i] += key[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const float mean = sum[i] / static_cast<float>(count);
    const float half_range = (largest[i] - smallest[i]) / 2;
    largest[i] = mean + half_range;
    smallest[i] = mean - half_range;
  }
  std::byte* const bounds = head_.bounds + page * archive_.bounds_bytes();
  kernels_.of(KvArchive::kBoundsType).encode(bounds, largest, 2 * n);
}

}  // namespace h2o

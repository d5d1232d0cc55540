#include "cpu/attention/archive.h"

#include <algorithm>

namespace h2o {
namespace {

// Extremes of n keys; consecutive arrays of [head_dim] in `scratch`.
struct KeyRange {
  float* largest;
  float* smallest;
  float* sum;
};

template <class KeyAt>
KeyRange range_of(const TypeKernels& type, int64_t n, int64_t head_dim, float* scratch,
                  const KeyAt& key_at) {
  const KeyRange range{scratch, scratch + head_dim, scratch + 2 * head_dim};
  float* const key = scratch + 3 * head_dim;
  type.decode(range.sum, key_at(0), head_dim);
  std::copy_n(range.sum, head_dim, range.largest);
  std::copy_n(range.sum, head_dim, range.smallest);
  for (int64_t t = 1; t < n; ++t) {
    type.decode(key, key_at(t), head_dim);
    for (int64_t i = 0; i < head_dim; ++i) {
      range.largest[i] = std::max(range.largest[i], key[i]);
      range.smallest[i] = std::min(range.smallest[i], key[i]);
      range.sum[i] += key[i];
    }
  }
  return range;
}

}  // namespace

ArchiveWriter::ArchiveWriter(const CpuKernels& kernels, const KvView& cache, int32_t sequence,
                             int32_t kv_head, float* scratch)
    : kernels_(kernels),
      cache_(cache),
      archive_(*cache.archive),
      head_(archive_.head(cache.layer, sequence, kv_head)),
      scratch_(scratch) {}

void ArchiveWriter::add(const KvRow& row, int32_t position) const {
  const int32_t page = page_of(position);
  const int64_t count = head_.counts[page];
  std::byte* const k = archive_.keys(head_, page) + count * archive_.k_row_bytes();
  std::byte* const v = archive_.values(head_, page) + count * archive_.v_row_bytes();
  if (archive_.has_grids()) {
    float* const codes = scratch_ + cache_.head_dim;
    kernels_.of(cache_.k_dtype).decode(scratch_, row.k, cache_.head_dim);
    archive_.grid(head_, page).to_codes(scratch_, codes);
    kernels_.q3.encode(k, codes, cache_.head_dim);
  } else {
    convert(cache_.k_dtype, row.k, archive_.options().k_dtype, k);
  }
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

// Computes bounds of the keys as stored.
void ArchiveWriter::bound(int32_t page) const {
  if (archive_.has_grids()) return;
  const int64_t n = cache_.head_dim;
  const int64_t row_bytes = archive_.k_row_bytes();
  const std::byte* const keys = archive_.keys(head_, page);
  const KeyRange range = range_of(kernels_.of(archive_.options().k_dtype), head_.counts[page], n,
                                  scratch_, [&](int64_t t) { return keys + t * row_bytes; });
  for (int64_t i = 0; i < n; ++i) {
    const float mean = range.sum[i] / static_cast<float>(head_.counts[page]);
    const float half_range = (range.largest[i] - range.smallest[i]) / 2;
    range.largest[i] = mean + half_range;
    range.smallest[i] = mean - half_range;
  }
  std::byte* const bounds = head_.bounds + page * archive_.bounds_bytes();
  kernels_.of(KvArchive::kBoundsType).encode(bounds, range.largest, 2 * n);
}

void ArchiveWriter::remove_last(int32_t position) const {
  const int32_t page = page_of(position);
  if (--head_.counts[page] > 0) bound(page);
}

void ArchiveWriter::fit(int32_t page, std::span<const std::byte* const> keys) const {
  const KeyRange range = range_of(kernels_.of(cache_.k_dtype), std::ssize(keys), cache_.head_dim,
                                  scratch_, [&](int64_t t) { return keys[t]; });
  archive_.grid(head_, page).fit(range.smallest, range.largest);
}

}  // namespace h2o

// Shared by the kernels that select archived pages and attend to them.
#pragma once

#include <algorithm>

#include "cuda/attention/logit_changes.cuh"
#include "cuda/attention/recall.h"
#include "kv/archive.h"

namespace h2o::cuda {

// Pages per block, at most, and bytes of their keys or values.
constexpr int32_t kPartPages = 4;
constexpr int64_t kPartBytes = 64 << 10;

inline int64_t page_bytes(const ArchiveLayout& archive) {
  return archive.page_tokens * std::max(archive.k_row_bytes, archive.v_row_bytes);
}
inline int32_t part_pages(const ArchiveLayout& archive) {
  return static_cast<int32_t>(std::clamp<int64_t>(kPartBytes / page_bytes(archive), 1, kPartPages));
}

// Rows of a longer segment that are processed together.
constexpr int32_t kRecalledRows = 64;

// The arrays of the workspace, for the maximum number of rows processed together.
struct RecallSpace {
  RecallSpace(const KvView& cache, std::byte* base) {
    const auto take = [&]<class T>(T*& array, int64_t n) {
      array = reinterpret_cast<T*>(base + bytes);
      bytes += (n * sizeof(T) + 255) / 256 * 256;
    };
    const ArchiveLayout& archive = cache.archive->layout();
    const int64_t rows = std::max(cache.n_sequences, std::min(cache.max_rows, kRecalledRows));
    sums.n = (archive.n_recalled + part_pages(archive) - 1) / part_pages(archive);
    take(estimates, rows * cache.n_kv_heads * archive.n_pages);
    take(pages, rows * cache.n_kv_heads * archive.n_recalled);
    take(sums.largest, rows * cache.n_heads * sums.n);
    take(sums.total, rows * cache.n_heads * sums.n);
    take(sums.out, rows * cache.n_heads * sums.n * cache.head_dim);
  }

  size_t bytes = 0;
  float* estimates;  // [rows, n_kv_heads, n_pages] of the largest q.k; -infinity: an empty page
  int32_t* pages;    // [rows, n_kv_heads, n_recalled] selected pages, in order; then -1
  RecalledSums sums;
};

// Kernel argument: rows that recall pages, either all segments of one row, or some rows of a longer
// segment.
struct RecallStep {
  KvView cache;
  ArchiveLayout archive;
  const Segment* segments;  // of one row each; nullptr: rows of `chunk`
  Segment chunk;            // the longer segment
  int32_t first;            // its first row
  int32_t n_rows;
  const float* q;  // of the batch
  float scale;
  LogitChanges changes;
  RecallSpace space;

  // Query heads per kv_head.
  H2O_HD int32_t group() const { return cache.n_heads / cache.n_kv_heads; }
};

// One of these rows.
struct RecallRow {
  __device__ RecallRow(const RecallStep& step, int32_t i, int32_t kv_head)
      : segment(step.segments != nullptr ? step.segments[i] : step.chunk),
        place(step.segments != nullptr ? segment.sequence : i),
        row(segment.row + (step.segments != nullptr ? 0 : step.first + i)),
        recalls((step.segments == nullptr || segment.n_rows == 1) &&
                has_archived(step.cache, step.cache.policies[segment.sequence], segment.position,
                             kv_head)),
        n_pages((segment.position - 1) / step.archive.page_tokens + 1) {}

  __device__ ArchiveHead head(const RecallStep& step, int32_t kv_head) const {
    return step.archive.head(step.cache.archives[segment.sequence],
                             step.cache.archive_heads[kv_head]);
  }
  // [group, head_dim]
  __device__ const float* queries(const RecallStep& step, int32_t kv_head) const {
    const int32_t head = kv_head * step.group();
    return step.q + (int64_t{row} * step.cache.n_heads + head) * step.cache.head_dim;
  }
  __device__ float* estimates(const RecallStep& step, int32_t kv_head) const {
    return step.space.estimates +
           (int64_t{place} * step.cache.n_kv_heads + kv_head) * step.archive.n_pages;
  }
  __device__ int32_t* pages(const RecallStep& step, int32_t kv_head) const {
    return step.space.pages +
           (int64_t{place} * step.cache.n_kv_heads + kv_head) * step.archive.n_recalled;
  }

  Segment segment;
  int32_t place;    // in the workspace
  int32_t row;      // in the batch
  bool recalls;     // does it recall anything? Otherwise nothing is written
  int32_t n_pages;  // that may contain tokens of the sequence
};

// Selects the archived pages that each row attends to: for each row and kv_head of the step, fills
// step.space.pages.
void select_pages(const Stream& stream, const RecallStep& step);

}  // namespace h2o::cuda

// SegmentHead: one segment and one kv_head: where its new rows are stored, and which keys each of
// them attends to, in which order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "kv/rows.h"
#include "kv/view.h"

namespace h2o {

// Consecutive keys and values as stored.
struct KvRows {
  const std::byte* k;
  const std::byte* v;
  float* scores;         // nullptr if the policy uses no scores
  const int32_t* ranks;  // of rolling slots; nullptr: consecutive from first_rank
  int32_t first_rank;
  const int32_t* positions;  // of slots; nullptr: consecutive from first_position
  int32_t first_position;
  int64_t n;

  int32_t rank(int64_t i) const {
    return ranks != nullptr ? ranks[i] : first_rank + static_cast<int32_t>(i);
  }
  int32_t position(int64_t i) const {
    return positions != nullptr ? positions[i] : first_position + static_cast<int32_t>(i);
  }
};

class SegmentHead {
 public:
  // Is not affected by store(). next_slot is read here and must not change before the end.
  SegmentHead(const KvView& cache, const Segment& segment, int32_t kv_head)
      : cache_(cache),
        segment_(segment),
        kv_head_(kv_head),
        head_(cache.head(segment.sequence, kv_head)),
        chunk_(cache.chunk(kv_head, segment.row)),
        kept_(head_.policy.kept(segment.position)),
        first_(*head_.next_slot),
        fits_(int64_t{kept_} + segment.n_rows <= head_.slots),
        vacant_(std::min(first_, written())),
        n_before_(fits_ ? kept_ : written() - (vacant_ < written())) {}

  const KvView& cache() const { return cache_; }
  const Segment& segment() const { return segment_; }
  const KvHead& head() const { return head_; }
  const KvStaging& chunk() const { return chunk_; }
  int32_t kv_head() const { return kv_head_; }

  // Do the new rows fit in free slots? Otherwise they are staged, because nothing is evicted before
  // every row of the segment has attended.
  bool fits() const { return fits_; }

  // Number of keys before the segment, and visible to a row: those plus the segment's rows up to
  // itself.
  int64_t n_before() const { return n_before_; }
  int64_t n_visible(int64_t row) const { return n_before_ + row + 1; }

  // Keys [begin, end) in the order of all sums: slots, except the free one of a filled pool, then
  // the staged rows.
  using Parts = std::array<KvRows, 3>;
  Parts keys(int64_t begin, int64_t end) const {
    if (fits_) return {slots(begin, end)};
    return {
        slots(std::min(begin, vacant_), std::min(end, vacant_)),
        slots(std::clamp(begin, vacant_, n_before_) + 1, std::clamp(end, vacant_, n_before_) + 1),
        chunk_rows(std::max(begin, n_before_) - n_before_, std::max(end, n_before_) - n_before_)};
  }

  // Prefetches the first keys and values of the next kv_head in memory, which has as many: they are
  // in other pages, where no hardware prefetcher goes.
  void prefetch_next() const;

  // Rounds the new row to the cache's types, for attention to read, and returns how many numbers
  // were clamped. `scratch`: [head_dim]
  int64_t store(const CpuKernels& kernels, const Attention& attention, int32_t row,
                float* scratch) const;

 private:
  float value_norm(const CpuKernels& kernels, const float* v, float* scratch) const;

  int32_t written() const { return head_.written(segment_.position); }

  KvRows slots(int64_t begin, int64_t end) const {
    const KvRow row = slot_row(cache_, head_, begin);
    return {.k = row.k,
            .v = row.v,
            .scores = row.score,
            .ranks = segment_.rolling ? head_.ranks + begin : nullptr,
            .first_rank = 0,
            .positions = head_.positions + begin,
            .first_position = 0,
            .n = end - begin};
  }
  KvRows chunk_rows(int64_t begin, int64_t end) const {
    const KvRow row = chunk_row(cache_, head_, chunk_, begin);
    return {.k = row.k,
            .v = row.v,
            .scores = row.score,
            .ranks = nullptr,
            .first_rank = kept_ + static_cast<int32_t>(begin),
            .positions = nullptr,
            .first_position = segment_.position + static_cast<int32_t>(begin),
            .n = end - begin};
  }

  const KvView& cache_;
  const Segment& segment_;
  const int32_t kv_head_;
  const KvHead head_;
  const KvStaging chunk_;
  const int32_t kept_;   // tokens of the sequence in the cache
  const int32_t first_;  // slot of the first new row, if the rows fit
  const bool fits_;
  const int64_t vacant_;  // a free slot that no row attends to, if they do not fit; otherwise the
                          // first unused slot
  const int64_t n_before_;
};

}  // namespace h2o

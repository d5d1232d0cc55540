// The keys that the rows of a segment attend to, in order: the cached tokens of the sequence, then
// the segment's own rows.
#pragma once

#include "backend/batch.h"
#include "kv/rows.h"

namespace h2o::cuda {

// Keys of one kv_head. Row r of the segment sees the first kept + r + 1 of them. The segment's rows
// are in free slots if all fit, and otherwise staged until every row has attended.
struct SegmentKeys {
  __device__ SegmentKeys(const KvView& cache, const Segment& segment, int32_t kv_head)
      : head(cache.head(segment.sequence, kv_head)),
        chunk(cache.chunk(kv_head, segment.row)),
        kept(head.policy.kept(segment.position)),
        first(*head.next_slot),
        fits(int64_t{kept} + segment.n_rows <= head.slots) {}

  // The slot of key i, or -1 if it is staged as row i - kept.
  __device__ int32_t slot(int32_t i) const {
    if (i >= kept) return fits ? first + i - kept : -1;
    return i < first ? i : i + 1;  // a filled pool has one free row, at `first`
  }

  __device__ KvRow row(const KvView& cache, int32_t i) const {
    const int32_t s = slot(i);
    return s >= 0 ? slot_row(cache, head, s) : chunk_row(cache, head, chunk, i - kept);
  }

  // The rank, in the RoPE table, of a rolling segment's key.
  __device__ int32_t rank(int32_t i) const { return i >= kept ? i : head.ranks[slot(i)]; }

  // Distances are differences of places: positions, or ranks if they roll. In a layer with a window
  // the cache keeps the newest tokens, whose ranks are as far apart as their positions.
  __device__ int32_t row_place(const Segment& segment, int32_t row) const {
    return (segment.rolling ? kept : segment.position) + row;
  }

  // The place of cached key i, which is less than `kept`.
  __device__ const int32_t* cached_place(const Segment& segment, int32_t i) const {
    return (segment.rolling ? head.ranks : head.positions) + slot(i);
  }

  // The distance from a row of the segment to key i.
  __device__ int32_t distance(const Segment& segment, int32_t row, int32_t i) const {
    if (i >= kept) return row - (i - kept);
    return row_place(segment, row) - *cached_place(segment, i);
  }

  // The first key that a row may see through a window of this many tokens; 0: unlimited. Cached
  // keys are in no order, so a row may see any of them or none.
  __device__ int32_t first_visible(int32_t window, int32_t row) const {
    return window > 0 && row >= window - 1 ? kept + row - (window - 1) : 0;
  }

  // The end of the keys that a row may not see, because they may be outside its window.
  __device__ int32_t end_of_hidden(int32_t window, int32_t row) const {
    return window > 0 ? kept + max(0, row - window + 1) : 0;
  }

  // The end of the rows of which one may see a key up to i.
  __device__ int32_t end_of_seeing(const Segment& segment, int32_t window, int32_t i) const {
    return window > 0 ? min(segment.n_rows, max(i - kept, -1) + window) : segment.n_rows;
  }

  KvHead head;
  KvStaging chunk;
  int32_t kept;   // cached tokens before the segment
  int32_t first;  // slot of the first new row, if the rows fit; otherwise the first free slot
  bool fits;
};

}  // namespace h2o::cuda

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

  __device__ int32_t position(const Segment& segment, int32_t i) const {
    return i >= kept ? segment.position + i - kept : head.positions[slot(i)];
  }

  // The rank, in the RoPE table, of a rolling segment's key.
  __device__ int32_t rank(int32_t i) const { return i >= kept ? i : head.ranks[slot(i)]; }

  // The distance from a row of the segment to key i; in ranks if positions roll.
  __device__ int32_t distance(const Segment& segment, int32_t row, int32_t i) const {
    return segment.rolling ? kept + row - rank(i) : segment.position + row - position(segment, i);
  }

  KvHead head;
  KvStaging chunk;
  int32_t kept;   // cached tokens before the segment
  int32_t first;  // slot of the first new row, if the rows fit; otherwise the first free slot
  bool fits;
};

}  // namespace h2o::cuda

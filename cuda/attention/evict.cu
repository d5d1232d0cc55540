// Eviction after prefill of a long segment: select and admit, one block per kv_head.
#include "cuda/attention/admission.cuh"
#include "cuda/attention/attend.h"
#include "cuda/attention/block_select.cuh"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/attention/select_victim.cuh"
#include "cuda/runtime/copy_bytes.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kMoveThreads = 256;
constexpr int kMovedRows = 32;  // per block

// Lower orders are evicted first; no two are equal.
__device__ uint64_t order_of(const Victim& victim) {
  return make_order(victim.importance, 0xffffffffu - static_cast<uint32_t>(victim.position));
}

// Replaces the scores of all evictable tokens, as pool_scores() on the CPU, by the maximum over
// their evictable neighbors.
__device__ void pool_scores(const Segment& segment, const SegmentKeys& keys,
                            const Admission& work) {
  __shared__ int32_t scratch[kSelectThreads / kWarp];
  const KvHead& head = keys.head;
  const KvPolicy& policy = head.policy;
  const int32_t next = segment.position + segment.n_rows;
  const int32_t written = head.written(segment.position);
  const int32_t vacant = head.vacant_slot(segment.position);

  // Evictable tokens by position: those in slots, then rows, which are younger.
  uint64_t* const tokens = work.orders;  // position, then index: a slot, or slots + row
  const auto is_evictable = [&](int32_t slot) {
    return slot != vacant && policy.evictable(head.positions[slot], next);
  };
  const int32_t n_slots =
      number(written, scratch, is_evictable, [&](int32_t slot, int32_t i, bool is) {
        if (is) tokens[i] = static_cast<uint64_t>(head.positions[slot]) << 32 | slot;
      });
  __syncthreads();
  sort(tokens, n_slots);
  const int32_t n_evictable =
      n_slots + number(
                    segment.n_rows, scratch,
                    [&](int32_t row) { return policy.evictable(segment.position + row, next); },
                    [&](int32_t row, int32_t i, bool is) {
                      if (is) tokens[n_slots + i] = static_cast<uint64_t>(head.slots + row);
                    });
  __syncthreads();

  const auto score_of = [&](int32_t i) {
    const auto index = static_cast<int32_t>(tokens[i]);
    return index < head.slots ? head.scores + index : keys.chunk.scores + index - head.slots;
  };
  for (int32_t i = threadIdx.x; i < n_evictable; i += kSelectThreads) {
    const int32_t end = min(i + KvPolicy::kNeighbors + 1, n_evictable);
    float largest = 0;
    for (int32_t j = max(i - KvPolicy::kNeighbors, 0); j < end; ++j) {
      largest = fmaxf(largest, *score_of(j));
    }
    work.pooled[i] = largest;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < n_evictable; i += kSelectThreads) *score_of(i) = work.pooled[i];
  __syncthreads();
}

// Keeps `budget` tokens and, as admit_chunk() on the CPU, finds a free slot for each row that is
// kept.
__device__ void admit_rows(const KvView& cache, const Segment& segment, const SegmentKeys& keys) {
  __shared__ int32_t scratch[kSelectThreads / kWarp];
  const KvHead& head = keys.head;
  const KvPolicy& policy = head.policy;
  const Admission work(cache, blockIdx.x);
  const int32_t next = segment.position + segment.n_rows;
  const int32_t written = head.written(segment.position);
  const int32_t vacant = head.vacant_slot(segment.position);
  const int32_t n = head.slots + segment.n_rows;
  const auto n_evicted =
      static_cast<int32_t>(keys.kept + int64_t{segment.n_rows} - policy.budget());
  if (policy.pools_scores(n_evicted)) pool_scores(segment, keys, work);

  for (int32_t i = threadIdx.x; i < n; i += kSelectThreads) {
    const bool is_row = i >= head.slots;
    const int32_t row = i - head.slots;
    work.orders[i] = kLastOrder;
    if (!is_row && (i >= written || i == vacant)) continue;
    const int32_t position = is_row ? segment.position + row : head.positions[i];
    if (!policy.evictable(position, next)) continue;
    const float* scores = is_row ? keys.chunk.scores + row : head.scores + i;
    const float* norms = is_row ? keys.chunk.value_norms + row : head.value_norms + i;
    const float score = head.scores != nullptr ? *scores : 0;
    const float norm = head.value_norms != nullptr ? *norms : 1;
    work.orders[i] =
        order_of({policy.importance(score, norm, position, next, head.number), position, i});
  }
  __syncthreads();
  const uint64_t last = select(n, n_evicted, [&](int32_t i) { return work.orders[i]; });
  const auto goes = [&](int32_t i) { return work.orders[i] <= last; };

  // Free slots in order: those of evicted tokens, then unused ones.
  const int32_t n_free = number(written, scratch, goes, [&](int32_t i, int32_t index, bool is) {
    if (is) work.evicted[index] = i;
  });
  __syncthreads();
  const auto free_slot = [&](int32_t i) {
    return i < n_free ? work.evicted[i] : keys.first + i - n_free;
  };
  const int32_t n_entering = number(
      segment.n_rows, scratch, [&](int32_t row) { return !goes(head.slots + row); },
      [&](int32_t row, int32_t index, bool is) {
        work.to[row] = is ? free_slot(index) : -1;
        if (!is) work.evicted[n_free + row - index] = head.slots + row;
      });

  if (segment.rolling) {
    // Update ranks: count, by rank, how many lower ranks are evicted, and subtract it from the rank
    // of each remaining slot.
    for (int32_t i = threadIdx.x; i < written; i += kSelectThreads) {
      if (i != vacant) work.closed[head.ranks[i]] = goes(i);
    }
    __syncthreads();
    number(
        keys.kept, scratch, [&](int32_t rank) { return work.closed[rank] != 0; },
        [&](int32_t rank, int32_t index, bool) { work.closed[rank] = index; });
    __syncthreads();
    for (int32_t i = threadIdx.x; i < written; i += kSelectThreads) {
      if (i != vacant && !goes(i)) head.ranks[i] -= work.closed[head.ranks[i]];
    }
    __syncthreads();
    number(
        segment.n_rows, scratch, [&](int32_t row) { return work.to[row] >= 0; },
        [&](int32_t row, int32_t index, bool is) {
          if (is) head.ranks[work.to[row]] = keys.kept - n_free + index;
        });
  }
  // slots = budget + 1: exactly one is left.
  if (threadIdx.x == 0) *head.next_slot = free_slot(n_entering);
}

__global__ void __launch_bounds__(kSelectThreads) admit_kernel(KvView cache, Segment segment) {
  __shared__ Victim scratch[kSelectThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const SegmentKeys keys(cache, segment, blockIdx.x);
  __syncthreads();  // all have read next_slot
  if (keys.fits) {
    const float* scores = keys.head.scores;
    const auto load = [&](const int32_t* slots, float* loaded) {
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) loaded[i] = scores != nullptr ? scores[slots[i]] : 0;
    };
    select_next_slot(keys.head, segment, keys.kept + segment.n_rows, scratch, load,
                     [](int32_t, float) {});
  } else {
    admit_rows(cache, segment, keys);
  }
}

// One block per kMovedRows rows and kv_head: moves kept rows from the staging area to their slots,
// each by a warp.
__global__ void __launch_bounds__(kMoveThreads, 4) move_kernel(KvView cache, Segment segment) {
  let_next_start();
  wait_for_previous();
  const KvHead head = cache.head(segment.sequence, blockIdx.y);
  if (head.policy.kept(segment.position) + int64_t{segment.n_rows} <= head.slots) return;
  const KvStaging chunk = cache.chunk(blockIdx.y, segment.row);
  const int32_t* const slots = Admission(cache, blockIdx.y).to;
  const auto first = static_cast<int32_t>(blockIdx.x) * kMovedRows;
  const int32_t end = min(first + kMovedRows, segment.n_rows);
  for (int32_t row = first + threadIdx.x / kWarp; row < end; row += kMoveThreads / kWarp) {
    const int32_t slot = slots[row];
    if (slot < 0) continue;
    const KvRow from = chunk_row(cache, head, chunk, row);
    const KvRow to = slot_row(cache, head, slot);
    copy_bytes<kWarp>(to.k, from.k, cache.k_row_bytes);
    copy_bytes<kWarp>(to.v, from.v, cache.v_row_bytes);
    if (threadIdx.x % kWarp > 0) continue;
    if (to.score != nullptr) *to.score = *from.score;
    if (to.value_norm != nullptr) *to.value_norm = *from.value_norm;
    head.positions[slot] = segment.position + row;
  }
}

}  // namespace

size_t admit_workspace(const KvView& shape) { return shape.n_kv_heads * Admission::bytes(shape); }

void admit(const Stream& stream, const KvView& cache, const Segment& segment, bool archives) {
  launch(stream, admit_kernel, dim3(cache.n_kv_heads), dim3(kSelectThreads), 0, cache, segment);
  if (archives) archive_evicted(stream, cache, segment);
  const dim3 grid((segment.n_rows + kMovedRows - 1) / kMovedRows, cache.n_kv_heads);
  launch(stream, move_kernel, grid, dim3(kMoveThreads), 0, cache, segment);
}

}  // namespace h2o::cuda

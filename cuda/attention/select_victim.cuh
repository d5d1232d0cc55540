// Selects the slot of the next token: the block-wide last step of decode attention over one
// kv_head.
#pragma once

#include "backend/batch.h"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

__device__ inline Victim earlier(const Victim& a, const Victim& b) { return b.before(a) ? b : a; }

// The first of all threads' victims, in every thread. `scratch`: shared, [n_warps].
__device__ inline Victim block_victim(Victim victim, Victim* scratch) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    const Victim other{__shfl_xor_sync(kAllLanes, victim.importance, apart),
                       __shfl_xor_sync(kAllLanes, victim.position, apart),
                       __shfl_xor_sync(kAllLanes, victim.slot, apart)};
    victim = earlier(victim, other);
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = victim;
  __syncthreads();
  victim = scratch[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp)
    victim = earlier(victim, scratch[warp]);
  return victim;
}

// Slots per thread whose loads are in flight together.
constexpr int kSlotsAtOnce = 4;

// The tokens of a segment are in slots [0, used). load(slots [kSlotsAtOnce], scores [kSlotsAtOnce])
// is called with each slot, the last one possibly several times, and must not write; store(slot,
// score) is called exactly once per slot. If it `selects`, selects the slot of the next token: a
// free one, or that of the evicted token, and closes the gap in the ranks.
template <class Load, class Store>
__device__ void select_next_slot(const KvHead& head, const Segment& segment, int32_t used,
                                 Victim* scratch, const Load& load, const Store& store,
                                 bool selects = true) {
  const KvPolicy& policy = head.policy;
  const int32_t next = segment.position + segment.n_rows;
  const bool evicts = selects && head.evicts() && used == head.slots;
  Victim victim{INFINITY, -1, -1};
  const auto apart = static_cast<int32_t>(blockDim.x);
  for (auto first = static_cast<int32_t>(threadIdx.x); first < used;
       first += kSlotsAtOnce * apart) {
    int32_t slots[kSlotsAtOnce], positions[kSlotsAtOnce];
    float scores[kSlotsAtOnce], norms[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      slots[i] = min(first + i * apart, used - 1);
      positions[i] = evicts ? head.positions[slots[i]] : 0;
      norms[i] = evicts && head.value_norms != nullptr ? head.value_norms[slots[i]] : 1;
    }
    load(slots, scores);
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (first + i * apart >= used) break;
      store(slots[i], scores[i]);
      if (!evicts || !policy.evictable(positions[i], next)) continue;
      const float importance =
          policy.importance(scores[i], norms[i], positions[i], next, head.number);
      victim = earlier(victim, {importance, positions[i], slots[i]});
    }
  }
  if (evicts) victim = block_victim(victim, scratch);
  if (selects && threadIdx.x == 0) *head.next_slot = evicts ? victim.slot : used;
  if (evicts && segment.rolling) {
    const int32_t rank = head.ranks[victim.slot];
    __syncthreads();
    for (int32_t slot = threadIdx.x; slot < used; slot += blockDim.x) {
      if (head.ranks[slot] > rank) --head.ranks[slot];
    }
  }
}

}  // namespace h2o::cuda

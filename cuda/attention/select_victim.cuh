// Who makes room for the next token: the block-wide end of attention over one kv_head.
#pragma once

#include "backend/batch.h"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

__device__ inline Victim earlier(const Victim& a, const Victim& b) { return b.before(a) ? b : a; }

// Of all threads' victims the one that goes first, in every thread. `scratch`: shared, [n_warps].
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

// The tokens of a segment are in the slots [0, used); the score of each is score_of(slot), called
// once for every slot. Chooses the slot of the next token: a free one, or that of the token to
// evict, which leaves no gap among the ranks.
template <class ScoreOf>
__device__ void select_next_slot(const KvHead& head, const Segment& segment, int32_t used,
                                 Victim* scratch, const ScoreOf& score_of) {
  const KvPolicy& policy = head.policy;
  const int32_t next = segment.position + segment.n_rows;
  const bool evicts = head.evicts() && used == head.slots;
  Victim victim{INFINITY, -1, -1};
  for (int32_t slot = threadIdx.x; slot < used; slot += blockDim.x) {
    const float score = score_of(slot);
    if (!evicts) continue;
    const int32_t position = head.positions[slot];
    if (!policy.evictable(position, next)) continue;
    const float norm = head.value_norms != nullptr ? head.value_norms[slot] : 1;
    victim = earlier(victim, {policy.importance(score, norm, position, next), position, slot});
  }
  if (evicts) victim = block_victim(victim, scratch);
  if (threadIdx.x == 0) *head.next_slot = evicts ? victim.slot : used;
  if (evicts && segment.rolling) {
    const int32_t rank = head.ranks[victim.slot];
    __syncthreads();
    for (int32_t slot = threadIdx.x; slot < used; slot += blockDim.x) {
      if (head.ranks[slot] > rank) --head.ranks[slot];
    }
  }
}

}  // namespace h2o::cuda

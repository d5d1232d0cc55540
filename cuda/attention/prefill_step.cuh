// Shared by the prefill attention kernels.
#pragma once

#include "backend/backend.h"
#include "cuda/attention/logit_changes.cuh"
#include "cuda/attention/prefill_splits.cuh"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

// Kernel argument: the attention of one segment.
//
// The query heads of a group share its keys, so kernels process them as one list of queries: query
// t of a kv_head is head t % group of its group, in row t / group of the segment.
struct PrefillStep {
  KvView cache;
  Segment segment;
  int32_t group;    // query heads per kv_head
  RopeLayout rope;  // how keys of a rolling segment are rotated when read
  int32_t n_rot;    // 0: not rotated
  float scale;      // of the base-2 logits: includes log2(e)
  LogitChanges changes;
  int32_t window;     // see Attention
  bool reads;         // keys that an earlier layer stored in this pass, when scores decayed
  int32_t tile_dim;   // elements of a row in tiles: head_dim, then zeros; 0: no tensor cores
  int64_t width;      // of q and out
  const float* q;     // [segment.n_rows, width]
  float* out;         // [segment.n_rows, width]
  Operands operands;  // of these rows
  float* lse;  // [n_kv_heads, max_rows * group]: log2 of the sum of 2^logit per query; nullptr if
               // no policy uses scores and this layer has no archive

  // Operands of tensor cores, f16 in the workspace.
  uint16_t* q_halves;  // [n_kv_heads, max_rows * group, tile_dim]: q, if scores are needed
  uint16_t* k_halves;  // [n_kv_heads, slots + max_rows, tile_dim]: contiguous keys and values;
  uint16_t* v_halves;  // nullptr if they can be read as f16 from the cache

  KeySplits splits;

  H2O_HD int32_t n_queries() const { return segment.n_rows * group; }

  // Upper bound for the number of keys, which is known on the device only.
  H2O_HD int32_t max_keys() const {
    return (segment.position < cache.slots ? segment.position : cache.slots) + segment.n_rows;
  }

  // The query head of query t of a kv_head.
  H2O_HD int32_t head(int32_t kv_head, int32_t t) const { return kv_head * group + t % group; }

  // Offset of that query in q and out.
  H2O_HD int64_t offset(int32_t kv_head, int32_t t) const {
    return t / group * width + int64_t{head(kv_head, t)} * cache.head_dim;
  }

  // Offset of a kv_head's queries in lse.
  H2O_HD int64_t first_query(int32_t kv_head) const {
    return int64_t{kv_head} * cache.max_rows * group;
  }

  // Index of a query's first split in the arrays of `splits`.
  H2O_HD int64_t first_partial(int32_t kv_head, int32_t t) const {
    return (int64_t{kv_head} * n_queries() + t) * splits.n;
  }

  // Offset of a kv_head's keys in k_halves, and values in v_halves.
  H2O_HD int64_t first_unpacked(int32_t kv_head) const {
    return kv_head * (int64_t{cache.slots} + cache.max_rows) * tile_dim;
  }
};

// One block per tile, of queries or of keys, and kv_head. All along x, which allows 2^31: along y
// there would be too many for a context of half a million tokens.
struct Tiles {
  static dim3 grid(const KvView& cache, int32_t n, int32_t tile) {
    const int64_t n_tiles = (int64_t{n} + tile - 1) / tile;
    return dim3(static_cast<unsigned>(n_tiles * cache.n_kv_heads));
  }

  // Tiles of this block; along y there are splits of the keys, or parts of the queries.
  __device__ explicit Tiles(const KvView& cache)
      : kv_head(static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(cache.n_kv_heads))),
        tile(static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(cache.n_kv_heads))),
        last(static_cast<int32_t>(gridDim.x / static_cast<unsigned>(cache.n_kv_heads)) - 1) {}

  int32_t kv_head;
  int32_t tile;
  int32_t last;  // index of the kv_head's last tile
};

// Sets step.splits for blocks with `tile` queries each, and returns their grid.
inline dim3 split_keys(PrefillStep& step, int32_t tile) {
  dim3 grid = Tiles::grid(step.cache, step.n_queries(), tile);
  step.splits.divide(grid.x, step.max_keys());
  grid.y = static_cast<unsigned>(step.splits.n);
  return grid;
}

// The first key that a query may see, rounded down to whole tiles of keys.
__device__ inline int32_t first_tile(const PrefillStep& step, const SegmentKeys& keys, int32_t t) {
  return keys.first_visible(step.window, t / step.group) / kSplitMultiple * kSplitMultiple;
}

// Merges the splits into step.out and step.lse, after a kernel with step.splits.n > 1.
void merge_splits(const Stream& stream, const PrefillStep& step);

// 2^x for x <= 0, clamped near e^-70 and never NaN: scores must be ordered.
__device__ inline float exp2_negative(float x) { return exp2_fast(fminf(fmaxf(x, -101.0f), 0.0f)); }

// The decay of the attention of `row` until the end of the segment.
__device__ inline float decay_since(const PrefillStep& step, const KvPolicy& policy, int32_t row) {
  return powf(policy.decay, static_cast<float>(step.segment.n_rows - 1 - row));
}

// Updates the score of key i with the attention from the segment's rows that count.
__device__ inline void add_score(const PrefillStep& step, const SegmentKeys& keys, int32_t i,
                                 float received) {
  const KvPolicy& policy = keys.head.policy;
  float* score = keys.row(step.cache, i).score;
  const auto before = static_cast<int32_t>(policy.first_scored(step.segment.n_rows)) - 1;
  const bool is_new = i >= keys.kept && !step.reads;
  const float decay = step.reads ? 1.0f : decay_since(step, policy, before);
  *score = policy.with_received(is_new ? 0.0f : *score * decay, received);
}

}  // namespace h2o::cuda

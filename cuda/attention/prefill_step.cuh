// What the kernels of prefill attention share.
#pragma once

#include "backend/backend.h"
#include "cuda/attention/logit_changes.cuh"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"
#include "kv/view.h"

namespace h2o::cuda {

// The attention of one segment, as its kernels are told of it.
//
// The query heads of a group share its keys, so they are one list of queries to a kernel: query t
// of a kv_head is head t % group of its group, in row t / group of the segment.
struct PrefillStep {
  KvView cache;
  Segment segment;
  int32_t group;         // query heads that share a kv_head
  RopeLayout rope;       // how the keys of a rolling segment are rotated as they are read
  int32_t n_rot;         // 0: none are
  float scale;           // of the logits, which are powers of two: includes log2(e)
  LogitChanges changes;  // slopes are known to prefill_f32 alone
  int32_t window;        // as in Attention; only prefill_f32 knows it
  int64_t width;         // of q and out
  const float* q;        // [segment.n_rows, width]
  float* out;            // [segment.n_rows, width]
  float* lse;            // [n_kv_heads, max_rows * group]: log2 of the sum of a query's 2^logits;
                         // nullptr if no policy keeps scores and nothing is archived

  // For tensor cores, f16 in the workspace.
  uint16_t* q_halves;  // [n_kv_heads, max_rows * group, head_dim]: q, if scores are wanted
  uint16_t* k_halves;  // [n_kv_heads, slots + max_rows, head_dim]: the keys and values, one after
  uint16_t* v_halves;  // another; both nullptr: they are f16 in the cache as attention reads them

  H2O_HD int32_t n_queries() const { return segment.n_rows * group; }

  // Keys that there may be: how many there are is known to the device alone.
  H2O_HD int32_t max_keys() const {
    return (segment.position < cache.slots ? segment.position : cache.slots) + segment.n_rows;
  }

  // The query head of query t of a kv_head.
  H2O_HD int32_t head(int32_t kv_head, int32_t t) const { return kv_head * group + t % group; }

  // Where that query begins in q and out.
  H2O_HD int64_t offset(int32_t kv_head, int32_t t) const {
    return t / group * width + int64_t{head(kv_head, t)} * cache.head_dim;
  }

  // Where the queries of a kv_head begin in lse.
  H2O_HD int64_t first_query(int32_t kv_head) const {
    return int64_t{kv_head} * cache.max_rows * group;
  }

  // Where the keys of a kv_head begin in k_halves, and its values in v_halves.
  H2O_HD int64_t first_unpacked(int32_t kv_head) const {
    return kv_head * (int64_t{cache.slots} + cache.max_rows) * cache.head_dim;
  }
};

// One block for each tile, of queries or of keys, and kv_head. All along x, where there may be 2^31
// of them: along y a context of half a million tokens would have too many.
struct Tiles {
  static dim3 grid(const KvView& cache, int32_t n, int32_t tile) {
    const int64_t n_tiles = (int64_t{n} + tile - 1) / tile;
    return dim3(static_cast<unsigned>(n_tiles * cache.n_kv_heads));
  }

  // Of this block.
  __device__ explicit Tiles(const KvView& cache)
      : kv_head(static_cast<int32_t>(blockIdx.x % static_cast<unsigned>(cache.n_kv_heads))),
        tile(static_cast<int32_t>(blockIdx.x / static_cast<unsigned>(cache.n_kv_heads))),
        last(static_cast<int32_t>(gridDim.x / static_cast<unsigned>(cache.n_kv_heads)) - 1) {}

  int32_t kv_head;
  int32_t tile;
  int32_t last;  // tile of the kv_head
};

// 2^x for x <= 0, never NaN whatever x is: scores must have an order. Below e^-70 it stays there.
__device__ inline float exp2_negative(float x) { return exp2_fast(fminf(fmaxf(x, -101.0f), 0.0f)); }

// What is left after the segment of the attention that its row gave.
__device__ inline float decay_since(const PrefillStep& step, const KvPolicy& policy, int32_t row) {
  return powf(policy.decay, static_cast<float>(step.segment.n_rows - 1 - row));
}

// Adds to the score of key i what the segment's rows gave it.
__device__ inline void add_score(const PrefillStep& step, const SegmentKeys& keys, int32_t i,
                                 float received) {
  float* score = keys.row(step.cache, i).score;
  const bool is_new = i >= keys.kept;
  *score = (is_new ? 0.0f : *score * decay_since(step, keys.head.policy, -1)) + received;
}

}  // namespace h2o::cuda

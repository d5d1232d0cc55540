#include <cmath>

#include "cuda/attention/prefill.h"
#include "cuda/attention/prefill_step.cuh"
#include "cuda/attention/stored_row.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

// A block iterates over tiles of keys for a tile of queries, a few dimensions at a time. A warp has
// its own queries, a lane one key.
constexpr int kQueries = kRowTileQueries;
constexpr int kKeys = kWarp;
constexpr int kDims = 64;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kOwnQueries = kQueries / kWarps;
static_assert(kSplitMultiple % kKeys == 0);

struct alignas(16) Tile {
  float q[kQueries][kDims];
  // keys or values; padded to avoid bank conflicts when reading a column
  float rows[kKeys][kDims + 1];
  float p[kQueries][kKeys];
};

__device__ int warp_index() { return threadIdx.x / kWarp; }
__device__ int lane_index() { return threadIdx.x % kWarp; }

// Dimensions [dim, dim + kDims) of the queries from `first` on; zeros past the end.
__device__ void load_queries(const PrefillStep& step, int32_t kv_head, int32_t first, int32_t dim,
                             Tile& tile) {
  for (int query = warp_index(); query < kQueries; query += kWarps) {
    const int32_t t = first + query;
    const bool exists = t < step.n_queries();
    const float* q = step.q + step.offset(kv_head, exists ? t : 0) + dim;
    for (int c = lane_index(); c < kDims; c += kWarp) {
      tile.q[query][c] = exists && dim + c < step.cache.head_dim ? q[c] : 0.0f;
    }
  }
}

// The same for keys (or values) from `first` on, of `n_keys`.
template <bool of_keys>
__device__ void load_rows(const PrefillStep& step, const SegmentKeys& keys, int32_t first,
                          int32_t n_keys, int32_t dim, Tile& tile) {
  for (int key = warp_index(); key < kKeys; key += kWarps) {
    const bool exists = first + key < n_keys;
    const StoredRow row(step, keys, exists ? first + key : 0);
    for (int c = lane_index(); c < kDims; c += kWarp) {
      const bool inside = exists && dim + c < step.cache.head_dim;
      tile.rows[key][c] = !inside ? 0.0f : of_keys ? row.key(dim + c) : row.value(dim + c);
    }
  }
}

// Base-2 logits of this warp's queries and this lane's key.
__device__ void multiply_tile(const PrefillStep& step, const SegmentKeys& keys, int32_t kv_head,
                              int32_t first_query, int32_t first_key, int32_t n_keys, Tile& tile,
                              float (&logits)[kOwnQueries]) {
#pragma unroll
  for (float& logit : logits) logit = 0.0f;
  for (int32_t dim = 0; dim < step.cache.head_dim; dim += kDims) {
    __syncthreads();  // no thread reads the previous rows
    load_queries(step, kv_head, first_query, dim, tile);
    load_rows<true>(step, keys, first_key, n_keys, dim, tile);
    __syncthreads();
    const float* key = tile.rows[lane_index()];
#pragma unroll 4
    for (int c = 0; c < kDims; c += 4) {
#pragma unroll
      for (int i = 0; i < kOwnQueries; ++i) {
        const auto q = *reinterpret_cast<const float4*>(&tile.q[warp_index() * kOwnQueries + i][c]);
        logits[i] = fmaf(q.x, key[c], logits[i]);
        logits[i] = fmaf(q.y, key[c + 1], logits[i]);
        logits[i] = fmaf(q.z, key[c + 2], logits[i]);
        logits[i] = fmaf(q.w, key[c + 3], logits[i]);
      }
    }
  }
#pragma unroll
  for (float& logit : logits) logit *= step.scale;
  if (!step.changes.any()) return;
  const int32_t key = min(first_key + lane_index(), n_keys - 1);
#pragma unroll
  for (int i = 0; i < kOwnQueries; ++i) {
    const int32_t t = min(first_query + warp_index() * kOwnQueries + i, step.n_queries() - 1);
    logits[i] = step.changes.changed(logits[i], step.head(kv_head, t), [&] {
      return keys.distance(step.segment, t / step.group, key);
    });
  }
}

// The last key that query t sees; -1 if t is past the end.
__device__ int32_t last_visible(const PrefillStep& step, const SegmentKeys& keys, int32_t t) {
  return t < step.n_queries() ? keys.kept + t / step.group : -1;
}

// Is key i inside the window of query t, which must exist?
__device__ bool in_window(const PrefillStep& step, const SegmentKeys& keys, int32_t t, int32_t i) {
  return step.window == 0 || keys.distance(step.segment, t / step.group, i) < step.window;
}

__global__ void __launch_bounds__(kThreads, 4) prefill_f32_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  std::byte* const shared = dynamic_shared<std::byte>();
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const int32_t head_dim = step.cache.head_dim;
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const int32_t first_query = (block.last - block.tile) * kQueries;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const int32_t last_query = min(first_query + kQueries, step.n_queries()) - 1;
  const int32_t n_keys = last_visible(step, keys, last_query) + 1;
  const auto split = static_cast<int32_t>(blockIdx.y);
  const int32_t end = min((split + 1) * step.splits.length, n_keys);
  const int32_t begin = max(split * step.splits.length, first_tile(step, keys, first_query));
  if (begin >= end) return;

  const int own = warp_index() * kOwnQueries;
  // [kOwnQueries, head_dim] output accumulators; each element is accessed by one thread only.
  float* const sums = reinterpret_cast<float*>(shared + sizeof(Tile)) + own * head_dim;
  float largest[kOwnQueries], total[kOwnQueries];
#pragma unroll
  for (int i = 0; i < kOwnQueries; ++i) {
    const bool sinks = step.changes.sinks != nullptr && step.splits.n == 1;
    largest[i] = sinks ? step.changes.sink(step.head(kv_head, first_query + own + i)) : -INFINITY;
    total[i] = sinks ? 1.0f : 0.0f;
    for (int32_t c = lane_index(); c < head_dim; c += kWarp) sums[i * head_dim + c] = 0.0f;
  }

  for (int32_t first_key = begin; first_key < end; first_key += kKeys) {
    float logits[kOwnQueries], correction[kOwnQueries];
    multiply_tile(step, keys, kv_head, first_query, first_key, n_keys, tile, logits);
#pragma unroll
    for (int i = 0; i < kOwnQueries; ++i) {
      const int32_t t = first_query + own + i, key = first_key + lane_index();
      const bool visible = key <= last_visible(step, keys, t) && in_window(step, keys, t, key);
      const float before = largest[i];
      largest[i] = fmaxf(before, warp_max(visible ? logits[i] : -INFINITY));
      correction[i] = exp2_negative(before - largest[i]);
      const float p = visible ? exp2_negative(logits[i] - largest[i]) : 0.0f;
      total[i] = total[i] * correction[i] + warp_sum(p);
      tile.p[own + i][lane_index()] = p;
    }

    for (int32_t dim = 0; dim < head_dim; dim += kDims) {
      __syncthreads();
      load_rows<false>(step, keys, first_key, n_keys, dim, tile);
      __syncthreads();
      for (int c = lane_index(); c < kDims && dim + c < head_dim; c += kWarp) {
        float sum[kOwnQueries] = {};
#pragma unroll 8
        for (int key = 0; key < kKeys; ++key) {
#pragma unroll
          for (int i = 0; i < kOwnQueries; ++i) {
            sum[i] = fmaf(tile.p[own + i][key], tile.rows[key][c], sum[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kOwnQueries; ++i) {
          float& all = sums[i * head_dim + dim + c];
          all = fmaf(all, correction[i], sum[i]);
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kOwnQueries; ++i) {
    const int32_t t = first_query + own + i;
    if (t >= step.n_queries()) continue;
    if (step.splits.n > 1) {
      const int64_t partial = step.first_partial(kv_head, t) + split;
      float* out = step.splits.out + partial * head_dim;
      for (int32_t c = lane_index(); c < head_dim; c += kWarp) out[c] = sums[i * head_dim + c];
      if (lane_index() == 0) {
        step.splits.shift[partial] = largest[i];
        step.splits.total[partial] = total[i];
      }
      continue;
    }
    float* out = step.out + step.offset(kv_head, t);
    for (int32_t c = lane_index(); c < head_dim; c += kWarp) {
      out[c] = __fdividef(sums[i * head_dim + c], total[i]);
    }
    if (step.lse != nullptr && lane_index() == 0) {
      step.lse[step.first_query(kv_head) + t] = largest[i] + log2f(total[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 4) score_rows_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  std::byte* const shared = dynamic_shared<std::byte>();
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const int32_t first_key = block.tile * kKeys;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const int32_t n_keys = keys.kept + step.segment.n_rows;
  if (keys.head.scores == nullptr || first_key >= n_keys) return;
  if (keys.head.policy.scoring == Scoring::question) return;

  const int own = warp_index() * kOwnQueries;
  const float* lse = step.lse + step.first_query(kv_head);
  const int32_t key = first_key + lane_index();
  float received = 0.0f;
  int32_t first_query = max(0, first_key - keys.kept) * step.group;
  const int32_t end =
      keys.end_of_seeing(step.segment, step.window, first_key + kKeys - 1) * step.group;
  for (; first_query < end; first_query += kQueries) {
    float logits[kOwnQueries];
    multiply_tile(step, keys, kv_head, first_query, first_key, n_keys, tile, logits);
#pragma unroll
    for (int i = 0; i < kOwnQueries; ++i) {
      const int32_t t = first_query + own + i;
      if (key > last_visible(step, keys, t) || !in_window(step, keys, t, key)) continue;
      const float p = exp2_negative(logits[i] - lse[t]);
      received = fmaf(p, decay_since(step, keys.head.policy, t / step.group), received);
    }
  }

  tile.p[warp_index()][lane_index()] = received;
  __syncthreads();
  if (warp_index() > 0 || key >= n_keys) return;
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) received += tile.p[warp][lane_index()];
  add_score(step, keys, key, received);
}

// The same for Scoring::question: the largest attention from one row, summed over its heads.
__global__ void __launch_bounds__(kThreads, 4) score_questions_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  std::byte* const shared = dynamic_shared<std::byte>();
  Tile& tile = *reinterpret_cast<Tile*>(shared);
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head;
  const int32_t first_key = block.tile * kKeys;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  const KvPolicy& policy = keys.head.policy;
  const int32_t n_keys = keys.kept + step.segment.n_rows;
  if (keys.head.scores == nullptr || first_key >= n_keys) return;
  if (policy.scoring != Scoring::question) return;

  const int own = warp_index() * kOwnQueries;
  const int32_t key = first_key + lane_index();
  const float* lse = step.lse + step.first_query(kv_head);
  const auto first_scored = static_cast<int32_t>(policy.first_scored(step.segment.n_rows));
  int32_t first_query = max(first_key - keys.kept, first_scored) * step.group;
  float received = 0.0f, largest = 0.0f;  // in the first warp: from the current row, and so far
  for (; first_query < step.n_queries(); first_query += kQueries) {
    float logits[kOwnQueries];
    multiply_tile(step, keys, kv_head, first_query, first_key, n_keys, tile, logits);
#pragma unroll
    for (int i = 0; i < kOwnQueries; ++i) {
      const int32_t t = first_query + own + i;
      const bool visible = key <= last_visible(step, keys, t) && in_window(step, keys, t, key);
      tile.p[own + i][lane_index()] = visible ? exp2_negative(logits[i] - lse[t]) : 0.0f;
    }
    __syncthreads();
    if (warp_index() > 0) continue;
    const int n = min(kQueries, step.n_queries() - first_query);
    for (int i = 0; i < n; ++i) {
      const int32_t t = first_query + i;
      received += tile.p[i][lane_index()];
      if (t % step.group < step.group - 1) continue;
      largest = fmaxf(largest, received * decay_since(step, policy, t / step.group));
      received = 0.0f;
    }
  }
  if (warp_index() == 0 && key < n_keys) add_score(step, keys, key, largest);
}

}  // namespace

void prefill_f32(const Stream& stream, PrefillStep step) {
  const size_t sums = size_t{kQueries} * step.cache.head_dim * sizeof(float);
  const dim3 grid = split_keys(step, kQueries);
  launch(stream, prefill_f32_kernel, grid, dim3(kThreads), sizeof(Tile) + sums, step);
  if (step.splits.n > 1) merge_splits(stream, step);
}

void score_rows(const Stream& stream, const PrefillStep& step) {
  launch(stream, score_rows_kernel, Tiles::grid(step.cache, step.max_keys(), kKeys), dim3(kThreads),
         sizeof(Tile), step);
}

void score_questions(const Stream& stream, const PrefillStep& step) {
  launch(stream, score_questions_kernel, Tiles::grid(step.cache, step.max_keys(), kKeys),
         dim3(kThreads), sizeof(Tile), step);
}

}  // namespace h2o::cuda

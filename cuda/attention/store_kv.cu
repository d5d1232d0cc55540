// Rotates new rows, converts them to the cache's types and stores them.
#include <algorithm>
#include <cfloat>

#include "cuda/attention/attend.h"
#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/runtime/launch.cuh"
#include "kv/range.h"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostHeads = 8;            // per block, at most
constexpr int64_t kBlocksAtOnce = 2112;  // that fit on 132 multiprocessors

struct Rows {
  float* q;        // [n, n_heads * head_dim]
  const float* k;  // [n, n_kv_heads * head_dim]; nullptr: nothing is stored
  const float* v;  // [n, n_kv_heads * head_dim]
};

// The norm of a value, by all threads.
__device__ float value_norm(const KvView& cache, ValueNorm kind, int kv_head, const float* v,
                            float* scratch) {
  const int head_dim = cache.head_dim;
  const bool output = kind == ValueNorm::output;
  const float* gram = cache.output_gram + int64_t{kv_head} * head_dim * head_dim;  // symmetric
  float norm = 0;
  for (int i = threadIdx.x; i < head_dim; i += kThreads) {
    float moved = 0;
    for (int j = 0; output && j < head_dim; ++j) moved = fmaf(gram[j * head_dim + i], v[j], moved);
    norm += output ? moved * v[i] : fabsf(v[i]);
  }
  norm = block_sum(norm, scratch);
  if (output) norm = sqrtf(fmaxf(norm, 0));  // rounding may make it negative
  return norm < FLT_MAX ? norm : FLT_MAX;    // finite for any v, so that importances can be ordered
}

// One block per row and `n_heads` kv_heads. Each computes the sines of its position again: a table
// for all would take a launch per step, and blocks would read it after they have waited, whereas
// they compute sines while the previous kernel runs. kLater: of a later turn than the first.
template <bool kLater>
__global__ void __launch_bounds__(kThreads)
    store_kv_kernel(Rows rows, Rotation rotation, KvView cache, DeviceBatch batch, int n_heads) {
  __shared__ float scratch[kThreads / kWarp];
  let_next_start();

  // Written by copies only, except for next_slot, which the previous pass wrote: a copy has waited
  // for that. Earlier turns have written it in this pass.
  if constexpr (kLater) wait_for_previous();
  const int row = (kLater ? batch.first_row : 0) + static_cast<int>(blockIdx.x);
  const int first_head = blockIdx.y * n_heads;
  n_heads = min(n_heads, cache.n_kv_heads - first_head);
  const int head_dim = cache.head_dim, half = rotation.half;
  const int width = n_heads * head_dim;
  float* const k = dynamic_shared<float>();                         // [n_heads, head_dim]
  float* const v = k + width;                                       // [n_heads, head_dim]
  float2* const rope_table = reinterpret_cast<float2*>(v + width);  // [half]
  const Segment segment = batch.segments[batch.segment_of[row]];
  const int own = row - segment.row;
  const SegmentKeys first(cache, segment, first_head);
  const int position = own + (segment.rolling ? first.kept : segment.position);
  for (int i = threadIdx.x; i < half; i += kThreads) rope_table[i] = rotation.angle(position, i);
  if constexpr (!kLater) wait_for_previous();

  const int64_t column = (int64_t{row} * cache.n_kv_heads + first_head) * head_dim;
#pragma unroll 4
  for (int i = threadIdx.x; rows.k != nullptr && i < width; i += kThreads) {
    k[i] = rows.k[column + i];
    v[i] = rows.v[column + i];
  }
  __syncthreads();
  const int group = cache.n_heads / cache.n_kv_heads;
  float* const q = rows.q + column * group;
  rotation.apply_all<kThreads>(q, n_heads * group, head_dim, rope_table);
  if (rows.k == nullptr) return;
  if (!segment.rolling) rotation.apply_all<kThreads>(k, n_heads, head_dim, rope_table);
  __syncthreads();
  const float most_k = most_stored(cache.k_dtype), most_v = most_stored(cache.v_dtype);
  for (int i = threadIdx.x; i < width; i += kThreads) {
    clamp_to(most_k, k[i]);
    clamp_to(most_v, v[i]);
  }
  __syncthreads();

  for (int h = 0; h < n_heads; ++h) {
    const SegmentKeys keys = h == 0 ? first : SegmentKeys(cache, segment, first_head + h);
    const KvRow to = keys.row(cache, keys.kept + own);
    write_row(cache.k_dtype, to.k, k + h * head_dim, head_dim);
    write_row(cache.v_dtype, to.v, v + h * head_dim, head_dim);
    if (to.value_norm != nullptr) {
      const float norm =
          value_norm(cache, keys.head.policy.value_norm, first_head + h, v + h * head_dim, scratch);
      if (threadIdx.x == 0) *to.value_norm = norm;
    }
    if (threadIdx.x > 0) continue;
    if (to.score != nullptr) *to.score = 0;
    if (keys.fits) {
      const int slot = keys.slot(keys.kept + own);
      keys.head.positions[slot] = segment.position + own;
      if (segment.rolling) keys.head.ranks[slot] = keys.kept + own;
    }
  }
}

}  // namespace

void store_kv(const Stream& stream, const Attention& attention, const KvView& cache,
              const DeviceBatch& batch) {
  const Rotation rotation(attention.rope);
  // Few rows need the parallelism, many rows save sines.
  const auto n_heads =
      static_cast<int>(std::clamp<int64_t>(int64_t{batch.n_rows} * cache.n_kv_heads / kBlocksAtOnce,
                                           1, std::min(kMostHeads, cache.n_kv_heads)));
  const dim3 grid(static_cast<unsigned>(batch.n_rows), (cache.n_kv_heads + n_heads - 1) / n_heads);
  const size_t shared = (2 * n_heads * cache.head_dim + 2 * rotation.half) * sizeof(float);
  const Rows rows{attention.q.floats(), attention.k.floats(), attention.v.floats()};
  const auto kernel = batch.first_row > 0 ? store_kv_kernel<true> : store_kv_kernel<false>;
  launch(stream, kernel, grid, dim3(kThreads), shared, rows, rotation, cache, batch, n_heads);
}

}  // namespace h2o::cuda

// Rotates new rows, converts them to the cache's types and stores them.
#include <cfloat>

#include "cuda/attention/attend.h"
#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/attention/segment_keys.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 128;

struct Rows {
  float* q;        // [n, n_heads * head_dim]
  const float* k;  // [n, n_kv_heads * head_dim]
  const float* v;  // [n, n_kv_heads * head_dim]
};

// One block per (row, kv_head). Each computes the sines of its position again: a table for all
// heads would take a launch per step, and blocks would read it after they have waited, whereas they
// compute sines while the previous kernel runs.
__global__ void store_kv_kernel(Rows rows, Rotation rotation, KvView cache, DeviceBatch batch) {
  float* const shared = dynamic_shared<float>();
  __shared__ float scratch[kThreads / kWarp];
  const int head_dim = cache.head_dim;
  float* k = shared;                                             // [head_dim]
  float* v = k + head_dim;                                       // [head_dim]
  float2* rope_table = reinterpret_cast<float2*>(v + head_dim);  // [half]
  let_next_start();

  // Written by copies only, except for next_slot, which the previous pass wrote: a copy has waited
  // for that.
  const int row = blockIdx.x, kv_head = blockIdx.y;
  const Segment segment = batch.segments[batch.segment_of[row]];
  const SegmentKeys keys(cache, segment, kv_head);
  const int own = row - segment.row;
  const int position = own + (segment.rolling ? keys.kept : segment.position);

  const int64_t column = (int64_t{row} * cache.n_kv_heads + kv_head) * head_dim;
  for (int i = threadIdx.x; i < rotation.half; i += kThreads)
    rope_table[i] = rotation.angle(position, i);
  wait_for_previous();
  for (int i = threadIdx.x; i < head_dim; i += kThreads) {
    k[i] = rows.k[column + i];
    v[i] = rows.v[column + i];
  }
  __syncthreads();

  const int group = cache.n_heads / cache.n_kv_heads;
  float* q = rows.q + column * group;
  for (int i = threadIdx.x; i < group * rotation.half; i += kThreads) {
    rotation.apply(q + i / rotation.half * head_dim, i % rotation.half,
                   rope_table[i % rotation.half]);
  }
  if (!segment.rolling) {
    for (int i = threadIdx.x; i < rotation.half; i += kThreads) rotation.apply(k, i, rope_table[i]);
  }
  __syncthreads();

  const KvRow to = keys.row(cache, keys.kept + own);
  write_row(cache.k_dtype, to.k, k, head_dim);
  write_row(cache.v_dtype, to.v, v, head_dim);
  if (to.value_norm != nullptr) {
    const bool output = keys.head.policy.value_norm == ValueNorm::output;
    const float* gram = cache.output_gram + int64_t{kv_head} * head_dim * head_dim;  // symmetric
    float norm = 0;
    for (int i = threadIdx.x; i < head_dim; i += kThreads) {
      float moved = 0;
      for (int j = 0; output && j < head_dim; ++j)
        moved = fmaf(gram[j * head_dim + i], v[j], moved);
      norm += output ? moved * v[i] : fabsf(v[i]);
    }
    norm = block_sum(norm, scratch);
    if (output) norm = sqrtf(fmaxf(norm, 0));  // rounding may make it negative
    // Finite for any v, so that importances can be ordered.
    if (threadIdx.x == 0) *to.value_norm = norm < FLT_MAX ? norm : FLT_MAX;
  }
  if (threadIdx.x == 0) {
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
  const dim3 grid(static_cast<unsigned>(attention.q.rows), cache.n_kv_heads);
  const size_t shared = (2 * cache.head_dim + 2 * rotation.half) * sizeof(float);
  const Rows rows{attention.q.floats(), attention.k.floats(), attention.v.floats()};
  launch(stream, store_kv_kernel, grid, dim3(kThreads), shared, rows, rotation, cache, batch);
}

}  // namespace h2o::cuda

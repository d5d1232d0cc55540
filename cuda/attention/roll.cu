// Switches sequences to rolling positions: un-rotates their keys and computes ranks.
#include <algorithm>

#include "cuda/attention/attend.h"
#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/rope.cuh"
#include "cuda/runtime/launch.cuh"
#include "kv/range.h"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 128;

// rope_table [n, n_rot]; one block per position.
__global__ void rope_table_kernel(float* rope_table, Rotation rotation) {
  let_next_start();
  wait_for_previous();
  float* row = rope_table + int64_t{blockIdx.x} * 2 * rotation.half;
  for (int i = threadIdx.x; i < rotation.half; i += blockDim.x) {
    const float2 angle = rotation.angle(blockIdx.x, i);
    row[i] = angle.x;
    row[rotation.half + i] = angle.y;
  }
}

// One block per (slot, kv_head). A token's rank is the number of older tokens.
__global__ void roll_kernel(KvView cache, Rotation back, int32_t sequence, int32_t length) {
  float* const key = dynamic_shared<float>();  // [head_dim]
  __shared__ float scratch[kThreads / kWarp];
  let_next_start();
  wait_for_previous();
  const KvHead head = cache.head(sequence, blockIdx.y);
  const int32_t slot = blockIdx.x;
  const int32_t written = head.written(length);
  const int32_t vacant = head.vacant_slot(length);
  if (slot >= written || slot == vacant) return;

  const int32_t position = head.positions[slot];
  std::byte* stored = head.k + slot * cache.k_row_bytes;
  for (int i = threadIdx.x; i < cache.head_dim; i += kThreads) {
    key[i] = element(cache.k_dtype, stored, i);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < back.half; i += kThreads) {
    back.apply(key, i, back.angle(-position, i));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < cache.head_dim; i += kThreads) {
    clamp_to(most_stored(cache.k_dtype), key[i]);
  }
  __syncthreads();
  write_row(cache.k_dtype, stored, key, cache.head_dim);

  float older = 0;  // counts up to 2^24 are exact in f32
  for (int32_t i = threadIdx.x; i < written; i += kThreads) {
    older += i != vacant && head.positions[i] < position ? 1.0f : 0.0f;
  }
  older = block_sum(older, scratch);
  if (threadIdx.x == 0) head.ranks[slot] = static_cast<int32_t>(older);
}

}  // namespace

void compute_rope_table(const Stream& stream, const Tensor& rope_table, const Rope& rope) {
  launch(stream, rope_table_kernel, dim3(static_cast<unsigned>(rope_table.rows)), dim3(kThreads), 0,
         rope_table.floats(), Rotation(rope));
}

void roll(const Stream& stream, const KvView& cache, const Rope& rope, int32_t sequence,
          int32_t length) {
  if (length == 0) return;
  Rope back = rope;
  back.magnitude = 1 / rope.magnitude;
  const dim3 grid(std::min(length, cache.slots), cache.n_kv_heads);
  launch(stream, roll_kernel, grid, dim3(kThreads), cache.head_dim * sizeof(float), cache,
         Rotation(back), sequence, length);
}

}  // namespace h2o::cuda

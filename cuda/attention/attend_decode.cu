// Attention of one new token for each sequence, over the dense slots: two launches. The first
// splits the slots over blocks, each with its own softmax; the second merges them, adds the
// probabilities, which need the whole softmax, to the scores, and finds who is to be evicted. The
// first is in decode_splits.cuh, compiled once for each way to read rows.
#include <cfloat>

#include "cuda/attention/attend.h"
#include "cuda/attention/decode_splits.h"
#include "cuda/attention/decode_team.cuh"
#include "cuda/attention/select_victim.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kFinishThreads = 512;

// The softmax of a query head over all splits.
struct Softmax {
  float largest;
  float inverse;  // of the sum of e^(logit - largest)
};

// By one warp.
__device__ Softmax merge(const Partials& partials, int64_t query, int n_splits) {
  const float* largest = partials.largest + query * partials.splits.n;
  const float* total = partials.total + query * partials.splits.n;
  const int lane = threadIdx.x % kWarp;
  float most = -INFINITY;
  for (int s = lane; s < n_splits; s += kWarp) most = fmaxf(most, largest[s]);
  most = warp_max(most);
  float sum = 0;
  for (int s = lane; s < n_splits; s += kWarp) {
    sum = fmaf(exp_negative(largest[s] - most), total[s], sum);
  }
  // Not infinite where no logit was a number.
  return {most, 1 / fmaxf(warp_sum(sum), FLT_MIN)};
}

// Two blocks for each (segment, kv_head): one merges the outputs, the other does the scores.
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(Decode decode, KvView cache, DeviceBatch batch) {
  float* const shared = dynamic_shared<float>();  // [group] Softmax
  __shared__ Victim scratch[kFinishThreads / kWarp];
  let_next_start();
  wait_for_previous();

  const Segment segment = batch.segments[blockIdx.x];
  if (segment.n_rows != 1) return;
  const int kv_head = blockIdx.y;
  const int group = cache.n_heads / cache.n_kv_heads;
  const KvHead head = cache.head(segment.sequence, kv_head);
  const int used = head.policy.kept(segment.position) + 1;
  const Partials partials(cache, cache.workspace);
  const int n_splits = (used + partials.splits.length - 1) / partials.splits.length;
  const int64_t query = int64_t{segment.sequence} * cache.n_heads + kv_head * group;

  auto* softmax = reinterpret_cast<Softmax*>(shared);
  for (int h = threadIdx.x / kWarp; h < group; h += kFinishThreads / kWarp) {
    const Softmax merged = merge(partials, query + h, n_splits);
    if (threadIdx.x % kWarp == 0) softmax[h] = merged;
  }
  __syncthreads();

  if (blockIdx.z == 0) {
    const int head_dim = cache.head_dim;
    float* out = decode.out + (int64_t{segment.row} * cache.n_heads + kv_head * group) * head_dim;
    for (int i = threadIdx.x; i < group * head_dim; i += kFinishThreads) {
      const int h = i / head_dim;
      const int64_t first = (query + h) * partials.splits.n;
      float sum = 0;
#pragma unroll 4
      for (int s = 0; s < n_splits; ++s) {
        const float weight = exp_negative(partials.largest[first + s] - softmax[h].largest);
        sum = fmaf(weight, partials.out[(first + s) * head_dim + i % head_dim], sum);
      }
      out[i] = sum * softmax[h].inverse;
    }
    return;
  }

  const float* logits = partials.logits + query * partials.stride;
  select_next_slot(head, segment, used, scratch, [&](int32_t slot) {
    if (head.scores == nullptr) return 0.0f;
    float received = 0;
    for (int h = 0; h < group; ++h) {
      const float p = exp_negative(logits[h * partials.stride + slot] - softmax[h].largest);
      received = fmaf(p, softmax[h].inverse, received);
    }
    const float score = head.scores[slot] * head.policy.decay + received;
    head.scores[slot] = score;
    return score;
  });
}

}  // namespace

size_t decode_workspace(const KvView& shape) { return Partials(shape, nullptr).bytes; }

void decode(const Stream& stream, const Attention& attention, const KvView& cache,
            const DeviceBatch& batch, int32_t n_segments) {
  const Decode decode{attention.q.floats(), attention.out.floats(), attention.scale,
                      static_cast<int32_t>(attention.rope.frequencies.cols),
                      attention.rope.layout == RopeLayout::pairs};
  const bool whole = cache.head_dim % 8 == 0 && cache.head_dim <= 256;
  const auto both = [&](DType type) {
    return whole && cache.k_dtype == type && cache.v_dtype == type;
  };
  if (both(DType::f16)) {
    decode_splits<F16Row>(stream, decode, cache, batch, n_segments);
  } else if (both(DType::q8_0)) {
    decode_splits<Q8_0Row>(stream, decode, cache, batch, n_segments);
  } else {
    decode_splits<Single>(stream, decode, cache, batch, n_segments);
  }
  const size_t shared = size_t{2} * (cache.n_heads / cache.n_kv_heads) * sizeof(float);
  launch(stream, finish_kernel, dim3(n_segments, cache.n_kv_heads, 2), dim3(kFinishThreads), shared,
         decode, cache, batch);
}

}  // namespace h2o::cuda

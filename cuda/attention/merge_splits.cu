// Prefill attention whose keys are split over blocks: merges the splits of each query.
#include <cfloat>

#include "cuda/attention/prefill_step.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;

// One block per query. Each warp sums every kWarps-th split, and their sums are added in order.
__global__ void __launch_bounds__(kThreads) merge_splits_kernel(PrefillStep step) {
  let_next_start();
  wait_for_previous();
  float* const sums = dynamic_shared<float>();  // [kWarps, head_dim]
  const Tiles block(step.cache);
  const int32_t kv_head = block.kv_head, t = block.tile;
  const int32_t head_dim = step.cache.head_dim;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  // With a key that the query sees.
  const int32_t n_splits = (keys.kept + t / step.group) / step.splits.length + 1;
  const int64_t first = step.first_partial(kv_head, t);
  const float* const shift = step.splits.shift + first;
  const float* const total = step.splits.total + first;
  const float* const out = step.splits.out + first * head_dim;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  float largest = -INFINITY;
  for (int s = lane; s < n_splits; s += kWarp) largest = fmaxf(largest, shift[s]);
  largest = warp_max(largest);
  const bool sinks = step.changes.sinks != nullptr;
  const float sink = sinks ? step.changes.sink(step.head(kv_head, t)) : 0;
  if (sinks) largest = fmaxf(largest, sink);
  float all = sinks && lane == 0 ? exp2_negative(sink - largest) : 0;
  for (int s = lane; s < n_splits; s += kWarp) {
    all = fmaf(exp2_negative(shift[s] - largest), total[s], all);
  }
  all = fmaxf(warp_sum(all), FLT_MIN);  // finite even if every logit is NaN

  for (int d = lane; d < head_dim; d += kWarp) {
    float sum = 0;
#pragma unroll 8
    for (int s = warp; s < n_splits; s += kWarps) {
      sum = fmaf(exp2_negative(shift[s] - largest), out[int64_t{s} * head_dim + d], sum);
    }
    sums[warp * head_dim + d] = sum;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    float sum = sums[d];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += sums[w * head_dim + d];
    step.out[step.offset(kv_head, t) + d] = sum / all;
  }
  if (step.lse != nullptr && threadIdx.x == 0) {
    step.lse[step.first_query(kv_head) + t] = largest + log2f(all);
  }
}

}  // namespace

void merge_splits(const Stream& stream, const PrefillStep& step) {
  launch(stream, merge_splits_kernel, Tiles::grid(step.cache, step.n_queries(), 1), dim3(kThreads),
         size_t{kWarps} * step.cache.head_dim * sizeof(float), step);
}

}  // namespace h2o::cuda

// Prefill attention whose keys are split over blocks: merges the splits of each query.
#include <cfloat>

#include "cuda/attention/prefill_step.cuh"
#include "cuda/matmul/operands.cuh"
#include "cuda/runtime/launch.cuh"

namespace h2o::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;

// Each query has kParts warps of a block: each sums every kParts-th split, and their sums are added
// in order.
template <int kParts>
__global__ void __launch_bounds__(kThreads) merge_splits_kernel(PrefillStep step) {
  constexpr int kQueries = kWarps / kParts;
  let_next_start();
  wait_for_previous();
  const Tiles block(step.cache);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t kv_head = block.kv_head, t = block.tile * kQueries + warp / kParts;
  if (t >= step.n_queries()) return;  // only if kParts is 1
  const int part = warp % kParts;
  const int32_t head_dim = step.cache.head_dim;
  const SegmentKeys keys(step.cache, step.segment, kv_head);
  // Splits with a key that the query sees.
  const int32_t begin = first_tile(step, keys, t) / step.splits.length;
  const int32_t n_splits = (keys.kept + t / step.group) / step.splits.length + 1 - begin;
  const int64_t first = step.first_partial(kv_head, t) + begin;
  const float* const shift = step.splits.shift + first;
  const float* const total = step.splits.total + first;
  const float* const out = step.splits.out + first * head_dim;

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

  const int64_t to = step.offset(kv_head, t);
  const auto write = [&](int d, float x) {
    step.out[to + d] = x;
    write_halves(step.operands, to + d, x);
  };
  float* const sums = dynamic_shared<float>();  // [kParts, head_dim], unless kParts is 1
  for (int d = lane; d < head_dim; d += kWarp) {
    float sum = 0;
#pragma unroll 8
    for (int s = part; s < n_splits; s += kParts) {
      sum = fmaf(exp2_negative(shift[s] - largest), out[int64_t{s} * head_dim + d], sum);
    }
    if constexpr (kParts == 1) {
      write(d, sum / all);
    } else {
      sums[part * head_dim + d] = sum;
    }
  }
  if constexpr (kParts > 1) {
    __syncthreads();
    for (int d = threadIdx.x; d < head_dim; d += kThreads) {
      float sum = sums[d];
#pragma unroll
      for (int p = 1; p < kParts; ++p) sum += sums[p * head_dim + d];
      write(d, sum / all);
    }
  }
  if (step.lse != nullptr && part == 0 && lane == 0) {
    step.lse[step.first_query(kv_head) + t] = largest + log2f(all);
  }
}

}  // namespace

void merge_splits(const Stream& stream, const PrefillStep& step) {
  const auto merge = [&]<int kParts>() {
    const size_t shared = kParts > 1 ? size_t{kParts} * step.cache.head_dim * sizeof(float) : 0;
    launch(stream, merge_splits_kernel<kParts>,
           Tiles::grid(step.cache, step.n_queries(), kWarps / kParts), dim3(kThreads), shared,
           step);
  };
  if (step.splits.n < kWarps) {
    merge.template operator()<1>();
  } else {
    merge.template operator()<kWarps>();
  }
}

}  // namespace h2o::cuda

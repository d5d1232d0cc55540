#include <climits>

#include "cuda/gates.cuh"
#include "cuda/logit_key.cuh"
#include "cuda/matmul/operands.cuh"
#include "cuda/matmul/round_group.cuh"
#include "cuda/operations.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 256;      // of blocks over elements
constexpr int kRouteWarps = 32;    // warps of blocks over rows of logits, one row each
constexpr int kCopyThreads = 512;  // of a block for one copy or row

__device__ uint64_t largest_key(uint64_t key) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    key = max(key, __shfl_xor_sync(kAllLanes, key, apart));
  }
  return key;
}

// The selected groups, as bits, by one warp: a lane has a group.
template <class Key>
__device__ unsigned select_groups(const Routes& routes, const Key& key) {
  if (routes.n_groups == 1) return 1;
  const int lane = threadIdx.x % kWarp;
  const int size = routes.n_experts / routes.n_groups;
  uint64_t sum = 0;
  if (lane < routes.n_groups) {
    uint64_t first = 0, second = 0;
    for (int e = lane * size; e < (lane + 1) * size; ++e) {
      second = max(second, min(first, key(e)));
      first = max(first, key(e));
    }
    const float both = logit_of(first) + (size > 1 ? logit_of(second) : 0);
    sum = key_of(fmaxf(both, -INFINITY), lane);
  }
  unsigned selected = 0;
  for (int j = 0; j < routes.n_groups_used; ++j) {
    const uint64_t best = largest_key(sum);
    selected |= 1u << token_of(best);
    if (sum == best) sum = 0;
  }
  return selected;
}

// Selects the experts and weights of a row, by one warp. The experts overwrite the logits, as bits:
// `copy_rows` is written while warps read them.
__device__ void select_experts(const Routes& routes, float* logits, const float* bias, int row) {
  const int lane = threadIdx.x % kWarp;
  const int n = routes.n_experts;
  float* const x = logits + int64_t{row} * n;
  float largest = -INFINITY, total = 0;
  if (!routes.sigmoid) {
    for (int e = lane; e < n; e += kWarp) largest = fmaxf(largest, x[e]);
    largest = warp_max(largest);
    for (int e = lane; e < n; e += kWarp) total += expf(x[e] - largest);
    total = warp_sum(total);
  }
  const auto score = [&](float logit) {
    return routes.sigmoid ? sigmoid(logit) : expf(logit - largest) / total;
  };
  // The softmax keeps the order of the logits.
  const bool by_score = routes.sigmoid || bias != nullptr || routes.n_groups > 1;
  const auto key = [&](int e) {
    float value = x[e];
    if (by_score) value = score(value) + (bias != nullptr ? bias[e] : 0);
    return key_of(fmaxf(value, -INFINITY), e);  // NaN sorts lowest
  };
  const unsigned groups = select_groups(routes, key);
  const int group_size = n / routes.n_groups;

  // Lane j has choices j, j + 32, ...
  float* const weights = routes.weights + int64_t{row} * routes.n_used;
  int32_t* const selected = routes.copy_rows + int64_t{row} * routes.n_used;
  float sum = 1e-20f;  // sigmoids may all be 0
  uint64_t last = UINT64_MAX;
  for (int j = 0; j < routes.n_used; ++j) {
    uint64_t best = 0;
    for (int e = lane; e < n; e += kWarp) {
      if (routes.n_groups > 1 && (groups >> e / group_size & 1) == 0) continue;
      const uint64_t candidate = key(e);
      if (candidate < last) best = max(best, candidate);
    }
    last = best = largest_key(best);
    const float weight = score(x[token_of(best)]);
    sum += weight;
    if (lane == j % kWarp) {
      weights[j] = weight;
      selected[j] = token_of(best);
    }
  }
  const float factor = routes.normalized ? routes.scale / sum : routes.scale;
  __syncwarp();
  for (int j = lane; j < routes.n_used; j += kWarp) {
    weights[j] *= factor;
    if (routes.expert_scales != nullptr) weights[j] *= routes.expert_scales[selected[j]];
    x[j] = __int_as_float(selected[j]);
  }
}

// Computes the indices of the copies for expert e, in row order; by one warp.
__device__ void place(const Routes& routes, const float* logits, int n_rows, int e) {
  const int lane = threadIdx.x % kWarp;
  const int n_copies = n_rows * routes.n_used;
  const auto expert = [&](int copy) {
    if (copy >= n_copies) return INT_MAX;
    const float* const x = logits + int64_t{copy / routes.n_used} * routes.n_experts;
    return static_cast<int>(__float_as_uint(x[copy % routes.n_used]));
  };
  int at = 0;
#pragma unroll 4
  for (int first = 0; first < n_copies; first += kWarp) {
    at += __popc(__ballot_sync(kAllLanes, expert(first + lane) < e));
  }
  if (lane == 0) {
    routes.offsets[e] = at;
    if (e == routes.n_experts - 1) routes.offsets[e + 1] = n_copies;
  }
#pragma unroll 4
  for (int first = 0; first < n_copies; first += kWarp) {
    const bool is_here = expert(first + lane) == e;
    const unsigned here = __ballot_sync(kAllLanes, is_here);
    if (is_here) routes.copy_rows[first + lane] = at + __popc(here & ((1u << lane) - 1));
    at += __popc(here);
  }
}

// For few rows a single block also computes the indices of the copies.
template <bool kPlaces>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    route_kernel(Routes routes, float* logits, const float* bias, int n_rows) {
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / kWarp;
  const int row = blockIdx.x * kRouteWarps + warp;
  if (row < n_rows) select_experts(routes, logits, bias, row);
  if constexpr (kPlaces) {
    __syncthreads();
    for (int e = warp; e < routes.n_experts; e += kRouteWarps) place(routes, logits, n_rows, e);
  }
}

// One block of one warp per expert.
__global__ void __launch_bounds__(kWarp)
    place_kernel(Routes routes, const float* logits, int n_rows) {
  let_next_start();
  wait_for_previous();
  place(routes, logits, n_rows, blockIdx.x);
}

// Writes body(i), the new element i, for the n elements of row `row` of y; by one block.
template <class Body>
__device__ void write_row(float* y, int row, int n, const Operands& operands, const Body& body) {
  const QuantizedRows& rounded = operands.rounded;
  const int64_t first = int64_t{row} * n;
  const int end = rounded ? rounded.n_chunks * QuantizedRows::kChunk * QuantizedRows::kGroup : n;
#pragma unroll 4
  for (int i = threadIdx.x; i < end; i += kCopyThreads) {
    float value = 0;
    if (i < n) {
      y[first + i] = value = body(i);
      write_halves(operands, first + i, value);
    }
    if (rounded) round_group(rounded, row, i / QuantizedRows::kGroup, value);
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    dispatch_kernel(float* y, const float* x, const int32_t* copy_rows, int n_used, int n,
                    Operands operands) {
  let_next_start();
  wait_for_previous();
  const float* const from = x + int64_t{blockIdx.x / n_used} * n;
  write_row(y, copy_rows[blockIdx.x], n, operands, [&](int i) { return from[i]; });
}

__global__ void __launch_bounds__(kCopyThreads)
    gate_rows_kernel(float* x, const float* gate, int n, Operands operands) {
  let_next_start();
  wait_for_previous();
  const float factor = sigmoid(gate[blockIdx.x]);
  const float* const from = x + int64_t{blockIdx.x} * n;
  write_row(x, blockIdx.x, n, operands, [&](int i) { return from[i] * factor; });
}

// Rows along x, since there may be more than 65,535 of them, and their elements along y.
__global__ void __launch_bounds__(kThreads)
    combine_kernel(float* y, const float* x, const float* weights, const int32_t* copy_rows,
                   int n_used, int n) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= n) return;
  weights += int64_t{blockIdx.x} * n_used;
  copy_rows += int64_t{blockIdx.x} * n_used;
  float* const to = y + int64_t{blockIdx.x} * n + i;
  float sum = *to;
#pragma unroll 4
  for (int j = 0; j < n_used; ++j) sum = fmaf(weights[j], x[int64_t{copy_rows[j]} * n + i], sum);
  *to = sum;
}

unsigned rows_of(const Tensor& x) { return static_cast<unsigned>(x.rows); }

}  // namespace

void route(const Stream& stream, const Routes& routes, const Tensor& logits, const Tensor& bias) {
  const auto n_rows = static_cast<int>(logits.rows);
  const float* const biases = bias ? bias.floats() : nullptr;
  constexpr int kBlock = kRouteWarps * kWarp;
  if (n_rows <= kRouteWarps) {
    launch(stream, route_kernel<true>, dim3(1), dim3(kBlock), 0, routes, logits.floats(), biases,
           n_rows);
    return;
  }
  const auto n_blocks = static_cast<unsigned>((n_rows + kRouteWarps - 1) / kRouteWarps);
  launch(stream, route_kernel<false>, dim3(n_blocks), dim3(kBlock), 0, routes, logits.floats(),
         biases, n_rows);
  launch(stream, place_kernel, dim3(static_cast<unsigned>(routes.n_experts)), dim3(kWarp), 0,
         routes, logits.floats(), n_rows);
}

void dispatch(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes,
              const Operands& operands) {
  launch(stream, dispatch_kernel, dim3(rows_of(y)), dim3(kCopyThreads), 0, y.floats(), x.floats(),
         routes.copy_rows, routes.n_used, static_cast<int>(x.cols), operands);
}

void gate_rows(const Stream& stream, const Tensor& x, const Tensor& gate,
               const Operands& operands) {
  launch(stream, gate_rows_kernel, dim3(rows_of(x)), dim3(kCopyThreads), 0, x.floats(),
         gate.floats(), static_cast<int>(x.cols), operands);
}

void combine_add(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes) {
  const dim3 grid(rows_of(y), static_cast<unsigned>((y.cols + kThreads - 1) / kThreads));
  launch(stream, combine_kernel, grid, dim3(kThreads), 0, y.floats(), x.floats(), routes.weights,
         routes.copy_rows, routes.n_used, static_cast<int>(y.cols));
}

}  // namespace h2o::cuda

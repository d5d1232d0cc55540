#include "cuda/logit_key.cuh"
#include "cuda/operations.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kRoom = 2 * kThreads;  // keys sorted by a block
constexpr int kMax = LargestLogits::kMax;

// Sorts keys [kRoom] in shared memory in descending order. Batcher's bitonic sort: every thread
// orders one pair per round.
__device__ void sort_keys(uint64_t* keys) {
  for (int length = 2; length <= kRoom; length *= 2) {
    for (int apart = length / 2; apart > 0; apart /= 2) {
      __syncthreads();
      const int i = 2 * threadIdx.x - (threadIdx.x & (apart - 1));
      const uint64_t a = keys[i], b = keys[i + apart];
      const bool falls = (i & length) == 0;
      if ((a < b) == falls) {
        keys[i] = b;
        keys[i + apart] = a;
      }
    }
  }
  __syncthreads();
}

// One block per row, which it reads twice. The first pass finds the largest logits of kRoom
// interleaved groups. The kMax-th largest of these is a threshold that at least kMax logits
// reach, and few more if the large ones are spread over the groups. The second pass gathers logits
// that reach the threshold, in any order, to be sorted. If there are more than kRoom, it gives up,
// and the host reads the row.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(LargestLogits* to, const float* x, int n, const float* temperatures) {
  __shared__ uint64_t keys[kRoom];
  __shared__ float scratch[kThreads / kWarp];
  __shared__ int n_found;
  let_next_start();
  wait_for_previous();
  const float* row = x + int64_t{blockIdx.x} * n;
  LargestLogits& out = to[blockIdx.x];
  const float temperature = temperatures[blockIdx.x];

  float peaks[2] = {-INFINITY, -INFINITY};  // NaN is skipped
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kRoom) {
    peaks[0] = fmaxf(peaks[0], row[i]);
    if (i + kThreads < n) peaks[1] = fmaxf(peaks[1], row[i + kThreads]);
  }
  keys[threadIdx.x] = key_of(peaks[0], -1);  // the token that sorts last
  keys[threadIdx.x + kThreads] = key_of(peaks[1], -1);
  if (threadIdx.x == 0) n_found = 0;
  sort_keys(keys);
  const uint64_t bar = keys[kMax - 1];
  const float largest = logit_of(keys[0]);
  __syncthreads();

  const auto weight = [&](float logit) {
    return temperature > 0 ? exp_negative((logit - largest) / temperature) : 0;
  };
  float rest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const float logit = row[i];
    if (!(logit > -INFINITY)) continue;
    const uint64_t key = key_of(logit, i);
    if (key < bar) {
      rest += weight(logit);
    } else {
      const int at = atomicAdd(&n_found, 1);
      if (at < kRoom) keys[at] = key;
    }
  }
  __syncthreads();
  if (n_found > kRoom) {
    if (threadIdx.x == 0) out.n = -1;
    return;
  }
  for (int i = n_found + threadIdx.x; i < kRoom; i += kThreads) keys[i] = 0;
  sort_keys(keys);
  for (int i = threadIdx.x; i < n_found; i += kThreads) {
    const float logit = logit_of(keys[i]);
    if (i < kMax) {
      out.logits[i] = {token_of(keys[i]), logit};
    } else {
      rest += weight(logit);
    }
  }
  rest = block_sum(rest, scratch);
  if (threadIdx.x > 0) return;
  out.n = min(n_found, kMax);
  out.rest = rest;
}

}  // namespace

void select_largest(const Stream& stream, LargestLogits* to, const Tensor& x,
                    const float* temperatures) {
  launch(stream, largest_kernel, dim3(static_cast<unsigned>(x.rows)), dim3(kThreads), 0, to,
         x.floats(), static_cast<int>(x.cols), temperatures);
}

}  // namespace h2o::cuda

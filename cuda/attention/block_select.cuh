// Selection by rank and sorting, by all threads of a block.
#pragma once

#include <cstdint>

#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kSelectBins = 256;

// A float and an index as one integer: ordered by float, ties by index. NaN has no order.
__device__ inline uint64_t make_order(float x, uint32_t index) {
  const auto bits = __float_as_uint(x + 0.0f);  // -0 is 0
  const uint32_t sortable = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{sortable} << 32 | index;
}

// Sorts last.
constexpr uint64_t kLastOrder = ~uint64_t{0};

// Exclusive prefix sum of x over the threads; `total`: the sum. `scratch`: shared, [n_warps].
__device__ inline int32_t block_scan(int32_t x, int32_t* scratch, int32_t& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int32_t sum = x;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, sum, apart);
    if (lane >= apart) sum += before;
  }
  if (lane == kWarp - 1) scratch[warp] = sum;
  __syncthreads();
  int32_t before = 0;
  total = 0;
  for (int w = 0; w < kSelectThreads / kWarp; ++w) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  __syncthreads();
  return before + sum - x;
}

// Calls found(i, number of selected indices before it) for each i in [0, n) that satisfies is(i),
// in order. Returns their number.
template <class Is, class Found>
__device__ int32_t number(int32_t n, int32_t* scratch, const Is& is, const Found& found) {
  int32_t before = 0;
  for (int32_t begin = 0; begin < n; begin += kSelectThreads) {
    const int32_t i = begin + threadIdx.x;
    const bool counts = i < n && is(i);
    int32_t total;
    const int32_t index = before + block_scan(counts, scratch, total);
    if (i < n) found(i, index, counts);
    before += total;
  }
  return before;
}

// Sorts keys [n] in ascending order: a bitonic sort in which every exchange puts the smaller key
// first, so that infinite keys past the end would stay there, and need not exist.
__device__ inline void sort(uint64_t* keys, int32_t n) {
  for (int32_t merged = 2; merged / 2 < n; merged *= 2) {
    for (int32_t apart = merged / 2; apart > 0; apart /= 2) {
      for (int32_t a = static_cast<int32_t>(threadIdx.x); a < n; a += kSelectThreads) {
        const int32_t b = apart == merged / 2 ? a ^ (merged - 1) : a ^ apart;
        if (b <= a || b >= n) continue;
        const uint64_t first = keys[a], second = keys[b];
        if (second < first) {
          keys[a] = second;
          keys[b] = first;
        }
      }
      __syncthreads();
    }
  }
}

// The k-th smallest (k from 1) of order(i) for i in [0, n), which are distinct except for
// kLastOrder: a radix select, eight bits at a time.
template <class Order>
__device__ uint64_t select(int32_t n, int32_t k, const Order& order_of_index) {
  __shared__ int32_t bins[kSelectBins];
  __shared__ uint64_t chosen;
  __shared__ int32_t left;
  uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kSelectBins; i += kSelectThreads) bins[i] = 0;
    __syncthreads();
    for (int32_t begin = 0; begin < n; begin += kSelectThreads) {
      const int32_t i = begin + static_cast<int32_t>(threadIdx.x);
      const uint64_t order = i < n ? order_of_index(i) : 0;
      const bool counts = i < n && (shift == 56 || order >> (shift + 8) == prefix >> (shift + 8));
      // Many scores share leading bits: one addition for all lanes with the same bin.
      const int32_t bin = counts ? static_cast<int32_t>(order >> shift & 255) : -1;
      const unsigned peers = __match_any_sync(kAllLanes, bin);
      const int leader = __ffs(static_cast<int>(peers)) - 1;
      if (counts && static_cast<int>(threadIdx.x) % kWarp == leader)
        atomicAdd(bins + bin, __popc(peers));
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      constexpr int kOwn = kSelectBins / kWarp;
      int bin = static_cast<int>(threadIdx.x) * kOwn;
      int32_t end = 0;  // counts of this lane's bins, and of those before
#pragma unroll
      for (int j = 0; j < kOwn; ++j) end += bins[bin + j];
#pragma unroll
      for (int apart = 1; apart < kWarp; apart *= 2) {
        const int32_t before = __shfl_up_sync(kAllLanes, end, apart);
        if (static_cast<int>(threadIdx.x) >= apart) end += before;
      }
      const int32_t before = __shfl_up_sync(kAllLanes, end, 1);
      if (threadIdx.x > 0) k -= before;
      if (k > 0 && (threadIdx.x > 0 ? k + before : k) <= end) {
        for (; k > bins[bin]; ++bin) k -= bins[bin];
        chosen = prefix | static_cast<uint64_t>(bin) << shift;
        left = k;
      }
    }
    __syncthreads();
    prefix = chosen;
    k = left;
  }
  return prefix;
}

}  // namespace h2o::cuda

// CUDA C++ for a host compiler: included before everything else when device code is compiled for
// tests/cuda_emulation/block.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "block.h"

#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static  // one block at a time
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__

#define threadIdx (::h2o::cuda::emulation::here.thread)
#define blockIdx (::h2o::cuda::emulation::here.block)
#define blockDim (::h2o::cuda::emulation::here.block_dim)
#define gridDim (::h2o::cuda::emulation::here.grid_dim)

using std::max;
using std::min;

inline void __syncthreads() { ::h2o::cuda::emulation::wait_for_block(); }
inline void __threadfence() {}

inline int emulated_lane() {
  const auto& p = ::h2o::cuda::emulation::here;
  return static_cast<int>((p.thread.z * p.block_dim.y + p.thread.y) * p.block_dim.x + p.thread.x) %
         32;
}

template <class T>
T emulated_shuffle(T x, int from) {
  using namespace ::h2o::cuda::emulation;
  return from_bits<T>(exchange(bits_of(x), from));
}

inline void __syncwarp() { emulated_shuffle(0, 0); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated_shuffle(x, emulated_lane() ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T x, int from, int width = 32) {
  return emulated_shuffle(x, emulated_lane() / width * width + from % width);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = emulated_lane();
  return emulated_shuffle(x, lane >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int delta) {
  const int lane = emulated_lane();
  return emulated_shuffle(x, lane + delta < 32 ? lane + delta : lane);
}
template <class T>
unsigned __match_any_sync(unsigned, T x) {
  const uint64_t mine = ::h2o::cuda::emulation::bits_of(x);
  const uint64_t* all = ::h2o::cuda::emulation::gather(mine);
  unsigned peers = 0;
#pragma GCC unroll 32
  for (int lane = 0; lane < 32; ++lane) peers |= unsigned{all[lane] == mine} << lane;
  return peers;
}

inline int __any_sync(unsigned, int condition) {
  const uint64_t* all = ::h2o::cuda::emulation::gather(condition != 0);
  return std::any_of(all, all + 32, [](uint64_t is) { return is != 0; });
}

inline unsigned __ballot_sync(unsigned, int condition) {
  const uint64_t* all = ::h2o::cuda::emulation::gather(condition != 0);
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= static_cast<unsigned>(all[lane]) << lane;
  return lanes;
}

inline int atomicAdd(int* to, int x) { return std::exchange(*to, *to + x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = selector >> (4 * i) & 15;
    const auto value = static_cast<unsigned>(bytes >> (byte % 8 * 8) & 255);
    result |= (byte < 8 ? value : value >> 7 ? 255u : 0u) << (8 * i);
  }
  return result;
}

inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  }
  return sum;
}

// Rounds as nvcc does, except that a device may fuse a product and a sum.
#include <vector_functions.h>

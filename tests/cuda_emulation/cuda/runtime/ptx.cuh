// Replaces cuda/runtime/ptx.cuh: the same functions, implemented as the PTX manual specifies the
// instructions.
#pragma once

#include <cuda_fp16.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace h2o::cuda {

inline float exp2_fast(float x) { return std::exp2(x); }
inline float within_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

inline uint32_t pack_halves(float low, float high) {
  return uint32_t{__half_as_ushort(__float2half_rn(high))} << 16 |
         __half_as_ushort(__float2half_rn(low));
}

inline uint32_t both_low(uint32_t pair) { return (pair & 0xffff) * 0x10001; }
inline uint32_t both_high(uint32_t pair) { return (pair >> 16) * 0x10001; }

// Addresses in shared memory are offsets.
inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const std::byte*>(shared) - emulation::shared_memory());
}

inline void copy_16_async(uint32_t shared, const void* from, bool exists) {
  emulation::copy_later(shared, from, 16, exists);
}
inline void copy_16_cached(uint32_t shared, const void* from) {
  emulation::copy_later(shared, from, 16, true);
}
inline void copy_4_async(uint32_t shared, const void* from, bool exists) {
  emulation::copy_later(shared, from, 4, exists);
}
inline void commit_copies() { emulation::commit_copies(); }
template <int n_pending>
void wait_for_copies() {
  emulation::finish_copies(n_pending);
}

// ldmatrix: lane 8 i + r has the address of row r of matrix i; lane l receives elements 2 (l % 4)
// and the next of row l / 4 of each matrix, or of its transpose.
template <bool kTransposed>
void load_matrices_as(uint32_t (&m)[4], uint32_t row_address) {
  const uint64_t* rows = emulation::gather(row_address);
  const int lane = emulated_lane();
  const auto element = [&](int matrix, int row, int column) {
    uint16_t half;
    std::memcpy(&half, emulation::shared_memory() + rows[8 * matrix + row] + 2 * column, 2);
    return uint32_t{half};
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2;
    m[i] = kTransposed ? element(i, column, row) | element(i, column + 1, row) << 16
                       : element(i, row, column) | element(i, row, column + 1) << 16;
  }
}
inline void load_matrices(uint32_t (&m)[4], uint32_t row_address) {
  load_matrices_as<false>(m, row_address);
}
inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t row_address) {
  load_matrices_as<true>(m, row_address);
}

// __half2float takes most of a product's time. All bits are moved to their places in a float, whose
// exponent is then 112 too low; infinity and NaN have the largest exponent of both types.
inline float emulated_half(uint16_t bits) {
  const uint32_t shifted = (bits & 0x7fffu) << 13;
  const float scaled = __uint_as_float(shifted) * 0x1p112f;
  const uint32_t magnitude =
      shifted < 0x7c00u << 13 ? __float_as_uint(scaled) : shifted | 0x7f800000u;
  return __uint_as_float(magnitude | (bits & 0x8000u) << 16);
}

// Products of halves, and their sums with a half, are exact in double.
template <class F>
uint32_t for_halves(uint32_t a, uint32_t b, uint32_t c, const F& f) {
  const auto rounded = [&](int shift) {
    const auto half = [&](uint32_t x) {
      return static_cast<double>(emulated_half(static_cast<uint16_t>(x >> shift)));
    };
    return uint32_t{__half_as_ushort(__double2half(f(half(a), half(b), half(c))))};
  };
  return rounded(0) | rounded(16) << 16;
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return for_halves(a, b, 0, [](double x, double y, double) { return x * y; });
}
inline uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  return for_halves(a, b, c, [](double x, double y, double z) { return x * y + z; });
}
inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
  return for_halves(a, b, 0, [](double x, double y, double) { return x - y; });
}

// mma.m16n8k16: lane l holds of a [16, 16], for i = 0 .. 7, row l / 4 (+ 8 if i / 2 is odd), column
// 2 (l % 4) + i % 2 (+ 8 if i >= 4); of b [16, 8] row 2 (l % 4) + i % 2 (+ 8 if i >= 2), column l /
// 4; of c [16, 8] row l / 4 (+ 8 if i >= 2), column 2 (l % 4) + i % 2. f16 or bf16.
template <bool kBf16 = false>
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  // The two rows and columns that the lane multiplies are in four words each.
  std::array<uint16_t, 64> halves;
  std::array<float, 64> x;
  const int lane = emulated_lane();
  const auto receive = [&](uint64_t own, int first_lane, int n, int to) {
    std::memcpy(&halves[to], emulation::gather(own) + first_lane, n * sizeof(own));
  };
  receive(uint64_t{a[1]} << 32 | a[0], lane / 4 * 4, 4, 0);
  receive(uint64_t{a[3]} << 32 | a[2], lane / 4 * 4, 4, 16);
  receive(uint64_t{b1} << 32 | b0, lane % 4 * 8, 8, 32);
  for (int i = 0; i < 64; ++i) {
    x[i] = kBf16 ? __uint_as_float(uint32_t{halves[i]} << 16) : emulated_half(halves[i]);
  }
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 4; ++i) {
      c[i] +=
          x[k / 2 * 4 + i / 2 * 2 + k % 2] * x[32 + i % 2 * 16 + k % 8 / 2 * 4 + k / 8 * 2 + k % 2];
    }
  }
}

}  // namespace h2o::cuda

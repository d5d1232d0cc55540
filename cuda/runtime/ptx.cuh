// PTX instructions without a CUDA C++ equivalent, for compute capability 8.0 and later.
#pragma once

#include <cstdint>

namespace h2o::cuda {

// 2^x to 2 ulp; denormal results are flushed to 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Clamps x to f16's finite range, so that products of halves are finite; -65504 for NaN.
__device__ inline float within_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

// Two floats as f16, the first in the low half.
__device__ inline uint32_t pack_halves(float low, float high) {
  uint32_t halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}

// Pairs of halves: a b, a b + c and a - b, rounded once.
__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ inline uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
// The low or the high half of a pair, in both.
__device__ inline uint32_t both_low(uint32_t pair) {
  uint32_t y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}"
      : "=r"(y)
      : "r"(pair));
  return y;
}
__device__ inline uint32_t both_high(uint32_t pair) {
  uint32_t y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}"
      : "=r"(y)
      : "r"(pair));
  return y;
}
__device__ inline uint32_t subtract_halves(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// ---- Asynchronous copies from device to shared memory. ----

// 16 bytes, both ends aligned; zeros if `exists` is false.
__device__ inline void copy_16_async(uint32_t shared, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Starts to copy 16 bytes through L1, for what other warps copy soon.
__device__ inline void copy_16_cached(uint32_t shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

__device__ inline void copy_4_async(uint32_t shared, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}

// Commits the thread's copies as a group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies, except for its last `n_pending` groups.
template <int n_pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n_pending) : "memory");
}

// ---- Tensor cores. A matrix of 8 x 8 halves is distributed over a warp: lane l holds elements 2
// (l % 4) and 2 (l % 4) + 1 of row l / 4. ----

// Loads four matrices from shared memory; lanes 8 i to 8 i + 7 provide the addresses of the rows of
// matrix i, 16-byte aligned.
__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

// The same matrices, transposed.
__device__ inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

// c [16, 8] += a [16, 16] b [8, 16]^T in f16 or bf16. a: upper left, lower left, upper right and
// lower right matrix; b: left and right one. c: elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4,
// then of row l / 4 + 8.
template <bool kBf16 = false>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace h2o::cuda

// Loading weights and extracting their bits. Much of it also compiles for the host.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/blocks.h"

namespace h2o::cuda {

// The host compiler does not know the pragma.
#ifdef __CUDA_ARCH__
#define H2O_UNROLL _Pragma("unroll")
#else
#define H2O_UNROLL
#endif

// Loads of weights that keep their place in the program, possibly ahead of wait_for_previous():
// `volatile` prevents nvcc from moving them behind it, and omitting `.nc` (constant) prevents ptxas
// from doing so.
#ifdef __CUDA_ARCH__
__device__ inline void load(const std::byte* p, uint8_t* v) {
  uint32_t byte;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte) : "l"(p));
  *v = static_cast<uint8_t>(byte);
}
__device__ inline void load(const std::byte* p, uint16_t* v) {
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(*v) : "l"(p));
}
__device__ inline void load(const std::byte* p, uint32_t* v) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(*v) : "l"(p));
}
__device__ inline void load(const std::byte* p, uint2* v) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v->x), "=r"(v->y) : "l"(p));
}
__device__ inline void load(const std::byte* p, uint4* v) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w)
               : "l"(p));
}
// Loads data that no other warp reads.
__device__ inline void load_once(const std::byte* p, uint2* v) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v->x), "=r"(v->y)
               : "l"(p));
}
__device__ inline void load_once(const std::byte* p, uint4* v) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w)
               : "l"(p));
}
#else
template <class T>
void load(const std::byte* p, T* v) {
  *v = *reinterpret_cast<const T*>(p);
}
template <class T>
void load_once(const std::byte* p, T* v) {
  load(p, v);
}
#endif

__host__ __device__ inline float to_float(F16 x) { return __half2float(__half_raw{x.bits}); }
__host__ __device__ inline float low_half(uint32_t pair) {
  return to_float(F16{static_cast<uint16_t>(pair)});
}
__host__ __device__ inline float high_half(uint32_t pair) {
  return to_float(F16{static_cast<uint16_t>(pair >> 16)});
}

__host__ __device__ inline float bits_as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// Byte i of the result is the byte of (low, high) that nibble i of `selectors` selects.
__host__ __device__ inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selectors);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    chosen |= static_cast<uint32_t>(bytes >> (selectors >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return chosen;
#endif
}

// x, rotated to the right.
__host__ __device__ inline uint32_t rotated(uint32_t x, int n) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(x, x, n);
#else
  return std::rotr(x, n);
#endif
}

// The values of 4-bit codes, as listed in core/blocks.h, four per word.
struct NoTable {};
struct Iq4Table {
  static constexpr uint32_t k0 = 0xbfad9881, k4 = 0xf6eaddcf, k8 = 0x26190d01, k12 = 0x71594535;
};
struct Mxfp4Table {
  static constexpr uint32_t k0 = 0x03020100, k4 = 0x0c080604, k8 = 0xfdfeff00, k12 = 0xf4f8fafc;
};

// The values of the eight nibbles of `packed`: the low nibbles of its bytes, then the high ones.
template <class Table>
__host__ __device__ inline void table_values(uint32_t packed, uint32_t* low, uint32_t* high) {
  const uint32_t in_half = packed & 0x77777777;
  const uint32_t of_halves = 0x32103210 | (packed & 0x88888888) >> 1;
  const auto look_up = [](uint32_t in_half, uint32_t of_halves) {
    return permute_bytes(permute_bytes(Table::k0, Table::k4, in_half),
                         permute_bytes(Table::k8, Table::k12, in_half), of_halves);
  };
  const uint32_t first = look_up(in_half & 0xffff, of_halves & 0xffff);
  const uint32_t second = look_up(in_half >> 16, of_halves >> 16);
  *low = permute_bytes(first, second, 0x6420);
  *high = permute_bytes(first, second, 0x7531);
}

}  // namespace h2o::cuda

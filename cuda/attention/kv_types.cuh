// The types of cached rows: reading eight elements at a time, and writing rows bit-identically to
// the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/blocks.h"
#include "core/dtype.h"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

// Eight elements as floats.
struct Octet {
  float x[8];
};

// A row reader has one(row, i), element i; and for rows that consist of whole octets, 16-byte
// aligned, load(row, i), which loads elements [i, i + 8) in stored form, i a multiple of 8, and
// unpack(): many loads can be in flight before the first is unpacked. If kScaled, what it gives has
// to be multiplied by scale(). kBlockBytes: of 32 elements; kUnpack: operations of both.

struct F32Row {
  static constexpr int kBlockBytes = 128, kUnpack = 0;
  static constexpr bool kScaled = false;
  struct Packed {
    float4 low, high;
  };
  static __device__ float one(const std::byte* row, int i) {
    return reinterpret_cast<const float*>(row)[i];
  }
  static __device__ Packed load(const std::byte* row, int i) {
    const auto* from = reinterpret_cast<const float4*>(row) + i / 4;
    return {from[0], from[1]};
  }
  static __device__ Octet unpack(const Packed& p) {
    return {p.low.x, p.low.y, p.low.z, p.low.w, p.high.x, p.high.y, p.high.z, p.high.w};
  }
};

struct F16Row {
  static constexpr int kBlockBytes = 64, kUnpack = 8;
  static constexpr bool kScaled = false;
  using Packed = uint4;
  static __device__ float one(const std::byte* row, int i) {
    return __half2float(reinterpret_cast<const __half*>(row)[i]);
  }
  static __device__ Packed load(const std::byte* row, int i) {
    return reinterpret_cast<const uint4*>(row)[i / 8];
  }
  static __device__ Octet unpack(const Packed& bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    Octet o;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[j]));
      o.x[2 * j] = pair.x;
      o.x[2 * j + 1] = pair.y;
    }
    return o;
  }
};

struct BF16Row {
  static constexpr int kBlockBytes = 64, kUnpack = 8;
  static constexpr bool kScaled = false;
  using Packed = uint4;
  static __device__ float one(const std::byte* row, int i) {
    return __uint_as_float(uint32_t{reinterpret_cast<const BF16*>(row)[i].bits} << 16);
  }
  static __device__ Packed load(const std::byte* row, int i) {
    return reinterpret_cast<const uint4*>(row)[i / 8];
  }
  static __device__ Octet unpack(const Packed& bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    Octet o;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      o.x[2 * j] = __uint_as_float(words[j] << 16);
      o.x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000);
    }
    return o;
  }
};

__device__ inline float to_float(F16 x) { return __half2float(__ushort_as_half(x.bits)); }

// Byte i of x, minus `less`: as the last bits of a float, because conversions of integers are slow.
__device__ inline float byte_of(uint32_t x, int i, float less) {
  return __uint_as_float(__byte_perm(x, 0x4b000000, 0x7540 + i)) - (0x1p23f + less);
}

// Blocks are 2-byte aligned.
struct Q8_0Row {
  static constexpr int kBlockBytes = sizeof(BlockQ8_0), kUnpack = 28;
  static constexpr bool kScaled = true;
  struct Packed {
    uint16_t pairs[4];
    F16 d;
  };
  static __device__ float one(const std::byte* row, int i) {
    const BlockQ8_0& block = reinterpret_cast<const BlockQ8_0*>(row)[i / 32];
    return to_float(block.d) * block.qs[i % 32];
  }
  static __device__ Packed load(const std::byte* row, int i) {
    const BlockQ8_0& block = reinterpret_cast<const BlockQ8_0*>(row)[i / 32];
    const auto* pairs = reinterpret_cast<const uint16_t*>(block.qs + i % 32);
    return {{pairs[0], pairs[1], pairs[2], pairs[3]}, block.d};
  }
  static __device__ float scale(const Packed& packed) { return to_float(packed.d); }
  static __device__ Octet unpack(const Packed& packed) {
    Octet o;
#pragma unroll
    for (int j = 0; j < 8; ++j) o.x[j] = byte_of(packed.pairs[j / 2] ^ 0x8080, j % 2, 128);
    return o;
  }
};

struct Q4_0Row {
  static constexpr int kBlockBytes = sizeof(BlockQ4_0), kUnpack = 32;
  static constexpr bool kScaled = true;
  struct Packed {
    uint16_t pairs[4];
    F16 d;
    uint16_t shift;  // selects the nibbles used
  };
  static __device__ float one(const std::byte* row, int i) {
    const BlockQ4_0& block = reinterpret_cast<const BlockQ4_0*>(row)[i / 32];
    const int q = block.qs[i % 16] >> (i % 32 < 16 ? 0 : 4) & 15;
    return to_float(block.d) * static_cast<float>(q - 8);
  }
  static __device__ Packed load(const std::byte* row, int i) {
    const BlockQ4_0& block = reinterpret_cast<const BlockQ4_0*>(row)[i / 32];
    const auto* pairs = reinterpret_cast<const uint16_t*>(block.qs + i % 16);
    const auto shift = static_cast<uint16_t>(i % 32 / 16 * 4);
    return {{pairs[0], pairs[1], pairs[2], pairs[3]}, block.d, shift};
  }
  static __device__ float scale(const Packed& packed) { return to_float(packed.d); }
  static __device__ Octet unpack(const Packed& packed) {
    Octet o;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      o.x[j] = byte_of(packed.pairs[j / 2] >> packed.shift & 0x0f0f, j % 2, 8);
    }
    return o;
  }
};

template <class Row>
__device__ Octet unpack_scaled(const typename Row::Packed& packed) {
  Octet o = Row::unpack(packed);
  if constexpr (Row::kScaled) {
#pragma unroll
    for (float& x : o.x) x *= Row::scale(packed);
  }
  return o;
}

// f(reader of rows of a type known at run time only).
template <class F>
__device__ auto with_row(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f16:
      return f(F16Row());
    case DType::bf16:
      return f(BF16Row());
    case DType::q8_0:
      return f(Q8_0Row());
    case DType::q4_0:
      return f(Q4_0Row());
    default:
      return f(F32Row());
  }
}

// Element i of a row of such a type.
__device__ inline float element(DType dtype, const std::byte* row, int i) {
  return with_row(dtype, [&]<class Row>(Row) { return Row::one(row, i); });
}

// ---- Writing a row of n elements: each warp writes whole blocks of 32; x is in shared memory.
// Quantized types round as GGUF's reference does: products are not fused with sums. ----

__device__ inline F16 f16_of(float x) { return {__half_as_ushort(__float2half_rn(x))}; }

__device__ inline void write_q8_0(BlockQ8_0& to, float x, int lane) {
  const float d = warp_max(fabsf(x)) / 127;
  const float inverse = d > 0 ? 1 / d : 0;
  const float q = roundf(__fmul_rn(x, inverse));
  to.qs[lane] = static_cast<int8_t>(q > -127 ? (q < 127 ? q : 127) : -127);  // NaN: -127
  if (lane == 0) to.d = f16_of(d);
}

__device__ inline void write_q4_0(BlockQ4_0& to, float x, int lane) {
  // Ties: the first.
  float farthest = x == x ? x : 0;
  int at = lane;
  for (int apart = kWarp / 2; apart > 0; apart /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, farthest, apart);
    const int other_at = __shfl_xor_sync(kAllLanes, at, apart);
    const float mine = fabsf(farthest), theirs = fabsf(other);
    if (theirs > mine || (theirs == mine && other_at < at)) {
      farthest = other;
      at = other_at;
    }
  }
  const float d = farthest / -8;
  const float inverse = d != 0 ? 1 / d : 0;
  const float q = __fadd_rn(__fmul_rn(x, inverse), 8.5f);
  const int mine = static_cast<int>(q > 0 ? (q < 15 ? q : 15) : 0);  // NaN: 0
  const int high = __shfl_down_sync(kAllLanes, mine, 16);
  if (lane < 16) to.qs[lane] = static_cast<uint8_t>(mine | high << 4);
  if (lane == 0) to.d = f16_of(d);
}

__device__ inline void write_row(DType dtype, std::byte* to, const float* x, int n) {
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i / kWarp * kWarp < n; i += blockDim.x) {
    const bool inside = i < n;
    switch (dtype) {
      case DType::f16:
        if (inside) reinterpret_cast<__half*>(to)[i] = __float2half_rn(x[i]);
        break;
      case DType::bf16:
        if (inside) reinterpret_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(x[i]);
        break;
      case DType::q8_0:
        write_q8_0(reinterpret_cast<BlockQ8_0*>(to)[i / kWarp], x[i], lane);
        break;
      case DType::q4_0:
        write_q4_0(reinterpret_cast<BlockQ4_0*>(to)[i / kWarp], x[i], lane);
        break;
      default:
        if (inside) reinterpret_cast<float*>(to)[i] = x[i];
    }
  }
}

}  // namespace h2o::cuda

// The scales of quantized types: their device layout (see cuda/matmul/formats.cuh) and values.
//
// An element is scale * (q - offset) + min. A group has kScales scales, and as many mins if kMins.
// kInHalves: half_scales.cuh has it. They take kGroupBytes per group and kBlockBytes per
// superblock. load(from, &to) loads them. store() receives the block of core/blocks.h that contains
// group g of the row, and stores the group's part.
#pragma once

#include "cuda/matmul/weight_bits.cuh"

namespace h2o::cuda {

constexpr int kSuperblock = 8;  // groups

struct FloatScale {
  static constexpr int kScales = 1, kGroupBytes = 2, kBlockBytes = 0;
  static constexpr bool kMins = false;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint16_t d;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte*, Load load) {
    Raw raw;
    load(of_group, &raw.d);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, int, float* scale, float*) {
    scale[0] = to_float(F16{raw.d});
  }
  template <class Block>
  __host__ __device__ static void store(const Block& b, int, std::byte* of_group, std::byte*) {
    *reinterpret_cast<F16*>(of_group) = b.d;
  }
};

// MXFP4: a power of two.
struct PowerScale {
  static constexpr int kScales = 1, kGroupBytes = 1, kBlockBytes = 0;
  static constexpr bool kMins = false;
  static constexpr bool kInHalves = false;
  struct Raw {
    uint8_t d;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte*, Load load) {
    Raw raw;
    load(of_group, &raw.d);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, int, float* scale, float*) {
    const uint32_t d = raw.d;
    scale[0] = bits_as_float(d < 2 ? 0x00200000u << d : (d - 1) << 23);  // 2^-128 is denormal
  }
  __host__ __device__ static void store(const BlockMXFP4& b, int, std::byte* of_group, std::byte*) {
    *reinterpret_cast<E8M0*>(of_group) = b.d;
  }
};

struct FloatScaleAndMin {
  static constexpr int kScales = 1, kGroupBytes = 4, kBlockBytes = 0;
  static constexpr bool kMins = true;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint32_t d_m;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte*, Load load) {
    Raw raw;
    load(of_group, &raw.d_m);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, int, float* scale, float* min) {
    scale[0] = low_half(raw.d_m);
    min[0] = high_half(raw.d_m);
  }
  template <class Block>
  __host__ __device__ static void store(const Block& b, int, std::byte* of_group, std::byte*) {
    reinterpret_cast<F16*>(of_group)[0] = b.d;
    reinterpret_cast<F16*>(of_group)[1] = b.m;
  }
};

// Q4_K and Q5_K: d and dmin; the low four bits of the scales of four groups, then of their mins;
// the same of the other four; and the high two bits of all scales, from bit 4 on, then of all mins.
struct SixBitScaleAndMin {
  static constexpr int kScales = 1, kGroupBytes = 0, kBlockBytes = 16;
  static constexpr bool kMins = true;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint4 words;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte*, const std::byte* of_block, Load load) {
    Raw raw;
    load(of_block, &raw.words);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, uint32_t g, float* scale, float* min) {
    const uint32_t pair = factors(raw, g);
    scale[0] = low_half(raw.words.x) * static_cast<float>(pair & 63);
    min[0] = -high_half(raw.words.x) * static_cast<float>(pair >> 16);
  }
  // The scale in the low half, the min in the high one, and the bits of `start`.
  __host__ __device__ static uint32_t factors(const Raw& raw, uint32_t g, uint32_t start = 0) {
    const uint32_t i = g % kSuperblock;
    const uint32_t low = (i < 4 ? raw.words.y : raw.words.z) >> i % 4 * 4;
    return ((low & 0x000f000f) | start) | (rotated(raw.words.w, i * 2) & 0x00300030);
  }
  template <class Block>
  __host__ __device__ static void store(const Block& b, int g, std::byte*, std::byte* of_block) {
    if (g % kSuperblock != 0) return;
    uint32_t low[2] = {}, high = 0;
    for (int i = 0; i < kSuperblock; ++i) {
      const uint8_t* p = b.scales + i % 4;
      const uint32_t s = i < 4 ? p[0] & 63 : (p[8] & 15) | p[0] >> 6 << 4;
      const uint32_t m = i < 4 ? p[4] & 63 : p[8] >> 4 | p[4] >> 6 << 4;
      low[i / 4] |= ((s & 15) | (m & 15) << 16) << i % 4 * 4;
      high |= rotated((s & 0x30) | (m & 0x30) << 16, 32 - i * 2);
    }
    *reinterpret_cast<uint4*>(of_block) = {b.d.bits | static_cast<uint32_t>(b.dmin.bits) << 16,
                                           low[0], low[1], high};
  }
};

// Q2_K: a byte for each 16 elements, scale | min << 4; d and dmin.
struct FourBitScalesAndMins {
  static constexpr int kScales = 2, kGroupBytes = 2, kBlockBytes = 4;
  static constexpr bool kMins = true;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint16_t scales;
    uint32_t d_dmin;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte* of_block,
                                          Load load) {
    Raw raw;
    load(of_group, &raw.scales);
    load(of_block, &raw.d_dmin);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, int, float* scale, float* min) {
    const float d = low_half(raw.d_dmin);
    const float dmin = -high_half(raw.d_dmin);
    scale[0] = d * static_cast<float>(raw.scales & 15);
    scale[1] = d * static_cast<float>(raw.scales >> 8 & 15);
    min[0] = dmin * static_cast<float>(raw.scales >> 4 & 15);
    min[1] = dmin * static_cast<float>(raw.scales >> 12);
  }
  __host__ __device__ static void store(const BlockQ2_K& b, int g, std::byte* of_group,
                                        std::byte* of_block) {
    const uint8_t* scales = b.scales + g % kSuperblock * 2;
    *reinterpret_cast<uint16_t*>(of_group) = static_cast<uint16_t>(scales[0] | scales[1] << 8);
    if (g % kSuperblock == 0) {
      reinterpret_cast<F16*>(of_block)[0] = b.d;
      reinterpret_cast<F16*>(of_block)[1] = b.dmin;
    }
  }
};

// Q3_K, whose six bits are expanded to a byte, and Q6_K: a signed byte for each 16 elements; d.
struct ByteScales {
  static constexpr int kScales = 2, kGroupBytes = 2, kBlockBytes = 2;
  static constexpr bool kMins = false;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint16_t scales, d;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte* of_block,
                                          Load load) {
    Raw raw;
    load(of_group, &raw.scales);
    load(of_block, &raw.d);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, int, float* scale, float*) {
    const float d = to_float(F16{raw.d});
    scale[0] = d * static_cast<float>(static_cast<int8_t>(raw.scales));
    scale[1] = d * static_cast<float>(static_cast<int8_t>(raw.scales >> 8));
  }
  __host__ __device__ static int scale(const BlockQ6_K& b, int i) { return b.scales[i]; }
  __host__ __device__ static int scale(const BlockQ3_K& b, int i) {
    return ((b.scales[i % 8] >> i / 8 * 4 & 15) | (b.scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
  }
  template <class Block>
  __host__ __device__ static void store(const Block& b, int g, std::byte* of_group,
                                        std::byte* of_block) {
    const int i = g % kSuperblock * 2;
    reinterpret_cast<int8_t*>(of_group)[0] = static_cast<int8_t>(scale(b, i));
    reinterpret_cast<int8_t*>(of_group)[1] = static_cast<int8_t>(scale(b, i + 1));
    if (g % kSuperblock == 0) *reinterpret_cast<F16*>(of_block) = b.d;
  }
};

// IQ4_XS, unchanged.
struct SixBitScale {
  static constexpr int kScales = 1, kGroupBytes = 0, kBlockBytes = 8;
  static constexpr bool kMins = false;
  static constexpr bool kInHalves = true;
  struct Raw {
    uint2 words;
  };
  template <class Load>
  __host__ __device__ static Raw load_raw(const std::byte*, const std::byte* of_block, Load load) {
    Raw raw;
    load(of_block, &raw.words);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, uint32_t g, float* scale, float*) {
    scale[0] = low_half(raw.words.x) * static_cast<float>(factor(raw, g));
  }
  __host__ __device__ static int factor(const Raw& raw, uint32_t g) {
    const uint32_t i = g % kSuperblock;
    const uint32_t s = (raw.words.y >> 4 * i & 15) | (raw.words.x >> (16 + 2 * i) & 3) << 4;
    return static_cast<int>(s) - 32;
  }
  __host__ __device__ static void store(const BlockIQ4_XS& b, int g, std::byte*,
                                        std::byte* of_block) {
    if (g % kSuperblock != 0) return;
    uint2 words{b.d.bits | static_cast<uint32_t>(b.scales_h) << 16, 0};
    for (int i = 0; i < 4; ++i) words.y |= static_cast<uint32_t>(b.scales_l[i]) << 8 * i;
    *reinterpret_cast<uint2*>(of_block) = words;
  }
};

}  // namespace h2o::cuda

// The quantised types as they lie in device memory: another order of the bits of core/blocks.h, for
// wide loads and few instructions.
//
// A row is divided into groups of 32 elements, and what one group needs of a kind lies beside what
// the next group needs of that kind, so that the lanes of a warp, a group each, load whole sectors:
//   q's:     their low four bits, 16 bytes a group: byte i has elements i (low half) and 16 + i.
//            Or, of 8 bits, two runs of 16 bytes: of each 32 groups, all first halves come first.
//   then     two more bits, 8 bytes a group: bits 2 k of byte i of word h: element 16 h + 4 k + i.
//   then     one more bit, 4 bytes a group: bit 8 i + j is element 4 j + i.
//   scales:  what each group has of its own,
//   then     what 8 groups share: the d of blocks of 256.
// Rows are padded to 16 bytes; so every load is aligned to its size.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "core/dtype.h"

namespace h2o::cuda {

// The host's compiler does not know the pragma.
#ifdef __CUDA_ARCH__
#define H2O_UNROLL _Pragma("unroll")
#else
#define H2O_UNROLL
#endif

constexpr int kGroup = 32;      // elements
constexpr int kSuperblock = 8;  // groups
constexpr int kRowAlignment = 16;

// ---- Loads and bits ----

// Loads of weights. They stay where they are in the program, ahead of wait_for_previous() perhaps:
// it is volatile that keeps nvcc from moving them behind it, and that they are not `.nc` (of
// constants) that keeps ptxas.
#ifdef __CUDA_ARCH__
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
// What no other warp needs a part of.
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

// Byte i of the result is byte `selector half-byte i` of the eight in low and high.
__host__ __device__ inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
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

// kIq4Values of the eight half-bytes of `packed`: the low halves of its bytes, then the high ones.
__host__ __device__ inline void iq4_values(uint32_t packed, uint32_t* low, uint32_t* high) {
  constexpr uint32_t kTable[4] = {0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535};
  const uint32_t in_half = packed & 0x77777777;
  const uint32_t of_halves = 0x32103210 | (packed & 0x88888888) >> 1;
  const uint32_t first =
      choose_bytes(choose_bytes(kTable[0], kTable[1], in_half & 0xffff),
                   choose_bytes(kTable[2], kTable[3], in_half & 0xffff), of_halves & 0xffff);
  const uint32_t second =
      choose_bytes(choose_bytes(kTable[0], kTable[1], in_half >> 16),
                   choose_bytes(kTable[2], kTable[3], in_half >> 16), of_halves >> 16);
  *low = choose_bytes(first, second, 0x6420);
  *high = choose_bytes(first, second, 0x7531);
}

// ---- Scales ----
//
// An element is scale * (q - offset) + min. There are kScales scales in a group, and as many mins
// if kMins. kGroupBytes are of each group, kBlockBytes of a superblock. store() is given the
// block of core/blocks.h that group g of the row is in, and stores of it what is the group's.

struct FloatScale {
  static constexpr int kScales = 1, kGroupBytes = 2, kBlockBytes = 0;
  static constexpr bool kMins = false;
  struct Raw {
    uint16_t d;
  };
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte*) {
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

struct FloatScaleAndMin {
  static constexpr int kScales = 1, kGroupBytes = 4, kBlockBytes = 0;
  static constexpr bool kMins = true;
  struct Raw {
    uint32_t d_m;
  };
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte*) {
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

// Of Q4_K and Q5_K. d and dmin, the low four bits of eight scales, of eight mins, and their high
// two: half-byte i is those of scale i, then of min i.
struct SixBitScaleAndMin {
  static constexpr int kScales = 1, kGroupBytes = 0, kBlockBytes = 16;
  static constexpr bool kMins = true;
  struct Raw {
    uint4 words;
  };
  __host__ __device__ static Raw load_raw(const std::byte*, const std::byte* of_block) {
    Raw raw;
    load(of_block, &raw.words);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, uint32_t g, float* scale, float* min) {
    const uint32_t at = g % kSuperblock * 4;
    const uint32_t high = raw.words.w >> at;
    const uint32_t s = (raw.words.y >> at & 15) | (high & 3) << 4;
    const uint32_t m = (raw.words.z >> at & 15) | (high & 12) << 2;
    scale[0] = low_half(raw.words.x) * static_cast<float>(s);
    min[0] = -high_half(raw.words.x) * static_cast<float>(m);
  }
  template <class Block>
  __host__ __device__ static void store(const Block& b, int g, std::byte*, std::byte* of_block) {
    if (g % kSuperblock != 0) return;
    uint4 words{};
    words.x = b.d.bits | static_cast<uint32_t>(b.dmin.bits) << 16;
    for (int i = 0; i < kSuperblock; ++i) {
      const uint8_t* p = b.scales + i % 4;
      const uint32_t s = i < 4 ? p[0] & 63 : (p[8] & 15) | p[0] >> 6 << 4;
      const uint32_t m = i < 4 ? p[4] & 63 : p[8] >> 4 | p[4] >> 6 << 4;
      words.y |= (s & 15) << 4 * i;
      words.z |= (m & 15) << 4 * i;
      words.w |= (s >> 4 | m >> 4 << 2) << 4 * i;
    }
    *reinterpret_cast<uint4*>(of_block) = words;
  }
};

// Of Q2_K: a byte for each 16 elements, scale | min << 4; d and dmin.
struct FourBitScalesAndMins {
  static constexpr int kScales = 2, kGroupBytes = 2, kBlockBytes = 4;
  static constexpr bool kMins = true;
  struct Raw {
    uint16_t scales;
    uint32_t d_dmin;
  };
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte* of_block) {
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

// Of Q3_K, whose six bits become a byte, and Q6_K: a signed byte for each 16 elements; d.
struct ByteScales {
  static constexpr int kScales = 2, kGroupBytes = 2, kBlockBytes = 2;
  static constexpr bool kMins = false;
  struct Raw {
    uint16_t scales, d;
  };
  __host__ __device__ static Raw load_raw(const std::byte* of_group, const std::byte* of_block) {
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

// Of IQ4_XS, as they are.
struct SixBitScale {
  static constexpr int kScales = 1, kGroupBytes = 0, kBlockBytes = 8;
  static constexpr bool kMins = false;
  struct Raw {
    uint2 words;
  };
  __host__ __device__ static Raw load_raw(const std::byte*, const std::byte* of_block) {
    Raw raw;
    load(of_block, &raw.words);
    return raw;
  }
  __host__ __device__ static void values(const Raw& raw, uint32_t g, float* scale, float*) {
    const uint32_t i = g % kSuperblock;
    const uint32_t s = (raw.words.y >> 4 * i & 15) | (raw.words.x >> (16 + 2 * i) & 3) << 4;
    scale[0] = low_half(raw.words.x) * static_cast<float>(static_cast<int>(s) - 32);
  }
  __host__ __device__ static void store(const BlockIQ4_XS& b, int g, std::byte*,
                                        std::byte* of_block) {
    if (g % kSuperblock != 0) return;
    uint2 words{b.d.bits | static_cast<uint32_t>(b.scales_h) << 16, 0};
    for (int i = 0; i < 4; ++i) words.y |= static_cast<uint32_t>(b.scales_l[i]) << 8 * i;
    *reinterpret_cast<uint2*>(of_block) = words;
  }
};

// ---- The bits of element i of a block, as core/blocks.h says ----

template <class Block>
__host__ __device__ inline uint32_t half_byte(const Block& b, int i) {
  return b.qs[i % 16] >> i / 16 * 4 & 15;
}
template <class Block>
__host__ __device__ inline uint32_t fifth_bit(const Block& b, int i) {
  return (b.qh[i / 8] >> i % 8 & 1) << 4;
}
__host__ __device__ inline uint32_t stored(const BlockQ4_0& b, int i) { return half_byte(b, i); }
__host__ __device__ inline uint32_t stored(const BlockQ4_1& b, int i) { return half_byte(b, i); }
__host__ __device__ inline uint32_t stored(const BlockIQ4_NL& b, int i) { return half_byte(b, i); }
__host__ __device__ inline uint32_t stored(const BlockQ5_0& b, int i) {
  return half_byte(b, i) | fifth_bit(b, i);
}
__host__ __device__ inline uint32_t stored(const BlockQ5_1& b, int i) {
  return half_byte(b, i) | fifth_bit(b, i);
}
__host__ __device__ inline uint32_t stored(const BlockQ8_0& b, int i) {
  return static_cast<uint8_t>(b.qs[i]);
}
__host__ __device__ inline uint32_t stored(const BlockQ2_K& b, int i) {
  return b.qs[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}
__host__ __device__ inline uint32_t stored(const BlockQ3_K& b, int i) {
  return (b.qs[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) | (b.hmask[i % 32] >> i / 32 & 1) << 2;
}
__host__ __device__ inline uint32_t stored(const BlockQ4_K& b, int i) {
  return b.qs[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}
__host__ __device__ inline uint32_t stored(const BlockQ5_K& b, int i) {
  return (b.qs[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (b.qh[i % 32] >> i / 32 & 1) << 4;
}
__host__ __device__ inline uint32_t stored(const BlockQ6_K& b, int i) {
  return (b.ql[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15) |
         (b.qh[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) << 4;
}
__host__ __device__ inline uint32_t stored(const BlockIQ4_XS& b, int i) {
  return b.qs[i / 32 * 16 + i % 16] >> i / 16 % 2 * 4 & 15;
}

// ---- Formats ----

// A group as it was loaded, and unpacked. What a format does not have is never touched.
template <class Scales>
struct RawGroup {
  uint4 four[2];
  uint2 two;
  uint32_t one;
  typename Scales::Raw scales;
};

template <class Scales>
struct Group {
  uint32_t q[8];  // of four elements each, in order: signed bytes
  float scale[Scales::kScales];
  float min[Scales::kScales];
};

template <class BlockType, int kBits, class ScalesType, int kSubtracted = 0, bool kTable = false>
struct Format {
  using Block = BlockType;
  using Scales = ScalesType;
  using Raw = RawGroup<Scales>;
  static constexpr int kOffset = kSubtracted;
  static constexpr int kWide = kBits == 8 ? 32 : kBits >= 4 ? 16 : 0;  // bytes a group, as above
  static constexpr int kTwo = kBits == 2 || kBits == 3 || kBits == 6 ? 8 : 0;
  static constexpr int kOne = kBits == 3 || kBits == 5 ? 4 : 0;
  static constexpr int kBlockGroups = Scales::kBlockBytes > 0 ? kSuperblock : 1;  // in a Block

  __host__ __device__ static int64_t row_bytes(int64_t n_groups) {
    const int64_t bytes = n_groups * (kWide + kTwo + kOne + Scales::kGroupBytes) +
                          n_groups / kSuperblock * Scales::kBlockBytes;
    return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }

  // Where in a row the parts of group g are.
  struct Places {
    uint32_t wide, wide_step, two, one, of_group, of_block;

    __host__ __device__ Places(uint32_t n_groups, uint32_t g) {
      wide = g * 16;
      wide_step = 0;
      if constexpr (kBits == 8) {
        const uint32_t before = g / 32 * 32;
        wide += before * 16;
        wide_step = (n_groups - before < 32 ? n_groups - before : 32) * 16;
      }
      two = n_groups * kWide + g * kTwo;
      one = n_groups * (kWide + kTwo) + g * kOne;
      of_group = n_groups * (kWide + kTwo + kOne) + g * Scales::kGroupBytes;
      of_block = n_groups * (kWide + kTwo + kOne + Scales::kGroupBytes) +
                 g / kSuperblock * Scales::kBlockBytes;
    }
  };

  __host__ __device__ static Raw load_raw(const std::byte* row, int n_groups, int g) {
    const Places at(n_groups, g);
    Raw raw;
    if constexpr (kWide > 0) load_once(row + at.wide, &raw.four[0]);
    if constexpr (kBits == 8) load_once(row + at.wide + at.wide_step, &raw.four[1]);
    if constexpr (kTwo > 0) load(row + at.two, &raw.two);
    if constexpr (kOne > 0) load(row + at.one, &raw.one);
    raw.scales = Scales::load_raw(row + at.of_group, row + at.of_block);
    return raw;
  }

  __host__ __device__ static Group<Scales> unpack(const Raw& raw, int g) {
    Group<Scales> group;
    const uint32_t words[8] = {raw.four[0].x, raw.four[0].y, raw.four[0].z, raw.four[0].w,
                               raw.four[1].x, raw.four[1].y, raw.four[1].z, raw.four[1].w};
    H2O_UNROLL
    for (int j = 0; j < 8; ++j) {
      uint32_t q = 0;
      if constexpr (kBits == 8) q = words[j];
      if constexpr (kWide == 16 && !kTable) q = (j < 4 ? words[j] : words[j - 4] >> 4) & 0x0f0f0f0f;
      if constexpr (kTwo > 0) {
        constexpr int to = kBits == 6 ? 4 : 0;
        q |= moved(j < 4 ? raw.two.x : raw.two.y, to - j % 4 * 2) & 0x03030303u << to;
      }
      if constexpr (kOne > 0) {
        q |= moved(raw.one, kBits - 1 - j) & 0x01010101u << (kBits - 1);
      }
      group.q[j] = q;
    }
    if constexpr (kTable) {
      H2O_UNROLL
      for (int j = 0; j < 4; ++j) iq4_values(words[j], &group.q[j], &group.q[4 + j]);
    }
    Scales::values(raw.scales, g, group.scale, group.min);
    return group;
  }

  // Group g of a row, which is in block `b`. stored(b, i) are the bits of element i of the block.
  __host__ __device__ static void store(std::byte* row, int n_groups, int g, const Block& b) {
    const Places at(n_groups, g);
    const int first = g % kBlockGroups * kGroup;
    uint32_t four[8] = {}, two[2] = {}, one = 0;
    H2O_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t q = stored(b, first + i);
      const int byte = i % 4 * 8;
      if (kBits == 8) four[i / 4] |= (q & 255) << byte;
      if (kWide == 16) four[i / 4 % 4] |= (q & 15) << (byte + i / 16 * 4);
      if (kTwo > 0) two[i / 16] |= (q >> (kBits == 6 ? 4 : 0) & 3) << (byte + i / 4 % 4 * 2);
      if (kOne > 0) one |= (q >> (kBits - 1) & 1) << (byte + i / 4);
    }
    if constexpr (kWide > 0) {
      *reinterpret_cast<uint4*>(row + at.wide) = {four[0], four[1], four[2], four[3]};
    }
    if constexpr (kBits == 8) {
      *reinterpret_cast<uint4*>(row + at.wide + at.wide_step) = {four[4], four[5], four[6],
                                                                 four[7]};
    }
    if constexpr (kTwo > 0) *reinterpret_cast<uint2*>(row + at.two) = {two[0], two[1]};
    if constexpr (kOne > 0) *reinterpret_cast<uint32_t*>(row + at.one) = one;
    Scales::store(b, g, row + at.of_group, row + at.of_block);
  }

 private:
  __host__ __device__ static uint32_t moved(uint32_t bits, int left) {
    return left >= 0 ? bits << left : bits >> -left;
  }
};

inline bool is_quantised(DType dtype) { return info(dtype).block_size > 1; }

// f.template operator()<Format>() of a quantised type.
template <class F>
auto with_format(DType dtype, const F& f) {
  switch (dtype) {
    case DType::q4_0:
      return f.template operator()<Format<BlockQ4_0, 4, FloatScale, 8>>();
    case DType::q4_1:
      return f.template operator()<Format<BlockQ4_1, 4, FloatScaleAndMin>>();
    case DType::q5_0:
      return f.template operator()<Format<BlockQ5_0, 5, FloatScale, 16>>();
    case DType::q5_1:
      return f.template operator()<Format<BlockQ5_1, 5, FloatScaleAndMin>>();
    case DType::q2_k:
      return f.template operator()<Format<BlockQ2_K, 2, FourBitScalesAndMins>>();
    case DType::q3_k:
      return f.template operator()<Format<BlockQ3_K, 3, ByteScales, 4>>();
    case DType::q4_k:
      return f.template operator()<Format<BlockQ4_K, 4, SixBitScaleAndMin>>();
    case DType::q5_k:
      return f.template operator()<Format<BlockQ5_K, 5, SixBitScaleAndMin>>();
    case DType::q6_k:
      return f.template operator()<Format<BlockQ6_K, 6, ByteScales, 32>>();
    case DType::iq4_nl:
      return f.template operator()<Format<BlockIQ4_NL, 4, FloatScale, 0, true>>();
    case DType::iq4_xs:
      return f.template operator()<Format<BlockIQ4_XS, 4, SixBitScale, 0, true>>();
    default:
      return f.template operator()<Format<BlockQ8_0, 8, FloatScale>>();
  }
}

}  // namespace h2o::cuda

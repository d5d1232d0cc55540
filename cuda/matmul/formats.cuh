// Quantized types in device memory: the bits of core/blocks.h in another order, for wide loads and
// few instructions.
//
// A row is divided into groups of 32 elements. Each kind of data is contiguous over the groups, so
// that the lanes of a warp, one group each, load whole sectors:
//   q's:     low four bits, 16 bytes per group: byte i has elements i (low nibble) and 16 + i.
//            For 8 bits, two runs of 16 bytes: for every 32 groups, first all lower halves.
//   then     two more bits, 8 bytes per group:
//            bits 2 k of byte i of word h: element 16 h + 4 k + i.
//   then     one more bit, 4 bytes per group: bit 8 i + j is element 4 j + i.
//   scales:  data of each group,
//   then     data shared by 8 groups: the d of blocks of 256.
// Rows are padded to 16 bytes, so every load is aligned to its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/blocks.h"
#include "core/dtype.h"
#include "core/error.h"
#include "cuda/matmul/scales.cuh"
#include "cuda/matmul/weight_bits.cuh"

namespace h2o::cuda {

constexpr int kGroup = 32;  // elements
constexpr int kRowAlignment = 16;

// ---- The bits of element i of a block, see core/blocks.h ----

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
__host__ __device__ inline uint32_t stored(const BlockMXFP4& b, int i) { return half_byte(b, i); }
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

// A group as loaded, and unpacked. Parts that a format does not have are unused.
template <class Scales>
struct RawGroup {
  uint4 four[2];
  uint2 two;
  uint32_t one;
  typename Scales::Raw scales;
};

template <class Scales>
struct Group {
  uint32_t q[8];  // four elements each, in order: signed bytes
  float scale[Scales::kScales];
  float min[Scales::kScales];
};

template <class BlockType, int kBits, class ScalesType, int kSubtracted = 0, class Table = NoTable>
struct Format {
  using Block = BlockType;
  using Scales = ScalesType;
  using Raw = RawGroup<Scales>;
  static constexpr int kOffset = kSubtracted;
  static constexpr bool kTable = !std::is_same_v<Table, NoTable>;
  static constexpr bool kSigned = kBits == 8 || kTable;                // what unpack() gives
  static constexpr int kWide = kBits == 8 ? 32 : kBits >= 4 ? 16 : 0;  // bytes per group, see above
  static constexpr int kTwo = kBits == 2 || kBits == 3 || kBits == 6 ? 8 : 0;
  static constexpr int kOne = kBits == 3 || kBits == 5 ? 4 : 0;
  // Bytes of eight groups.
  static constexpr int kBytesOf8 =
      8 * (kWide + kTwo + kOne + Scales::kGroupBytes) + Scales::kBlockBytes;
  // groups in a Block
  static constexpr int kBlockGroups = Scales::kBlockBytes > 0 ? kSuperblock : 1;

  __host__ __device__ static int64_t row_bytes(int64_t n_groups) {
    const int64_t bytes = n_groups * (kWide + kTwo + kOne + Scales::kGroupBytes) +
                          n_groups / kSuperblock * Scales::kBlockBytes;
    return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }

  // Offsets in a row of the parts of group g.
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
    raw.scales = Scales::load_raw(row + at.of_group, row + at.of_block,
                                  [](const std::byte* from, auto* to) { load(from, to); });
    return raw;
  }

  // Elements 4 j to 4 j + 3 of a group, and 16 + 4 j to 16 + 4 j + 3, for j < 4. first, second: the
  // j-th words of the lower and of the upper 16 bytes.
  __host__ __device__ static uint2 eight(uint32_t first, uint32_t second, uint2 two, uint32_t one,
                                         int j) {
    uint2 q{};
    if constexpr (kBits == 8) q = {first, second};
    if constexpr (kWide == 16 && !kTable) q = {first & 0x0f0f0f0f, first >> 4 & 0x0f0f0f0f};
    if constexpr (kTable) table_values<Table>(first, &q.x, &q.y);
    if constexpr (kTwo > 0) {
      constexpr int to = kBits == 6 ? 4 : 0;
      q.x |= moved(two.x, to - j * 2) & 0x03030303u << to;
      q.y |= moved(two.y, to - j * 2) & 0x03030303u << to;
    }
    if constexpr (kOne > 0) {
      q.x |= moved(one, kBits - 1 - j) & 0x01010101u << (kBits - 1);
      q.y |= moved(one, kBits - 5 - j) & 0x01010101u << (kBits - 1);
    }
    return q;
  }

  __host__ __device__ static Group<Scales> unpack(const Raw& raw, int g) {
    Group<Scales> group;
    const uint32_t words[8] = {raw.four[0].x, raw.four[0].y, raw.four[0].z, raw.four[0].w,
                               raw.four[1].x, raw.four[1].y, raw.four[1].z, raw.four[1].w};
    H2O_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint2 q = eight(words[j], words[4 + j], raw.two, raw.one, j);
      group.q[j] = q.x;
      group.q[4 + j] = q.y;
    }
    Scales::values(raw.scales, g, group.scale, group.min);
    return group;
  }

  // Stores group g of a row, which is in block `b`. stored(b, i): the bits of element i of the
  // block.
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

// Calls f.template operator()<Format>() for a quantized type. Throws InvalidArgument for types that
// only the CPU supports.
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
      return f.template operator()<Format<BlockIQ4_NL, 4, FloatScale, 0, Iq4Table>>();
    case DType::iq4_xs:
      return f.template operator()<Format<BlockIQ4_XS, 4, SixBitScale, 0, Iq4Table>>();
    case DType::mxfp4:
      return f.template operator()<Format<BlockMXFP4, 4, PowerScale, 0, Mxfp4Table>>();
    case DType::q8_0:
      return f.template operator()<Format<BlockQ8_0, 8, FloatScale>>();
    default:
      throw InvalidArgument(concat("[cuda] weights in ", info(dtype).name,
                                   " are computed on the CPU only; use device=cpu"));
  }
}

}  // namespace h2o::cuda

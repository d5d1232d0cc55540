// Weights with kInterleaved interleaved columns (cpu/matmul/interleave.h), compiled once per
// instruction set (see cpu/kernels-inl.h).
//
// A vector holds four elements of each column, so nothing is transposed: after unpacking it is
// multiplied by four elements of x in every lane. The operations and their order are those of
// int8_matmul-inl.h.
#pragma once

#include "cpu/matmul/int8_row-inl.h"

namespace h2o {
namespace {

constexpr int64_t kStripVectors = kInterleaved / kWidth;

// Offset of byte `offset` of a block: after the scales, if their size is odd.
template <class Block>
constexpr int64_t interleaved_at(int64_t offset) {
  return sizeof(Block) % kQuad * kInterleaved + offset / kQuad * kQuad * kInterleaved;
}

// Blocks of 32 elements: the four from `element`, for all columns in Quants.
template <class Block>
struct InterleavedBlocks {
  const std::byte* block;  // of the first of these columns
  int element;

  H2O_INLINE void bytes(Quants* to, int64_t offset) const { load(to, offset + element); }
  H2O_INLINE void bits(Bits* to, int64_t offset, int right, uint32_t mask) const {
    Quants all;
    bytes(&all, offset);
    shift_bytes(to, all, right, mask);
  }
  H2O_INLINE void nibbles(Quants* to, int64_t offset) const {
    Quants all;
    Bits half;
    load(&all, offset + element % 16);
    shift_bytes(&half, all, element / 16 * 4, 15);
    *to = (Quants)half;
  }
  H2O_INLINE void fifth_bits(Quants* to, int64_t offset) const {
    Quants all;
    load(&all, offset);
    spread_fifth_bits(to, (Bits)all >> element & 15);
  }

 private:
  H2O_INLINE void load(Quants* to, int64_t offset) const {
    __builtin_memcpy(to, block + interleaved_at<Block>(offset), sizeof(*to));
  }
};

// The packed scales of kWidth columns.
template <class Block>
struct InterleavedScales {
  const std::byte* block;  // of all columns
  int64_t column;

  Ints word(int64_t offset) const {
    return load_quads(reinterpret_cast<const int8_t*>(block) + interleaved_at<Block>(offset) +
                      column * kQuad);
  }
  Ints byte(int64_t offset) const { return byte_of(word(offset / kQuad * kQuad), offset % kQuad); }
  Vec half(int64_t offset) const {
    if constexpr (sizeof(Block) % kQuad != 0) {
      return load(reinterpret_cast<const decltype(Block::d)*>(block) + column);
    } else {
      return half_of(word(offset / kQuad * kQuad), offset % kQuad);
    }
  }
};

// The scale and min of group g of a block.
template <class Type>
struct BlockScales {
  using Source = InterleavedScales<typename Type::Block>;

  Source source;
  Vec d, dmin;

  H2O_INLINE BlockScales(const std::byte* block, int64_t column) : source{block, column} {
    if constexpr (Type::kBlock == 256) {
      d = Type::d(source);
      if constexpr (Type::kMins) dmin = Type::dmin(source);
    } else {
      d = source.half(offsetof(typename Type::Block, d));
      if constexpr (Type::kMins) dmin = source.half(offsetof(typename Type::Block, m));
    }
  }
  H2O_INLINE Vec scale(int64_t g) const {
    if constexpr (Type::kBlock == 256) return mul(d, to_float(Type::scale(source, g)));
    if constexpr (Type::kGroup < Type::kBlock) {
      return source.half(offsetof(typename Type::Block, d) + 2 * g);
    }
    return d;
  }
  H2O_INLINE Vec min(int64_t g) const {
    if constexpr (Type::kBlock == 256) return mul(dmin, to_float(Type::min(source, g)));
    return dmin;
  }
};

// Prefetches kBytes into the L2 cache: it supports more outstanding requests than L1, whose would
// delay subsequent loads. Hardware prefetchers do not follow the streams of a block.
template <int64_t kBytes>
H2O_INLINE void prefetch_lines(const std::byte* from) {
#pragma GCC unroll 16
  for (int64_t at = 0; at < kBytes; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// Elements g + e, ..., g + e + 3 of a block, of the columns of vector v; g is a multiple of 32.
template <class Type>
H2O_INLINE Ints interleaved_quads(const std::byte* block, int g, int e, int64_t v) {
  constexpr int64_t kParts = sizeof(Quants) / kQuad / kWidth;
  Quants q;
  const std::byte* columns = block + v / kParts * static_cast<int64_t>(sizeof(Quants));
  Type::quants(&q, InterleavedBlocks<typename Type::Block>{columns, e}, g);
  return load_quads(reinterpret_cast<const int8_t*>(&q) + v % kParts * kWidth * kQuad);
}

// One row of x and kInterleaved columns.
template <class Type>
struct Strip {
  static constexpr int64_t kBlockBytes = kInterleaved * sizeof(typename Type::Block);
  // Unrolled elements: a whole block of 256 has too many instructions for good scheduling.
  static constexpr int kStep = Type::kBlock < 64 ? Type::kBlock : 64;
  static constexpr int64_t kAhead = 8192;  // prefetch distance in bytes
  // Zen 4 does not follow on its own how these read a block.
  static constexpr bool kNeedsPrefetch = Type::kGroup == 16;

  const int8_t* x_q;
  const float* x_scales;
  const int32_t* x_sums;
  int64_t ahead;  // where to prefetch from: kAhead, or 0, which changes nothing
  Vec totals[kStripVectors];

  // How many quads have sums that fit in 16 bits, where pair sums are used.
  static constexpr int kRun = [] {
    constexpr int kMax = kLargestPair / (2 * 127 * ((1 << Type::kBits) - 1));
    if (Type::kSigned || kMax < 2) return 1;
    return kMax < 4 ? 2 : kMax < 8 || Type::kGroup == 16 ? 4 : 8;
  }();

  // Elements [i, i + kBlock).
  H2O_INLINE void add_block(const std::byte* block, int64_t i) {
    const Scales scales(block);
#pragma GCC unroll 1
    for (int first = 0; first < Type::kBlock; first += kStep) {
#pragma GCC unroll 2
      for (int g = first; g < first + kStep; g += 32) {
        prefetch_lines<kBlockBytes * 32 / Type::kBlock>(block + ahead +
                                                        g * kBlockBytes / Type::kBlock);
        Ints dots[2][kStripVectors];
        start(dots, (i + g) / Type::kGroup);
#pragma GCC unroll 8
        for (int e = 0; e < 32; e += kQuad * kRun) {
          add_quads(dots[e / 16], block, g, e, x_q + i + g + e);
        }
        const Vec x_scale = broadcast(x_scales[(i + g) / kActivations]);
#pragma GCC unroll 16
        for (int64_t v = 0; v < kStripVectors; ++v) {
          if constexpr (Type::kGroup == 32) {
            add_group(scales, v, add(dots[0][v], dots[1][v]), x_scale, i, g);
          } else {
            add_group(scales, v, dots[0][v], x_scale, i, g);
            add_group(scales, v, dots[1][v], x_scale, i, g + 16);
          }
        }
      }
    }
  }

 private:
  // Scales of a block, computed ahead of use because registers are scarce.
  struct Scales {
    static constexpr int64_t kGroups = Type::kBlock / Type::kGroup;
    Vec scales[kGroups][kStripVectors], mins[kGroups][kStripVectors];

    H2O_INLINE explicit Scales(const std::byte* block) {
#pragma GCC unroll 16
      for (int64_t v = 0; v < kStripVectors; ++v) {
        const BlockScales<Type> of_block(block, v * kWidth);
#pragma GCC unroll 16
        for (int64_t g = 0; g < kGroups; ++g) {
          scales[g][v] = of_block.scale(g);
          if constexpr (Type::kMins) mins[g][v] = of_block.min(g);
        }
      }
    }
  };

  H2O_INLINE void start(Ints (&dots)[2][kStripVectors], int64_t group) const {
#pragma GCC unroll 2
    for (int64_t h = 0; h < 2; ++h) {
      const bool is_group = h == 0 || Type::kGroup == 16;
      const Ints value = ints(is_group ? dot_start<Type>(x_sums[group + h], Type::kOffset) : 0);
#pragma GCC unroll 16
      for (int64_t v = 0; v < kStripVectors; ++v) dots[h][v] = value;
    }
  }

  // kRun quads of all columns.
  H2O_INLINE static void add_quads(Ints (&dots)[kStripVectors], const std::byte* block, int g,
                                   int e, const int8_t* x) {
#pragma GCC unroll 16
    for (int64_t v = 0; v < kStripVectors; ++v) {
      if constexpr (kRun == 1) {
        dots[v] = dot<Type>(dots[v], interleaved_quads<Type>(block, g, e, v), broadcast_quad(x));
      } else {
        Ints w[kRun], xq[kRun];
#pragma GCC unroll 8
        for (int i = 0; i < kRun; ++i) {
          w[i] = interleaved_quads<Type>(block, g, e + 4 * i, v);
          xq[i] = broadcast_quad(x + 4 * i);
        }
        dots[v] = dot_quads(dots[v], w, xq);
      }
    }
  }

  H2O_INLINE void add_group(const Scales& all, int64_t v, Ints dot, Vec x_scale, int64_t i, int g) {
    const int64_t group = g / Type::kGroup;
    totals[v] = add(totals[v], mul(to_float(dot), mul(all.scales[group][v], x_scale)));
    if constexpr (Type::kMins) {
      const int64_t at = (i + g) / kActivations;
      const float sum = x_scales[at] * static_cast<float>(x_sums[(i + g) / Type::kGroup]);
      totals[v] = add(totals[v], mul(all.mins[group][v], broadcast(sum)));
    }
  }
};

// One row of x times columns [begin, end).
template <class Type>
void interleaved_row(const Matmul& m, const Int8Rows& x, int64_t begin, int64_t end) {
  const bool prefetches = m.prefetches || Strip<Type>::kNeedsPrefetch;
  for (int64_t o = begin; o < end; o += kInterleaved) {
    Strip<Type> strip{.x_q = x.q,
                      .x_scales = x.scales,
                      .x_sums = x.sums,
                      .ahead = prefetches ? Strip<Type>::kAhead : 0,
                      .totals = {}};
    for (Vec& total : strip.totals) total = zero();
    const std::byte* block = m.w + o * m.w_row_bytes;
    for (int64_t i = 0; i < m.n_in; i += Type::kBlock, block += Strip<Type>::kBlockBytes) {
      strip.add_block(block, i);
    }
    float sums[kInterleaved];
    for (int64_t v = 0; v < kStripVectors; ++v) store(sums + v * kWidth, strip.totals[v]);
    write_outputs(m, 0, o, end - o < kInterleaved ? end - o : kInterleaved, sums);
  }
}

}  // namespace
}  // namespace h2o

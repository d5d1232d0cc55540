// Types whose elements come from tables: codebooks (IQ1 to IQ3), powers of three (TQ1_0), NVFP4;
// and TQ2_0, Q1_0 and Q2_0. Compiled once per instruction set (see cpu/kernels-inl.h).
//
// They are multiplied in integers like the other types. Each type defines
//   quants(&q, source, i)         as in int8_blocks-inl.h, for rows of the file
//   factor(block), step(block, g) whose product is the scale of group g
// so that an element is scale * (q - kOffset), exact in float.
//
// For interleaved columns see cpu/matmul/interleaved_codebooks-inl.h.
#pragma once

#include "core/unpack_tables.h"
#include "cpu/matmul/int8_blocks-inl.h"

namespace h2o {
namespace {

uint32_t load_half(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, sizeof(half));
  return half;
}
uint64_t load_eight(const uint8_t* p) {
  uint64_t eight;
  __builtin_memcpy(&eight, p, sizeof(eight));
  return eight;
}
uint32_t half_byte(const uint8_t* p, int64_t i) { return p[i / 2] >> i % 2 * 4 & 15; }

constexpr uint64_t kEachByte = 0x0101010101010101;

// ---- 32 elements of each column as four 8-byte words, passed from registers to a vector: a load
// from memory would wait for the stores that it spans. ----

typedef uint64_t Eights __attribute__((vector_size(sizeof(Quants))));

// Word e of the block of each column is eight(block, e), e < 4.
template <class Block, class Eight>
H2O_INLINE void make_eights(Eights* to, const BlocksInRows& source, const Eight& eight) {
  const auto& a = *reinterpret_cast<const Block*>(source.columns[0] + source.at);
  if constexpr (kQuantColumns == 1) {
    *to = Eights{eight(a, 0), eight(a, 1), eight(a, 2), eight(a, 3)};
  } else {
    const auto& b = *reinterpret_cast<const Block*>(source.columns[1] + source.at);
    *to = Eights{eight(a, 0), eight(a, 1), eight(a, 2), eight(a, 3),
                 eight(b, 0), eight(b, 1), eight(b, 2), eight(b, 3)};
  }
}

template <class BlockType, int64_t kElements, int64_t kGroupElements, int kQuantBits, int32_t kZero>
struct UnpackedType : Int8Type<BlockType, kElements, kGroupElements, false, kQuantBits, kZero> {
  static constexpr bool kUnpacked = true;
  static constexpr bool kUnrolled = false;

  static float factor(const BlockType& b) { return to_float(b.d); }
};

// The q's of codebooks: kQuants[q >> kShift] is q. Scales are factor * (2 * scale(block, g) + 1) *
// kStep.
struct Iq1Quants {
  static constexpr float kStep = 0.125f;
  static constexpr int kBits = 5, kOffset = 9, kShift = 1;
  static constexpr int8_t kQuants[16] = {0, 2, 0, 0, 8, 10, 0, 0, 16, 18};
};
struct Iq2Quants {
  static constexpr float kStep = 0.125f;
  static constexpr int kBits = 7, kOffset = 43, kShift = 4;
  static constexpr int8_t kQuants[16] = {0, 18, 35, 51, 68, 86};
};
struct Iq3XxsQuants {
  static constexpr float kStep = 0.25f;
  static constexpr int kBits = 7, kOffset = 62, kShift = 3;
  static constexpr int8_t kQuants[16] = {0,  10, 18, 26, 34, 42,  50,  58,
                                         66, 74, 82, 90, 98, 106, 114, 124};
};
struct Iq3SQuants {
  static constexpr float kStep = 1;
  static constexpr int kBits = 5, kOffset = 15, kShift = 1;
  static constexpr int8_t kQuants[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
};

template <class Type, class BlockType, int64_t kGroupElements, class QuantsOf>
struct CodebookType
    : UnpackedType<BlockType, 256, kGroupElements, QuantsOf::kBits, QuantsOf::kOffset> {
  using Values = QuantsOf;
  static F16 d(const BlockType& b) { return b.d; }
  static float step(const BlockType& b, int64_t g) {
    return static_cast<float>(2 * Type::scale(b, g) + 1) * Values::kStep;
  }
};

// Magnitudes and signs: magnitudes(block, i, e) are the eight elements from i + 8 e, at most
// kOffset; signs(block, i, e) has 0xff bytes for the negative ones.
template <class Type, class BlockType, int64_t kGroupElements, class QuantsOf>
struct SignedCodebook : CodebookType<Type, BlockType, kGroupElements, QuantsOf> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights magnitudes, signs;
    make_eights<BlockType>(&magnitudes, source, [i](const BlockType& b, int64_t e) {
      return Type::magnitudes(b, i, e);
    });
    make_eights<BlockType>(&signs, source,
                           [i](const BlockType& b, int64_t e) { return Type::signs(b, i, e); });
    const Quants negative = (Quants)signs;
    *q = ((Quants)magnitudes ^ negative) - negative + int8_t{QuantsOf::kOffset};
  }
};

// A reader like those of cpu/matmul/blocks-inl.h.
template <class Type>
struct Unpacked : Blocks<Unpacked<Type>, typename Type::Block, Type::kBlock> {
  struct Group {
    Quants q;       // all columns are equal
    Vec scales[2];  // of 16 elements

    Vec at(int64_t l) const {
      const auto* bytes = reinterpret_cast<const uint8_t*>(&q);
      return mul(scales[l / 16], to_float(sub(load_bytes(bytes + l), ints(Type::kOffset))));
    }
  };

  const typename Type::Block& b;

  explicit Unpacked(const typename Type::Block& block) : b(block) {}
  Group group(int64_t g) const {
    Group of;
    const BlocksInRows source{{reinterpret_cast<const std::byte*>(&b), 0}, 0};
    Type::quants(&of.q, source, static_cast<int>(g));
    const float factor = Type::factor(b);
    for (int64_t h = 0; h < 2; ++h) {
      of.scales[h] = broadcast(factor * Type::step(b, (g + 16 * h) / Type::kGroup));
    }
    return of;
  }
};

// ---- Two bits ----

struct Int8IQ2_XXS : SignedCodebook<Int8IQ2_XXS, BlockIQ2_XXS, 32, Iq2Quants> {
  // Per 32 elements: four indices, then signs and scale.
  static uint64_t magnitudes(const Block& b, int64_t i, int64_t e) {
    return kIq2XxsGrid[b.qs[i / 4 + e]];
  }
  static uint64_t signs(const Block& b, int64_t i, int64_t e) {
    return kEvenSigns[load_word(b.qs + i / 4 + 4) >> 7 * e & 127];
  }
  static uint32_t scale(const Block& b, int64_t g) { return load_word(b.qs + 8 * g + 4) >> 28; }
};

struct Int8IQ2_XS : SignedCodebook<Int8IQ2_XS, BlockIQ2_XS, 16, Iq2Quants> {
  static uint64_t magnitudes(const Block& b, int64_t i, int64_t e) {
    return kIq2XsGrid[load_half(b.qs + i / 4 + 2 * e) & 511];
  }
  static uint64_t signs(const Block& b, int64_t i, int64_t e) {
    return kEvenSigns[b.qs[i / 4 + 2 * e + 1] >> 1];
  }
  static uint32_t scale(const Block& b, int64_t g) { return half_byte(b.scales, g); }
};

struct Int8IQ2_S : SignedCodebook<Int8IQ2_S, BlockIQ2_S, 16, Iq2Quants> {
  static uint64_t magnitudes(const Block& b, int64_t i, int64_t e) {
    const uint32_t high = b.qh[i / 32] >> 2 * e & 3;
    return kIq2SGrid[b.qs[i / 8 + e] | high << 8];
  }
  static uint64_t signs(const Block& b, int64_t i, int64_t e) { return kSigns[b.signs[i / 8 + e]]; }
  static uint32_t scale(const Block& b, int64_t g) { return half_byte(b.scales, g); }
};

// ---- Three bits ----

struct Int8IQ3_XXS : SignedCodebook<Int8IQ3_XXS, BlockIQ3_XXS, 32, Iq3XxsQuants> {
  static uint64_t magnitudes(const Block& b, int64_t i, int64_t e) {
    const uint8_t* two = b.qs + i / 4 + 2 * e;
    return kIq3XxsGrid[two[0]] | uint64_t{kIq3XxsGrid[two[1]]} << 32;
  }
  static uint64_t signs(const Block& b, int64_t i, int64_t e) {
    return kEvenSigns[load_word(b.scales + i / 8) >> 7 * e & 127];
  }
  static uint32_t scale(const Block& b, int64_t g) { return load_word(b.scales + 4 * g) >> 28; }
};

struct Int8IQ3_S : SignedCodebook<Int8IQ3_S, BlockIQ3_S, 32, Iq3SQuants> {
  static uint32_t four(const Block& b, int64_t i, int64_t e) {
    const uint32_t high = b.qh[i / 32] >> e & 1;
    return kIq3SGrid[b.qs[i / 4 + e] | high << 8];
  }
  static uint64_t magnitudes(const Block& b, int64_t i, int64_t e) {
    return four(b, i, 2 * e) | uint64_t{four(b, i, 2 * e + 1)} << 32;
  }
  static uint64_t signs(const Block& b, int64_t i, int64_t e) { return kSigns[b.signs[i / 8 + e]]; }
  static uint32_t scale(const Block& b, int64_t g) { return half_byte(b.scales, g); }
};

// ---- One bit: g + delta, where delta is +-1/8; in eighths ----

uint64_t eighths(uint32_t index, bool negative) {
  return kIq1Grid[index] + (negative ? -kEachByte : kEachByte);
}

struct Int8IQ1_S : CodebookType<Int8IQ1_S, BlockIQ1_S, 32, Iq1Quants> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      const uint32_t qh = load_half(b.qh + i / 16);
      return eighths(b.qs[i / 8 + e] | (qh >> 3 * e & 7) << 8, (qh & 0x8000) != 0);
    });
    *q = (Quants)all;
  }
  static uint32_t scale(const Block& b, int64_t g) { return load_half(b.qh + 2 * g) >> 12 & 7; }
};

struct Int8IQ1_M : CodebookType<Int8IQ1_M, BlockIQ1_M, 16, Iq1Quants> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      const uint32_t high = half_byte(b.qh, i / 8 + e);
      return eighths(b.qs[i / 8 + e] | (high & 7) << 8, (high & 8) != 0);
    });
    *q = (Quants)all;
  }
  // The high four bits of the scale words form the f16 of the block.
  static F16 d(const Block& b) {
    uint32_t d = 0;
    for (int64_t i = 0; i < 4; ++i) d |= load_half(b.scales + 2 * i) >> 12 << 4 * i;
    return {static_cast<uint16_t>(d)};
  }
  static float factor(const Block& b) { return to_float(d(b)); }
  static uint32_t scale(const Block& b, int64_t g) {
    return load_half(b.scales + g / 4 * 2) >> 3 * (g % 4) & 7;
  }
};

// ---- Minus one, zero and one ----

struct Int8TQ1_0 : UnpackedType<BlockTQ1_0, 256, 32, 2, 1> {
  static constexpr bool kUnrolled = true;

  // Five base-3 digits per byte, as a fraction: 32 bytes have the first 160 elements, 16 the next
  // 80, and four, with four digits each, the last 16.
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      if (i < 160) return load_eight(b.qs + 8 * e);
      if (i == 224 && e >= 2) return uint64_t{load_word(b.qh)} * 0x100000001;
      return load_eight(b.qs + 32 + 8 * (e % 2));
    });
    // The digit index of each group of eight (at the end, of four).
    Bits powers;
    if (i < 160) {
      powers = Bits{} + kPowers[i / 32];
    } else if (i == 160) {
      load_pattern(&powers, {1, 1, 1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3});
    } else if (i == 192) {
      load_pattern(&powers, {9, 9, 9, 9, 27, 27, 27, 27, 9, 9, 9, 9, 27, 27, 27, 27});
    } else {
      load_pattern(&powers, {81, 81, 81, 81, 1, 3, 9, 27, 81, 81, 81, 81, 1, 3, 9, 27});
    }
    const auto fractions = (Fractions)all * (Fractions)(powers * 0x01010101);
    // The integer part of three times the fraction: 1 from a third on, 2 from two thirds on.
    *q = -((Quants)(fractions >= 86) + (Quants)(fractions >= 171));
  }
  static float step(const Block&, int64_t) { return 1; }

 private:
  typedef uint8_t Fractions __attribute__((vector_size(sizeof(Quants))));
  static constexpr uint32_t kPowers[] = {1, 3, 9, 27, 81};
};

struct Int8TQ2_0 : UnpackedType<BlockTQ2_0, 256, 32, 2, 1> {
  static constexpr bool kUnrolled = true;

  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Bits bits;
    source.bits(&bits, offsetof(Block, qs) + i / 128 * 32, i / 32 % 4 * 2, 3);
    *q = (Quants)bits;
  }
  static float step(const Block&, int64_t) { return 1; }
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(Block, d));
  }
  template <class Source>
  static Ints scale(const Source&, int64_t) {
    return ints(1);
  }
};

// ---- NVFP4 ----

struct Int8NVFP4 : UnpackedType<BlockNVFP4, 64, 16, 5, 12> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      return load_eight(b.qs + (i + 16 * (e / 2)) / 2) >> e % 2 * 4 & 15 * kEachByte;
    });
    *q = (Quants)all;
    lookup_quants(q, kMxfp4Quants);
  }
  static float factor(const Block&) { return 1; }
  static float step(const Block& b, int64_t g) { return to_float(kNvfp4Scales[b.d[g]]); }
};

// ---- One or two bits in order ----

struct Int8Q1_0 : UnpackedType<BlockQ1_0, 128, 32, 2, 1> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      return kSigns[b.qs[i / 8 + e]] & 2 * kEachByte;
    });
    *q = (Quants)all;
  }
  static float step(const Block&, int64_t) { return 1; }
};

struct Int8Q2_0 : UnpackedType<BlockQ2_0, 64, 32, 2, 1> {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    Eights all;
    make_eights<Block>(&all, source, [i](const Block& b, int64_t e) {
      uint64_t pairs = load_half(b.qs + i / 4 + 2 * e);  // one to a byte, in three steps
      pairs = (pairs | pairs << 24) & 0x000000ff000000ff;
      pairs = (pairs | pairs << 12) & 0x000f000f000f000f;
      return (pairs | pairs << 6) & 3 * kEachByte;
    });
    *q = (Quants)all;
  }
  static float step(const Block&, int64_t) { return 1; }
};

}  // namespace
}  // namespace h2o

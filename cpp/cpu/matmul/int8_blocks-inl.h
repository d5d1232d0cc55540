// Quantized types as 8-bit integers and scales, compiled once per instruction set (see
// cpu/kernels-inl.h).
//
// w[i] = scale * (q[i] - kOffset) + min, where a group of kGroup elements has a scale and, if
// kMins, a min, both exact in float. q has kBits bits, and is unsigned unless it has eight. Each
// type defines how to read a block of kBlock elements of several columns at once. A `source`
// provides the bytes of the blocks, in file order or interleaved:
//   quants(&q, source, i)          the q's of the 32 elements from i of the source's columns
// A block of 32 is one group with scale d and min m. A block of 256 has up to 32 bytes of scales,
// which are computed for kWidth columns at once:
//   d(source), scale(source, g)    the scale of group g is d * scale,
//   dmin(source), min(source, g)   its min dmin * min
// Byte vectors use compiler extensions, so that this is written once. They are passed by pointer,
// because the ABI for returning them depends on the instruction set, and functions are inlined,
// because shifts by constants are cheaper.
//
// Requires from vec_*.h: Quants, 32 bytes of each of kQuantColumns columns; load_quants, 32 bytes;
// load_quants_twice, 16 bytes twice; lookup_quants, of bytes below 16 in a table.
#pragma once

#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

template <class BlockType, int64_t kElements, int64_t kGroupElements, bool kHasMins, int kQuantBits,
          int32_t kZero = 0>
struct Int8Type {
  using Block = BlockType;
  static constexpr int64_t kBlock = kElements;
  static constexpr int64_t kGroup = kGroupElements;
  static constexpr bool kMins = kHasMins;
  static constexpr int32_t kOffset = kZero;
  static constexpr int kBits = kQuantBits;
  static constexpr bool kSigned = kBits == 8;
  static_assert(!kMins || (kOffset == 0 && !kSigned));
  static constexpr bool kUnpacked = false;  // see cpu/matmul/codebooks-inl.h
  static constexpr bool kUnrolled = true;   // a block of 256 does not exceed the instruction cache
};

// the same bytes in groups of four
typedef uint32_t Bits __attribute__((vector_size(sizeof(Quants))));

// A constant for every column.
H2O_INLINE void load_pattern(Bits* to, const uint32_t (&pattern)[16]) {
  __builtin_memcpy(to, pattern, sizeof(*to));
}

// Shifts each byte right (left if negative) and applies `mask`, which must clear bits from the
// neighboring byte.
H2O_INLINE void shift_bytes(Bits* to, const Quants& bytes, int right, uint32_t mask) {
  const Bits bits = (Bits)bytes;
  *to = (right < 0 ? bits << -right : bits >> right) & mask * 0x01010101;
}

// Moves each of the low four bits to bit 4 of one byte.
H2O_INLINE void spread_fifth_bits(Quants* to, const Bits& four) {
  *to = (Quants)((four << 4 | four << 11 | four << 18 | four << 25) & 0x10101010);
}

// ---- Quants in the file: a block of kQuantColumns columns, `at` bytes from the start of these
// columns. All 32 elements at once. ----

struct BlocksInRows {
  Columns columns;
  int64_t at;

  // The 32 bytes at `offset` in the block, shifted.
  H2O_INLINE void bits(Bits* to, int64_t offset, int right, uint32_t mask) const {
    Quants bytes;
    load_quants(&bytes, columns, at + offset);
    shift_bytes(to, bytes, right, mask);
  }
  H2O_INLINE void bytes(Quants* to, int64_t offset) const { load_quants(to, columns, at + offset); }

  // The low nibbles of 16 bytes, then the high ones.
  H2O_INLINE void nibbles(Quants* to, int64_t offset) const {
    Bits shifts;
    load_pattern(&shifts, {0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4});
    load_quants_twice(to, columns, at + offset);
    *to = (Quants)((Bits)*to >> shifts & 0x0f0f0f0f);
  }

  // 16 where the corresponding one of 32 bits is set.
  H2O_INLINE void fifth_bits(Quants* to, int64_t offset) const {
    const auto word = [&](int i) {
      return load_word(reinterpret_cast<const uint8_t*>(columns[i] + at + offset));
    };
    Bits words = Bits{} + word(0);
    if constexpr (kQuantColumns == 2) {
      Bits second;
      load_pattern(&second, {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
      words = second != 0 ? Bits{} + word(1) : words;
    }
    Bits shifts;
    load_pattern(&shifts, {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28});
    spread_fifth_bits(to, words >> shifts & 15);
  }
};

// ---- Blocks of 32 ----

template <class Source>
H2O_INLINE void load_iq4(Quants* q, const Source& source, int64_t offset) {
  source.nibbles(q, offset);
  lookup_quants(q, kIq4Values);
}

struct Int8Q4_0 : Int8Type<BlockQ4_0, 32, 32, false, 4, 8> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    source.nibbles(q, offsetof(Block, qs));
  }
};

struct Int8Q4_1 : Int8Type<BlockQ4_1, 32, 32, true, 4> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    source.nibbles(q, offsetof(Block, qs));
  }
};

template <class BlockType, class Source>
H2O_INLINE void load_five_bits(Quants* q, const Source& source) {
  Quants fifth;
  source.fifth_bits(&fifth, offsetof(BlockType, qh));
  source.nibbles(q, offsetof(BlockType, qs));
  *q |= fifth;
}

struct Int8Q5_0 : Int8Type<BlockQ5_0, 32, 32, false, 5, 16> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    load_five_bits<Block>(q, source);
  }
};

struct Int8Q5_1 : Int8Type<BlockQ5_1, 32, 32, true, 5> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    load_five_bits<Block>(q, source);
  }
};

struct Int8Q8_0 : Int8Type<BlockQ8_0, 32, 32, false, 8> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    source.bytes(q, offsetof(Block, qs));
  }
};

struct Int8IQ4_NL : Int8Type<BlockIQ4_NL, 32, 32, false, 8> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    load_iq4(q, source, offsetof(Block, qs));
  }
};

// Offset by the smallest value, so that none is negative.
constexpr int8_t kMxfp4Quants[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Int8MXFP4 : Int8Type<BlockMXFP4, 32, 32, false, 5, 12> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int) {
    source.nibbles(q, offsetof(Block, qs));
    lookup_quants(q, kMxfp4Quants);
  }
};

// ---- Blocks of 256 ----

Ints bits_of(Ints word, int64_t shift, int32_t mask) {
  return bit_and(shift_right(word, ints(static_cast<int32_t>(shift))), ints(mask));
}

// Byte i of four.
Ints byte_of(Ints word, int64_t i) {
  return i == 3 ? shift_right(word, ints(24)) : bits_of(word, 8 * i, 255);
}

// The f16 in bytes i and i + 1 of four.
Vec half_of(Ints word, int64_t i) { return i == 0 ? low_halves(word) : high_halves(word); }

// The 32 bytes of a block selected by Type::packed_scales: four per word, one column per lane.
template <class Type>
struct ScalesInRows {
  const Ints* words;

  // Bytes of the block; `offset` of a word is a multiple of 4.
  Ints word(int64_t offset) const { return words[Type::packed_at(offset) / 4]; }
  Ints byte(int64_t offset) const {
    const int64_t at = Type::packed_at(offset);
    return byte_of(words[at / 4], at % 4);
  }
  Vec half(int64_t offset) const {
    const int64_t at = Type::packed_at(offset);
    return half_of(words[at / 4], at % 4);
  }
};

// Types whose scales are in the first 32 bytes of a block, or in the last.
struct ScalesFirst {
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_quants(q, columns, at);
  }
  static constexpr int64_t packed_at(int64_t offset) { return offset; }
};
template <class Block>
struct ScalesLast {
  static constexpr int64_t kAt = sizeof(Block) - 32;
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_quants(q, columns, at + kAt);
  }
  static constexpr int64_t packed_at(int64_t offset) { return offset - kAt; }
};

struct Int8Q2_K : Int8Type<BlockQ2_K, 256, 16, true, 2> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Bits bits;
    source.bits(&bits, offsetof(Block, qs) + i / 128 * 32, i / 32 % 4 * 2, 3);
    *q = (Quants)bits;
  }
  // The scales, followed by the end of the block, d and dmin, instead of the 16 bytes after them.
  using Last = ScalesLast<BlockQ2_K>;
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    Quants end;
    Bits from_end;
    load_pattern(&from_end, {0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1});
    Last::packed_scales(&end, columns, at);
    load_quants(q, columns, at);
    *q = (Quants)(from_end != 0 ? (Bits)end : (Bits)*q);
  }
  static constexpr int64_t packed_at(int64_t offset) {
    return offset < 16 ? offset : Last::packed_at(offset);
  }
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(Block, d));
  }
  template <class Source>
  static Vec dmin(const Source& s) {
    return sub(zero(), s.half(offsetof(Block, dmin)));
  }
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {
    return bit_and(s.byte(g), ints(15));
  }
  template <class Source>
  static Ints min(const Source& s, int64_t g) {
    return shift_right(s.byte(g), ints(4));
  }
};

struct Int8Q3_K : Int8Type<BlockQ3_K, 256, 16, false, 3, 4>, ScalesLast<BlockQ3_K> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Bits low, third;
    source.bits(&low, offsetof(Block, qs) + i / 128 * 32, i / 32 % 4 * 2, 3);
    source.bits(&third, offsetof(Block, hmask), i / 32 - 2, 4);
    *q = (Quants)(low | third);
  }
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(Block, d));
  }
  // The low four bits of scale g are in byte g % 8, the high two in byte 8 + g % 4.
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {
    const Ints low = bits_of(s.byte(offsetof(Block, scales) + g % 8), g / 8 * 4, 15);
    const Ints high = bits_of(s.byte(offsetof(Block, scales) + 8 + g % 4), g / 4 * 2, 3);
    return sub(bit_or(low, shift_left(high, ints(4))), ints(32));
  }
};

// Q4_K and Q5_K, whose blocks begin with d, dmin and 12 bytes of scales and mins.
template <class BlockType, int kBits>
struct ScalesAndMins32 : Int8Type<BlockType, 256, 32, true, kBits>, ScalesFirst {
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(BlockType, d));
  }
  template <class Source>
  static Vec dmin(const Source& s) {
    return sub(zero(), s.half(offsetof(BlockType, dmin)));
  }
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {
    return six_bits(s, g, 0);
  }
  template <class Source>
  static Ints min(const Source& s, int64_t g) {
    return six_bits(s, g, 1);
  }

  // Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 mins 0 to 3, in their low six bits. Of scales and
  // mins 4 to 7 the low four bits are in bytes 8 to 11, the high two in the high bits of 0 to 7.
  template <class Source>
  static Ints six_bits(const Source& s, int64_t g, int64_t of_mins) {
    const Ints first = s.word(offsetof(BlockType, scales) + 4 * of_mins);
    Ints four = bit_and(first, ints(0x3f3f3f3f));
    if (g >= 4) {  // the compiler hoists this
      const Ints last = s.word(offsetof(BlockType, scales) + 8);
      const Ints low = bits_of(last, 4 * of_mins, 0x0f0f0f0f);
      four = bit_or(low, bits_of(first, 2, 0x30303030));
    }
    return byte_of(four, g % 4);
  }
};

struct Int8Q4_K : ScalesAndMins32<BlockQ4_K, 4> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Bits bits;
    source.bits(&bits, offsetof(Block, qs) + i / 64 * 32, i / 32 % 2 * 4, 15);
    *q = (Quants)bits;
  }
};

struct Int8Q5_K : ScalesAndMins32<BlockQ5_K, 5> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    Bits low, fifth;
    source.bits(&low, offsetof(Block, qs) + i / 64 * 32, i / 32 % 2 * 4, 15);
    source.bits(&fifth, offsetof(Block, qh), i / 32 - 4, 16);
    *q = (Quants)(low | fifth);
  }
};

struct Int8Q6_K : Int8Type<BlockQ6_K, 256, 16, false, 6, 32>, ScalesLast<BlockQ6_K> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    const int k = i / 32 % 4;
    Bits low, high;
    source.bits(&low, offsetof(Block, ql) + i / 128 * 64 + k % 2 * 32, k / 2 * 4, 15);
    source.bits(&high, offsetof(Block, qh) + i / 128 * 32, k * 2 - 4, 48);
    *q = (Quants)(low | high);
  }
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(Block, d));
  }
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {  // signed
    return sub(bit_xor(s.byte(offsetof(Block, scales) + g), ints(128)), ints(128));
  }
};

struct Int8IQ4_XS : Int8Type<BlockIQ4_XS, 256, 32, false, 8>, ScalesFirst {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    load_iq4(q, source, offsetof(Block, qs) + i / 2);
  }
  template <class Source>
  static Vec d(const Source& s) {
    return s.half(offsetof(Block, d));
  }
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {
    const Ints low = bits_of(s.word(offsetof(Block, scales_l)), 4 * g, 15);
    const Ints high = bits_of(s.word(offsetof(Block, d)), 16 + 2 * g, 3);  // of scales_h
    return sub(bit_or(low, shift_left(high, ints(4))), ints(32));
  }
};

}  // namespace
}  // namespace h2o

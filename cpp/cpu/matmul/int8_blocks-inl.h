// The quantised types as 8-bit integers and scales, compiled once per instruction set, under the
// rules at the top of cpu/kernels-inl.h.
//
// w[i] = scale * (q[i] - kOffset) + min, where a group of kGroup elements has a scale and, if
// kMins, a min, both exact in float. q has kBits bits, and no sign unless it has eight. Each type
// says how to read a block of kBlock elements, of kQuantColumns columns at once: the blocks `at`
// bytes after the beginning of these columns.
//   quants(&q, columns, at, i)        the 32 q's from element i
// A block of 32 is one group, whose scale is its d and whose min is its m. A block of 256 has up to
// 32 bytes of scales, which are worked out for kWidth columns at once: the lanes of words[i] are
// the i-th four bytes of each column.
//   packed_scales(&q, columns, at)
//   d(words), scale(words, g)         the scale of group g is d * scale,
//   dmin(words), min(words, g)        its min dmin * min
// Vectors of bytes are the compiler's, so that this is written once. They are handed out by
// pointer, because how they are returned depends on the instruction set; and inline, because shifts
// by constants are cheaper.
//
// Needs from vec_*.h: Quants, 32 bytes of each of kQuantColumns columns; load_quants, 32
// bytes; load_quants_twice, 16 bytes twice; lookup_quants, of bytes below 16 in a table.
#pragma once

#include "cpu/matmul/blocks-inl.h"

#define H2O_INLINE [[gnu::always_inline]] inline

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
};

typedef uint32_t Bits __attribute__((vector_size(sizeof(Quants))));  // of the same bytes, by fours

// Of each byte, `mask` applied after a shift to the right, or to the left if it is negative: bits
// that come from the next byte must not pass.
H2O_INLINE void load_bits(Bits* to, const Columns& columns, int64_t at, int right, uint32_t mask) {
  Quants bytes;
  load_quants(&bytes, columns, at);
  const Bits bits = (Bits)bytes;
  *to = (right < 0 ? bits << -right : bits >> right) & mask * 0x01010101;
}

// Of a constant that every column has.
H2O_INLINE void load_pattern(Bits* to, const uint32_t (&pattern)[16]) {
  __builtin_memcpy(to, pattern, sizeof(*to));
}

// ---- Blocks of 32 ----

// The low halves of 16 bytes, then the high ones.
H2O_INLINE void load_nibbles(Quants* q, const Columns& columns, int64_t at) {
  Bits shifts;
  load_pattern(&shifts, {0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4});
  load_quants_twice(q, columns, at);
  *q = (Quants)((Bits)*q >> shifts & 0x0f0f0f0f);
}

// 16 where the bit of the 32 bits is set.
H2O_INLINE void load_fifth_bits(Quants* to, const Columns& columns, int64_t at) {
  const auto word = [&](int i) {
    return load_word(reinterpret_cast<const uint8_t*>(columns[i] + at));
  };
  Bits words = Bits{} + word(0);
  if constexpr (kQuantColumns == 2) {
    Bits second;
    load_pattern(&second, {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
    words = second != 0 ? Bits{} + word(1) : words;
  }
  Bits shifts;
  load_pattern(&shifts, {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28});
  const Bits four = words >> shifts & 15;
  *to = (Quants)((four << 4 | four << 11 | four << 18 | four << 25) & 0x10101010);
}

H2O_INLINE void load_iq4(Quants* q, const Columns& columns, int64_t at) {
  load_nibbles(q, columns, at);
  lookup_quants(q, kIq4Values);
}

struct Int8Q4_0 : Int8Type<BlockQ4_0, 32, 32, false, 4, 8> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_nibbles(q, columns, at + offsetof(Block, qs));
  }
};

struct Int8Q4_1 : Int8Type<BlockQ4_1, 32, 32, true, 4> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_nibbles(q, columns, at + offsetof(Block, qs));
  }
};

template <class BlockType>
H2O_INLINE void load_five_bits(Quants* q, const Columns& columns, int64_t at) {
  Quants fifth;
  load_fifth_bits(&fifth, columns, at + offsetof(BlockType, qh));
  load_nibbles(q, columns, at + offsetof(BlockType, qs));
  *q |= fifth;
}

struct Int8Q5_0 : Int8Type<BlockQ5_0, 32, 32, false, 5, 16> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_five_bits<Block>(q, columns, at);
  }
};

struct Int8Q5_1 : Int8Type<BlockQ5_1, 32, 32, true, 5> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_five_bits<Block>(q, columns, at);
  }
};

struct Int8Q8_0 : Int8Type<BlockQ8_0, 32, 32, false, 8> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_quants(q, columns, at + offsetof(Block, qs));
  }
};

struct Int8IQ4_NL : Int8Type<BlockIQ4_NL, 32, 32, false, 8> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int) {
    load_iq4(q, columns, at + offsetof(Block, qs));
  }
};

// ---- Blocks of 256 ----

// Byte i of the words of a column.
Ints byte_of(const Ints* words, int64_t i) {
  const Ints shifted = shift_right(words[i / 4], ints(static_cast<int32_t>(i % 4 * 8)));
  return i % 4 == 3 ? shifted : bit_and(shifted, ints(255));
}

Ints bits_of(Ints word, int64_t shift, int32_t mask) {
  return bit_and(shift_right(word, ints(static_cast<int32_t>(shift))), ints(mask));
}

// The last 32 bytes of a block.
template <class BlockType>
H2O_INLINE void load_end(Quants* q, const Columns& columns, int64_t at) {
  load_quants(q, columns, at + static_cast<int64_t>(sizeof(BlockType)) - 32);
}

struct Int8Q2_K : Int8Type<BlockQ2_K, 256, 16, true, 2> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    Bits bits;
    load_bits(&bits, columns, at + offsetof(Block, qs) + i / 128 * 32, i / 32 % 4 * 2, 3);
    *q = (Quants)bits;
  }
  // The scales, and instead of the 16 bytes after them the end of the block, d and dmin.
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    Quants end;
    Bits from_end;
    load_pattern(&from_end, {0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1});
    load_end<Block>(&end, columns, at);
    load_quants(q, columns, at);
    *q = (Quants)(from_end != 0 ? (Bits)end : (Bits)*q);
  }
  static Vec d(const Ints* words) { return low_halves(words[7]); }
  static Vec dmin(const Ints* words) { return sub(zero(), high_halves(words[7])); }
  static Ints scale(const Ints* words, int64_t g) { return bit_and(byte_of(words, g), ints(15)); }
  static Ints min(const Ints* words, int64_t g) { return shift_right(byte_of(words, g), ints(4)); }
};

struct Int8Q3_K : Int8Type<BlockQ3_K, 256, 16, false, 3, 4> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    Bits low, third;
    load_bits(&low, columns, at + offsetof(Block, qs) + i / 128 * 32, i / 32 % 4 * 2, 3);
    load_bits(&third, columns, at + offsetof(Block, hmask), i / 32 - 2, 4);
    *q = (Quants)(low | third);
  }
  // The scales are 12 bytes before d, which is the last two.
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_end<Block>(q, columns, at);
  }
  static Vec d(const Ints* words) { return high_halves(words[7]); }
  // The low four bits of scale g are in byte g % 8, the high two in byte 8 + g % 4.
  static Ints scale(const Ints* words, int64_t g) {
    const Ints low = bits_of(byte_of(words, 18 + g % 8), g / 8 * 4, 15);
    const Ints high = bits_of(byte_of(words, 26 + g % 4), g / 4 * 2, 3);
    return sub(bit_or(low, shift_left(high, ints(4))), ints(32));
  }
};

// Of Q4_K and Q5_K, whose blocks begin with d, dmin and 12 bytes of scales and mins.
template <class BlockType, int kBits>
struct ScalesAndMins32 : Int8Type<BlockType, 256, 32, true, kBits> {
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_quants(q, columns, at);
  }
  static Vec d(const Ints* words) { return low_halves(words[0]); }
  static Vec dmin(const Ints* words) { return sub(zero(), high_halves(words[0])); }
  static Ints scale(const Ints* words, int64_t g) { return six_bits(words, g, 0); }
  static Ints min(const Ints* words, int64_t g) { return six_bits(words, g, 1); }

  // Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 mins 0 to 3, in their low six bits. Of scales and
  // mins 4 to 7 the low four bits are in bytes 8 to 11, the high two in the high bits of 0 to 7.
  static Ints six_bits(const Ints* words, int64_t g, int64_t of_mins) {
    const Ints first = words[1 + of_mins];
    Ints four = bit_and(first, ints(0x3f3f3f3f));
    if (g >= 4) {  // the compiler works this out once
      const Ints low = bits_of(words[3], 4 * of_mins, 0x0f0f0f0f);
      four = bit_or(low, bits_of(first, 2, 0x30303030));
    }
    return byte_of(&four, g % 4);
  }
};

struct Int8Q4_K : ScalesAndMins32<BlockQ4_K, 4> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    Bits bits;
    load_bits(&bits, columns, at + offsetof(Block, qs) + i / 64 * 32, i / 32 % 2 * 4, 15);
    *q = (Quants)bits;
  }
};

struct Int8Q5_K : ScalesAndMins32<BlockQ5_K, 5> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    Bits low, fifth;
    load_bits(&low, columns, at + offsetof(Block, qs) + i / 64 * 32, i / 32 % 2 * 4, 15);
    load_bits(&fifth, columns, at + offsetof(Block, qh), i / 32 - 4, 16);
    *q = (Quants)(low | fifth);
  }
};

struct Int8Q6_K : Int8Type<BlockQ6_K, 256, 16, false, 6, 32> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    const int k = i / 32 % 4;
    Bits low, high;
    load_bits(&low, columns, at + offsetof(Block, ql) + i / 128 * 64 + k % 2 * 32, k / 2 * 4, 15);
    load_bits(&high, columns, at + offsetof(Block, qh) + i / 128 * 32, k * 2 - 4, 48);
    *q = (Quants)(low | high);
  }
  // The scales are 16 bytes before d, which is the last two.
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_end<Block>(q, columns, at);
  }
  static Vec d(const Ints* words) { return high_halves(words[7]); }
  static Ints scale(const Ints* words, int64_t g) {  // of either sign
    return sub(bit_xor(byte_of(words, 14 + g), ints(128)), ints(128));
  }
};

struct Int8IQ4_XS : Int8Type<BlockIQ4_XS, 256, 32, false, 8> {
  H2O_INLINE static void quants(Quants* q, const Columns& columns, int64_t at, int i) {
    load_iq4(q, columns, at + offsetof(Block, qs) + i / 2);
  }
  // d, scales_h and scales_l are the first eight bytes.
  H2O_INLINE static void packed_scales(Quants* q, const Columns& columns, int64_t at) {
    load_quants(q, columns, at);
  }
  static Vec d(const Ints* words) { return low_halves(words[0]); }
  static Ints scale(const Ints* words, int64_t g) {
    const Ints high = bits_of(words[0], 16 + 2 * g, 3);
    return sub(bit_or(bits_of(words[1], 4 * g, 15), shift_left(high, ints(4))), ints(32));
  }
};

}  // namespace
}  // namespace h2o

// The quantised types as 8-bit integers and scales, compiled once per instruction set, under the
// rules at the top of cpu/kernels-inl.h.
//
// w[i] = scale * q[i] + min, where a group of kGroup elements has a scale and, if kMins, a min,
// both exact in float. Each type says how to read a block of kBlock elements of one column:
//   quants(&q, block, i)       the 32 q's from element i
// A block of 32 is one group, whose scale is its d and whose min is its m. A block of 256 has up to
// 32 bytes of scales, which are worked out for kWidth columns at once: the lanes of words[i] are
// the i-th four bytes of each column.
//   packed_scales(&q, block)
//   d(words), scale(words, g)  the scale of group g is d * scale,
//   dmin(words), min(words, g) its min dmin * min
// Vectors of bytes are the compiler's, so that this is written once. They are handed out by
// pointer, because how they are returned depends on the instruction set.
#pragma once

#include "cpu/blocks-inl.h"

namespace h2o {
namespace {

template <class BlockType, int64_t kElements, int64_t kGroupElements, bool kHasMins>
struct Int8Type {
  using Block = BlockType;
  static constexpr int64_t kBlock = kElements;
  static constexpr int64_t kGroup = kGroupElements;
  static constexpr bool kMins = kHasMins;
};

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(32)));  // of 32 bytes, by fours

Bytes16 load_16(const uint8_t* p) {
  Bytes16 bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return bytes;
}

void join(Quants* q, Bytes16 low, Bytes16 high) {
  *q = (Quants)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                       15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
                                       30, 31);
}

// Of each of 32 bytes, `mask` applied after a shift to the right: bits that come from the next byte
// must not pass. Then to the left.
void load_bits(Bits* to, const uint8_t* p, int64_t right, uint32_t mask, int64_t left = 0) {
  __builtin_memcpy(to, p, sizeof(*to));
  *to = (*to >> static_cast<uint32_t>(right) & mask * 0x01010101) << static_cast<uint32_t>(left);
}

// ---- Blocks of 32 ----

// The low halves of 16 bytes, then the high ones.
void load_nibbles(Quants* q, const uint8_t* qs) {
  const Bytes16 packed = load_16(qs);
  join(q, packed, packed);
  *q = (Quants)((Bits)*q >> Bits{0, 0, 0, 0, 4, 4, 4, 4} & 0x0f0f0f0f);
}

// 16 where the bit of `bits` is set.
void fifth_bits(Quants* to, const uint8_t* qh) {
  const uint32_t word = load_word(qh);
  const Quants spread = __builtin_shufflevector(
      (Quants)Bits{word, word, word, word, word, word, word, word}, (Quants)Bits{}, 0, 0, 0, 0, 0,
      0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const uint32_t low = 0x08040201;
  const uint32_t high = 0x80402010;
  const Quants bit = (Quants)Bits{low, high, low, high, low, high, low, high};
  *to = ((spread & bit) == bit) & 16;
}

// Each byte of `index`, below 16, replaced by that byte of the table.
Bytes16 look_up(Bytes16 table, Bytes16 index) {
#ifdef __clang__  // which has no shuffle by variables
  for (int i = 0; i < 16; ++i) index[i] = table[index[i]];
  return index;
#else
  return __builtin_shuffle(table, index);
#endif
}

void load_iq4(Quants* q, const uint8_t* qs) {
  const Bytes16 packed = load_16(qs);
  const Bytes16 table = load_16(reinterpret_cast<const uint8_t*>(kIq4Values));
  join(q, look_up(table, packed & 15), look_up(table, packed >> 4));
}

struct Int8Q4_0 : Int8Type<BlockQ4_0, 32, 32, false> {
  static void quants(Quants* q, const Block& b, int64_t) {
    load_nibbles(q, b.qs);
    *q -= 8;
  }
};

struct Int8Q4_1 : Int8Type<BlockQ4_1, 32, 32, true> {
  static void quants(Quants* q, const Block& b, int64_t) { load_nibbles(q, b.qs); }
};

struct Int8Q5_0 : Int8Type<BlockQ5_0, 32, 32, false> {
  static void quants(Quants* q, const Block& b, int64_t) {
    Quants fifth;
    fifth_bits(&fifth, b.qh);
    load_nibbles(q, b.qs);
    *q = (*q | fifth) - 16;
  }
};

struct Int8Q5_1 : Int8Type<BlockQ5_1, 32, 32, true> {
  static void quants(Quants* q, const Block& b, int64_t) {
    Quants fifth;
    fifth_bits(&fifth, b.qh);
    load_nibbles(q, b.qs);
    *q |= fifth;
  }
};

struct Int8Q8_0 : Int8Type<BlockQ8_0, 32, 32, false> {
  static void quants(Quants* q, const Block& b, int64_t) { __builtin_memcpy(q, b.qs, sizeof(*q)); }
};

struct Int8IQ4_NL : Int8Type<BlockIQ4_NL, 32, 32, false> {
  static void quants(Quants* q, const Block& b, int64_t) { load_iq4(q, b.qs); }
};

// ---- Blocks of 256 ----

// Byte i of the words of a column.
Ints byte_of(const Ints* words, int64_t i) {
  return bit_and(shift_right(words[i / 4], ints(static_cast<int32_t>(i % 4 * 8))), ints(255));
}

Ints bits_of(Ints word, int64_t shift, int32_t mask) {
  return bit_and(shift_right(word, ints(static_cast<int32_t>(shift))), ints(mask));
}

// 16 bytes of scales, then d and, if there is one, dmin.
void join_scales(Quants* q, const uint8_t* scales, F16 d, F16 dmin = {}) {
  Bytes16 last = {};
  const F16 both[] = {d, dmin};
  __builtin_memcpy(&last, both, sizeof(both));
  join(q, load_16(scales), last);
}

struct Int8Q2_K : Int8Type<BlockQ2_K, 256, 16, true> {
  static void quants(Quants* q, const Block& b, int64_t i) {
    Bits bits;
    load_bits(&bits, b.qs + i / 128 * 32, i / 32 % 4 * 2, 3);
    *q = (Quants)bits;
  }
  static void packed_scales(Quants* q, const Block& b) { join_scales(q, b.scales, b.d, b.dmin); }
  static Vec d(const Ints* words) { return low_halves(words[4]); }
  static Vec dmin(const Ints* words) { return sub(zero(), high_halves(words[4])); }
  static Ints scale(const Ints* words, int64_t g) { return bit_and(byte_of(words, g), ints(15)); }
  static Ints min(const Ints* words, int64_t g) { return shift_right(byte_of(words, g), ints(4)); }
};

struct Int8Q3_K : Int8Type<BlockQ3_K, 256, 16, false> {
  static void quants(Quants* q, const Block& b, int64_t i) {
    Bits low, third;
    load_bits(&low, b.qs + i / 128 * 32, i / 32 % 4 * 2, 3);
    load_bits(&third, b.hmask, i / 32, 1, 2);
    *q = (Quants)(low | third) - 4;
  }
  // The scales are 12 bytes, of which words[0] is not part.
  static void packed_scales(Quants* q, const Block& b) {
    join_scales(q, reinterpret_cast<const uint8_t*>(&b + 1) - 18, b.d);
  }
  static Vec d(const Ints* words) { return low_halves(words[4]); }
  // The low four bits of scale g are in byte g % 8, the high two in byte 8 + g % 4.
  static Ints scale(const Ints* words, int64_t g) {
    const Ints low = bits_of(byte_of(words + 1, g % 8), g / 8 * 4, 15);
    const Ints high = bits_of(byte_of(words + 1, 8 + g % 4), g / 4 * 2, 3);
    return sub(bit_or(low, shift_left(high, ints(4))), ints(32));
  }
};

// Of Q4_K and Q5_K, whose blocks begin with d, dmin and 12 bytes of scales and mins.
template <class BlockType>
struct ScalesAndMins32 : Int8Type<BlockType, 256, 32, true> {
  static void packed_scales(Quants* q, const BlockType& b) { __builtin_memcpy(q, &b, sizeof(*q)); }
  static Vec d(const Ints* words) { return low_halves(words[0]); }
  static Vec dmin(const Ints* words) { return sub(zero(), high_halves(words[0])); }
  static Ints scale(const Ints* words, int64_t g) { return six_bits(words, g, 0); }
  static Ints min(const Ints* words, int64_t g) { return six_bits(words, g, 1); }

  // Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 mins 0 to 3, in their low six bits. Of scales and
  // mins 4 to 7 the low four bits are in bytes 8 to 11, the high two in the high bits of 0 to 7.
  static Ints six_bits(const Ints* words, int64_t g, int64_t of_mins) {
    const Ints first = byte_of(words + 1, 4 * of_mins + g % 4);
    if (g < 4) return bit_and(first, ints(63));
    const Ints low = bits_of(byte_of(words + 1, 4 + g), 4 * of_mins, 15);
    return bit_or(low, bit_and(shift_right(first, ints(2)), ints(48)));
  }
};

struct Int8Q4_K : ScalesAndMins32<BlockQ4_K> {
  static void quants(Quants* q, const Block& b, int64_t i) {
    Bits bits;
    load_bits(&bits, b.qs + i / 64 * 32, i / 32 % 2 * 4, 15);
    *q = (Quants)bits;
  }
};

struct Int8Q5_K : ScalesAndMins32<BlockQ5_K> {
  static void quants(Quants* q, const Block& b, int64_t i) {
    Bits low, fifth;
    load_bits(&low, b.qs + i / 64 * 32, i / 32 % 2 * 4, 15);
    load_bits(&fifth, b.qh, i / 32, 1, 4);
    *q = (Quants)(low | fifth);
  }
};

struct Int8Q6_K : Int8Type<BlockQ6_K, 256, 16, false> {
  static void quants(Quants* q, const Block& b, int64_t i) {
    const int64_t k = i / 32 % 4;
    Bits low, high;
    load_bits(&low, b.ql + i / 128 * 64 + k % 2 * 32, k / 2 * 4, 15);
    load_bits(&high, b.qh + i / 128 * 32, k * 2, 3, 4);
    *q = (Quants)(low | high) - 32;
  }
  static void packed_scales(Quants* q, const Block& b) {
    join_scales(q, reinterpret_cast<const uint8_t*>(b.scales), b.d);
  }
  static Vec d(const Ints* words) { return low_halves(words[4]); }
  static Ints scale(const Ints* words, int64_t g) {  // of either sign
    return sub(bit_xor(byte_of(words, g), ints(128)), ints(128));
  }
};

struct Int8IQ4_XS : Int8Type<BlockIQ4_XS, 256, 32, false> {
  static void quants(Quants* q, const Block& b, int64_t i) { load_iq4(q, b.qs + i / 2); }
  // d, scales_h and scales_l are the first eight bytes.
  static void packed_scales(Quants* q, const Block& b) { __builtin_memcpy(q, &b, sizeof(*q)); }
  static Vec d(const Ints* words) { return low_halves(words[0]); }
  static Ints scale(const Ints* words, int64_t g) {
    const Ints high = bits_of(words[0], 16 + 2 * g, 3);
    return sub(bit_or(bits_of(words[1], 4 * g, 15), shift_left(high, ints(4))), ints(32));
  }
};

}  // namespace
}  // namespace h2o

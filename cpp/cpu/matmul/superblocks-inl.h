// Readers of the blocks of 256 elements; see cpu/matmul/blocks-inl.h.
#pragma once

#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

// In group(g), g counts elements and is a multiple of 32.
template <class Reader, class Block>
using Superblock = Blocks<Reader, Block, 256>;

constexpr int64_t kScales = 16;  // per block: 16, or 8 scales and 8 mins

// The 16 bytes of kScales in groups of four: scales are packed so that four unpack at a time. One
// vector, because a load that spans several stores waits for them.
typedef uint32_t Words __attribute__((vector_size(kScales)));

// y[i] = d * (byte i - offset)
void scale_bytes(float* y, float d, Words bytes, int32_t offset) {
  const auto* p = reinterpret_cast<const uint8_t*>(&bytes);
  for (int64_t i = 0; i < kScales; i += kWidth) {
    store(y + i, mul(broadcast(d), to_float(sub(load_bytes(p + i), ints(offset)))));
  }
}

// Returns (byte >> shift) & mask of each byte.
Ints bits(const uint8_t* p, Ints shift, int32_t mask) {
  return bit_and(shift_right(load_bytes(p), shift), ints(mask));
}

struct Q2_K : Superblock<Q2_K, BlockQ2_K> {
  struct Group {
    const uint8_t* qs;
    Ints shift;
    Vec scales[2], mins[2];  // of 16 elements

    Vec at(int64_t l) const {
      return fma(scales[l / 16], to_float(bits(qs + l, shift, 3)), mins[l / 16]);
    }
  };

  const uint8_t* qs;
  float scales[kScales];
  float mins[kScales];  // negated

  explicit Q2_K(const BlockQ2_K& b) : qs(b.qs) {
    const Vec d = broadcast(to_float(b.d));
    const Vec dmin = broadcast(-to_float(b.dmin));
    for (int64_t i = 0; i < kScales; i += kWidth) {
      store(scales + i, mul(d, to_float(bits(b.scales + i, ints(0), 15))));
      store(mins + i, mul(dmin, to_float(bits(b.scales + i, ints(4), 15))));
    }
  }
  Group group(int64_t g) const {
    return {qs + g / 128 * 32,
            ints(static_cast<int32_t>(g / 32 % 4 * 2)),
            {broadcast(scales[g / 16]), broadcast(scales[g / 16 + 1])},
            {broadcast(mins[g / 16]), broadcast(mins[g / 16 + 1])}};
  }
};

struct Q3_K : Superblock<Q3_K, BlockQ3_K> {
  struct Group {
    const uint8_t *qs, *hmask;
    Ints shift, bit;
    Vec scales[2];  // of 16 elements

    Vec at(int64_t l) const {
      const Ints third = shift_left(bits(hmask + l, bit, 1), ints(2));
      const Ints q = sub(bit_or(bits(qs + l, shift, 3), third), ints(4));
      return mul(scales[l / 16], to_float(q));
    }
  };

  const uint8_t *qs, *hmask;
  float scales[kScales];

  explicit Q3_K(const BlockQ3_K& b) : qs(b.qs), hmask(b.hmask) {
    // Scale i: its low four bits are in byte i % 8, its high two in byte 8 + i % 4.
    const uint32_t low0 = load_word(b.scales);
    const uint32_t low4 = load_word(b.scales + 4);
    const uint32_t high = load_word(b.scales + 8);
    const Words low = Words{low0, low4, low0, low4} >> Words{0, 0, 4, 4} & 0x0f0f0f0f;
    const Words two = Words{high, high, high, high} >> Words{0, 2, 4, 6} & 0x03030303;
    scale_bytes(scales, to_float(b.d), low | two << 4, 32);
  }
  Group group(int64_t g) const {
    const auto i = static_cast<int32_t>(g / 32);
    return {qs + g / 128 * 32,
            hmask,
            ints(i % 4 * 2),
            ints(i),
            {broadcast(scales[g / 16]), broadcast(scales[g / 16 + 1])}};
  }
};

// The scales and mins of Q4_K and Q5_K, by group of 32.
struct ScalesAndMins {
  float scales[kScales];  // 8 scales, then the mins times d (unused)
  float mins[kScales];    // negated, the last 8

  // Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 mins 0 to 3, in their low six bits. Of scales and
  // mins 4 to 7 the low four bits are in bytes 8 to 11, the high two in the high bits of 0 to 7.
  ScalesAndMins(F16 d, F16 dmin, const uint8_t* packed) {
    const uint32_t s = load_word(packed);
    const uint32_t m = load_word(packed + 4);
    const uint32_t low = load_word(packed + 8);
    const Words bytes =
        (Words{s, low, m, low >> 4} & Words{0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f}) |
        (Words{0, s >> 2, 0, m >> 2} & 0x30303030);
    scale_bytes(scales, to_float(d), bytes, 0);
    scale_bytes(mins, -to_float(dmin), bytes, 0);
  }
  Vec scale(int64_t g) const { return broadcast(scales[g / 32]); }
  Vec min(int64_t g) const { return broadcast(mins[8 + g / 32]); }
};

struct Q4_K : Superblock<Q4_K, BlockQ4_K> {
  struct Group {
    const uint8_t* qs;
    Ints shift;
    Vec scale, min;

    Vec at(int64_t l) const { return fma(scale, to_float(bits(qs + l, shift, 15)), min); }
  };

  const uint8_t* qs;
  ScalesAndMins of;

  explicit Q4_K(const BlockQ4_K& b) : qs(b.qs), of(b.d, b.dmin, b.scales) {}
  Group group(int64_t g) const {
    return {qs + g / 64 * 32, ints(static_cast<int32_t>(g / 32 % 2 * 4)), of.scale(g), of.min(g)};
  }
};

struct Q5_K : Superblock<Q5_K, BlockQ5_K> {
  struct Group {
    const uint8_t *qs, *qh;
    Ints shift, bit;
    Vec scale, min;

    Vec at(int64_t l) const {
      const Ints fifth = shift_left(bits(qh + l, bit, 1), ints(4));
      return fma(scale, to_float(bit_or(bits(qs + l, shift, 15), fifth)), min);
    }
  };

  const uint8_t *qs, *qh;
  ScalesAndMins of;

  explicit Q5_K(const BlockQ5_K& b) : qs(b.qs), qh(b.qh), of(b.d, b.dmin, b.scales) {}
  Group group(int64_t g) const {
    const auto i = static_cast<int32_t>(g / 32);
    return {qs + g / 64 * 32, qh, ints(i % 2 * 4), ints(i), of.scale(g), of.min(g)};
  }
};

struct Q6_K : Superblock<Q6_K, BlockQ6_K> {
  struct Group {
    const uint8_t *ql, *qh;
    Ints low, high;
    Vec scales[2];  // of 16 elements

    Vec at(int64_t l) const {
      const Ints above = shift_left(bits(qh + l, high, 3), ints(4));
      const Ints q = sub(bit_or(bits(ql + l, low, 15), above), ints(32));
      return mul(scales[l / 16], to_float(q));
    }
  };

  const uint8_t *ql, *qh;
  float scales[kScales];

  explicit Q6_K(const BlockQ6_K& b) : ql(b.ql), qh(b.qh) {
    for (int64_t i = 0; i < kScales; i += kWidth) {
      store(scales + i, mul(broadcast(to_float(b.d)), load(b.scales + i)));
    }
  }
  Group group(int64_t g) const {
    const auto k = static_cast<int32_t>(g / 32 % 4);
    return {ql + g / 128 * 64 + k % 2 * 32,
            qh + g / 128 * 32,
            ints(k / 2 * 4),
            ints(k * 2),
            {broadcast(scales[g / 16]), broadcast(scales[g / 16 + 1])}};
  }
};

struct IQ4_XS : Superblock<IQ4_XS, BlockIQ4_XS> {
  struct Group {
    const uint8_t* qs;
    Vec scale;

    Vec at(int64_t l) const { return mul(scale, lookup(kIq4Values, nibbles(qs, l))); }
  };

  const BlockIQ4_XS& b;
  float d;

  explicit IQ4_XS(const BlockIQ4_XS& block) : b(block), d(to_float(block.d)) {}
  Group group(int64_t g) const {
    const int64_t i = g / 32;
    const int32_t scale = (b.scales_l[i / 2] >> i % 2 * 4 & 15) | (b.scales_h >> i * 2 & 3) << 4;
    return {b.qs + g / 2, broadcast(d * static_cast<float>(scale - 32))};
  }
};

}  // namespace
}  // namespace h2o

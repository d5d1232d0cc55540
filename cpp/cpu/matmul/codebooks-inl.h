// The types whose elements are unpacked one by one: from codebooks (IQ1 to IQ3), from powers of
// three (TQ1_0), and NVFP4. Compiled once per instruction set, under the rules at the top of
// cpu/kernels-inl.h.
//
// They are multiplied in integers as the others are, but unpacked without vectors, and never lie
// side by side. Each type says of a block
//   unpack(q, block, i)    the 32 elements from i, in unsigned bytes, above kOffset
//   scale(block, g)        the scale of group g
// so that an element is scale * (q - kOffset), a product that fits a float exactly.
#pragma once

#include "core/iq_grids.h"
#include "cpu/matmul/int8_blocks-inl.h"

namespace h2o {
namespace {

uint32_t load_half(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, sizeof(half));
  return half;
}
int32_t half_byte(const uint8_t* p, int64_t i) { return p[i / 2] >> i % 2 * 4 & 15; }

constexpr uint64_t kEachByte = 0x0101010101010101;

// Eight magnitudes of at most `zero`, of which those whose bit is set are negative: above zero.
void store_signed(uint8_t* q, uint64_t magnitudes, uint32_t signs, uint64_t zero) {
  // A bit for each byte, in its place; then all of a byte's bits.
  uint64_t mask = signs * kEachByte & 0x8040201008040201;
  mask = (((mask & 0x7f7f7f7f7f7f7f7f) + 0x7f7f7f7f7f7f7f7f) | mask) >> 7 & kEachByte;
  mask *= 255;
  // Neither carries nor borrows, for no byte leaves 0 to 255.
  const uint64_t above = kEachByte * zero + magnitudes;
  const uint64_t below = kEachByte * zero - magnitudes;
  const uint64_t all = (above & ~mask) | (below & mask);
  __builtin_memcpy(q, &all, sizeof(all));
}

// Of seven signs the eighth makes the number of negative ones even.
uint32_t even_signs(uint32_t seven) {
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return seven | (odd & 1) << 7;
}

template <class BlockType, int64_t kElements, int64_t kGroupElements, int kQuantBits, int32_t kZero>
struct UnpackedType : Int8Type<BlockType, kElements, kGroupElements, false, kQuantBits, kZero> {
  static constexpr bool kUnpacked = true;
};

// The quants of a type that is unpacked, for int8_row and int8_matmul.
template <class Type>
struct WithQuants : Type {
  H2O_INLINE static void quants(Quants* q, const BlocksInRows& source, int i) {
    auto* bytes = reinterpret_cast<uint8_t*>(q);
    for (int64_t c = 0; c < kQuantColumns; ++c) {
      const auto* block =
          reinterpret_cast<const typename Type::Block*>(source.columns[c] + source.at);
      Type::unpack(bytes + 32 * c, *block, i);
    }
  }
};

// A reader, as those of cpu/blocks-inl.h.
template <class Type>
struct Unpacked : Blocks<Unpacked<Type>, typename Type::Block, Type::kBlock> {
  struct Group {
    uint8_t q[32];
    Vec scales[2];  // of 16 elements

    Vec at(int64_t l) const {
      return mul(scales[l / 16], to_float(sub(load_bytes(q + l), ints(Type::kOffset))));
    }
  };

  const typename Type::Block& b;

  explicit Unpacked(const typename Type::Block& block) : b(block) {}
  Group group(int64_t g) const {
    Group of;
    Type::unpack(of.q, b, g);
    for (int64_t h = 0; h < 2; ++h) {
      of.scales[h] = broadcast(Type::scale(b, (g + 16 * h) / Type::kGroup));
    }
    return of;
  }
};

// ---- Two bits ----

struct Int8IQ2_XXS : UnpackedType<BlockIQ2_XXS, 256, 32, 7, 43> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    const uint8_t* group = b.qs + i / 4;  // four indices, then signs and scale
    const uint32_t word = load_word(group + 4);
    for (int64_t e = 0; e < 4; ++e) {
      store_signed(q + 8 * e, kIq2XxsGrid[group[e]], even_signs(word >> 7 * e & 127), kOffset);
    }
  }
  static float scale(const Block& b, int64_t g) {
    const auto s = static_cast<float>(load_word(b.qs + 8 * g + 4) >> 28);
    return to_float(b.d) * (2 * s + 1) * 0.125f;
  }
};

struct Int8IQ2_XS : UnpackedType<BlockIQ2_XS, 256, 16, 7, 43> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    for (int64_t e = 0; e < 4; ++e) {
      const uint32_t word = load_half(b.qs + i / 4 + 2 * e);
      store_signed(q + 8 * e, kIq2XsGrid[word & 511], even_signs(word >> 9), kOffset);
    }
  }
  static float scale(const Block& b, int64_t g) {
    const auto s = static_cast<float>(half_byte(b.scales, g));
    return to_float(b.d) * (2 * s + 1) * 0.125f;
  }
};

struct Int8IQ2_S : UnpackedType<BlockIQ2_S, 256, 16, 7, 43> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    for (int64_t e = 0; e < 4; ++e) {
      const uint32_t high = b.qh[i / 32] >> 2 * e & 3;
      const uint32_t index = b.qs[i / 8 + e] | high << 8;
      store_signed(q + 8 * e, kIq2SGrid[index], b.signs[i / 8 + e], kOffset);
    }
  }
  static float scale(const Block& b, int64_t g) {
    const auto s = static_cast<float>(half_byte(b.scales, g));
    return to_float(b.d) * (2 * s + 1) * 0.125f;
  }
};

// ---- Three bits ----

struct Int8IQ3_XXS : UnpackedType<BlockIQ3_XXS, 256, 32, 7, 62> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    const uint32_t word = load_word(b.scales + i / 8);
    for (int64_t e = 0; e < 4; ++e) {
      const uint8_t* two = b.qs + i / 4 + 2 * e;
      const uint64_t grid = kIq3XxsGrid[two[0]] | uint64_t{kIq3XxsGrid[two[1]]} << 32;
      store_signed(q + 8 * e, grid, even_signs(word >> 7 * e & 127), kOffset);
    }
  }
  static float scale(const Block& b, int64_t g) {
    const auto s = static_cast<float>(load_word(b.scales + 4 * g) >> 28);
    return to_float(b.d) * (2 * s + 1) * 0.25f;
  }
};

struct Int8IQ3_S : UnpackedType<BlockIQ3_S, 256, 32, 5, 15> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    const auto entry = [&](int64_t e) {
      const uint32_t high = b.qh[i / 32] >> e & 1;
      return kIq3SGrid[b.qs[i / 4 + e] | high << 8];
    };
    for (int64_t e = 0; e < 4; ++e) {
      const uint64_t grid = entry(2 * e) | uint64_t{entry(2 * e + 1)} << 32;
      store_signed(q + 8 * e, grid, b.signs[i / 8 + e], kOffset);
    }
  }
  static float scale(const Block& b, int64_t g) {
    return to_float(b.d) * static_cast<float>(2 * half_byte(b.scales, g) + 1);
  }
};

// ---- One bit: g + delta, where delta is an eighth of either sign, in eighths ----

void store_eighths(uint8_t* q, uint32_t index, bool negative) {
  const uint64_t grid = kIq1Grid[index];
  const uint64_t all = negative ? grid - kEachByte : grid + kEachByte;
  __builtin_memcpy(q, &all, sizeof(all));
}

struct Int8IQ1_S : UnpackedType<BlockIQ1_S, 256, 32, 5, 9> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    const uint32_t qh = load_half(b.qh + i / 16);
    for (int64_t e = 0; e < 4; ++e) {
      const uint32_t index = b.qs[i / 8 + e] | (qh >> 3 * e & 7) << 8;
      store_eighths(q + 8 * e, index, (qh & 0x8000) != 0);
    }
  }
  static float scale(const Block& b, int64_t g) {
    const uint32_t s = load_half(b.qh + 2 * g) >> 12 & 7;
    return to_float(b.d) * static_cast<float>(2 * s + 1) * 0.125f;
  }
};

struct Int8IQ1_M : UnpackedType<BlockIQ1_M, 256, 16, 5, 9> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    for (int64_t e = 0; e < 4; ++e) {
      const auto high = static_cast<uint32_t>(half_byte(b.qh, i / 8 + e));
      store_eighths(q + 8 * e, b.qs[i / 8 + e] | (high & 7) << 8, (high & 8) != 0);
    }
  }
  // The high four bits of the words of scales, together, are the f16 of the block.
  static float scale(const Block& b, int64_t g) {
    uint32_t d = 0;
    for (int64_t i = 0; i < 4; ++i) d |= load_half(b.scales + 2 * i) >> 12 << 4 * i;
    const uint32_t s = load_half(b.scales + g / 4 * 2) >> 3 * (g % 4) & 7;
    return to_float(F16{static_cast<uint16_t>(d)}) * static_cast<float>(2 * s + 1) * 0.125f;
  }
};

// ---- Minus one, zero and one ----

struct Int8TQ1_0 : UnpackedType<BlockTQ1_0, 256, 32, 2, 1> {
  // Five digits to the base of three in a byte, as a fraction: 32 bytes have the first 160
  // elements, 16 the next 80, and four, with four digits each, the last 16.
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
    for (int64_t e = i; e < i + 32; ++e) {
      const int64_t second = e - 160, last = e - 240;
      const uint8_t byte = last >= 0     ? b.qh[last % 4]
                           : second >= 0 ? b.qs[32 + second % 16]
                                         : b.qs[e % 32];
      const int64_t digit = last >= 0 ? last / 4 : second >= 0 ? second / 16 : e / 32;
      *q++ = static_cast<uint8_t>(static_cast<uint8_t>(byte * kPowers[digit]) * 3 >> 8);
    }
  }
  static float scale(const Block& b, int64_t) { return to_float(b.d); }
};

struct Int8TQ2_0 : UnpackedType<BlockTQ2_0, 256, 32, 2, 1> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    const uint8_t* from = b.qs + i / 128 * 32;
    for (int64_t e = 0; e < 32; ++e) q[e] = from[e] >> i / 32 % 4 * 2 & 3;
  }
  static float scale(const Block& b, int64_t) { return to_float(b.d); }
};

// ---- NVFP4 ----

struct Int8NVFP4 : UnpackedType<BlockNVFP4, 64, 16, 5, 12> {
  static void unpack(uint8_t* q, const Block& b, int64_t i) {
    for (int64_t e = 0; e < 32; e += 16) {
      const uint8_t* from = b.qs + (i + e) / 2;
      for (int64_t j = 0; j < 8; ++j) {
        q[e + j] = static_cast<uint8_t>(kMxfp4Quants[from[j] & 15]);
        q[e + 8 + j] = static_cast<uint8_t>(kMxfp4Quants[from[j] >> 4]);
      }
    }
  }
  // Four bits of exponent, three of fraction, no sign; halved, for the values are doubled.
  static float scale(const Block& b, int64_t g) {
    const uint8_t bits = b.d[g];
    if (bits == 0x7f) return 0;
    const int32_t exponent = bits >> 3 & 15;
    const auto fraction = static_cast<float>(bits & 7);
    const auto power = static_cast<float>(1 << exponent);
    return exponent == 0 ? fraction * 0x1p-10f : (8 + fraction) * power * 0x1p-11f;
  }
};

}  // namespace
}  // namespace h2o

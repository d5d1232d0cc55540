// Interleaved columns (cpu/matmul/interleave.h) of types that are slower to unpack than to read,
// compiled once per instruction set (see cpu/kernels-inl.h).
//
// Their blocks are expanded when a model is loaded: codebook entries with at most 16 distinct
// elements to 4-bit indices, TQ1_0 to the two bits of TQ2_0, and NVFP4's scales to f16. Elements
// and scales are those of the file, so results are bit-identical.
#pragma once

#include "cpu/matmul/codebooks-inl.h"
#include "cpu/matmul/int8_interleaved-inl.h"

namespace h2o {
namespace {

template <class From>
struct InterleavedCodebook
    : Int8Type<BlockNibbles<From::kGroup>, 256, From::kGroup, false, From::kBits, From::kOffset> {
  using Block = BlockNibbles<From::kGroup>;
  using Values = typename From::Values;

  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    source.nibbles(q, offsetof(Block, qs) + i / 2);
    lookup_quants(q, Values::kQuants);
  }
  template <class Source>
  static Vec d(const Source& s) {
    return mul(s.half(offsetof(Block, d)), broadcast(Values::kStep));
  }
  template <class Source>
  static Ints scale(const Source& s, int64_t g) {
    const Ints half = bits_of(s.word(offsetof(Block, scales) + g / 8 * 4), g % 8 * 4, 15);
    return add(shift_left(half, ints(1)), ints(1));
  }

  // Scales of a single block.
  static float factor(const Block& b) { return to_float(b.d); }
  static float step(const Block& b, int64_t g) {
    return static_cast<float>(2 * half_byte(b.scales, g) + 1) * Values::kStep;
  }
};

struct InterleavedNVFP4 : Int8Type<BlockNvfp4Halves, 64, 16, false, 5, 12> {
  template <class Source>
  H2O_INLINE static void quants(Quants* q, const Source& source, int i) {
    source.nibbles(q, offsetof(Block, qs) + i / 2);
    lookup_quants(q, kMxfp4Quants);
  }

  static float factor(const Block&) { return 1; }
  static float step(const Block& b, int64_t g) { return to_float(b.d[g]); }
};

// ---- One block of the file ----

// The q's of 32 elements from i.
template <class Type>
struct BlockQuants {
  Quants all;  // all columns are equal

  BlockQuants(const std::byte* block, int i) { Type::quants(&all, BlocksInRows{{block, 0}, 0}, i); }
  int operator[](int e) const { return reinterpret_cast<const uint8_t*>(&all)[e]; }
};

template <class From>
void unpack_codebook(std::byte* to, const std::byte* block) {
  const auto& b = *reinterpret_cast<const typename From::Block*>(block);
  BlockNibbles<From::kGroup> nibbles;
  for (int64_t g = 0; g < 256 / From::kGroup; g += 2) {
    nibbles.scales[g / 2] = static_cast<uint8_t>(From::scale(b, g) | From::scale(b, g + 1) << 4);
  }
  for (int i = 0; i < 256; i += 32) {
    const BlockQuants<From> q(block, i);
    constexpr int kShift = From::Values::kShift;
    // Unrolled, every byte would be extracted from a register, which is ten times as slow.
#pragma GCC unroll 1
    for (int e = 0; e < 16; ++e) {
      nibbles.qs[i / 2 + e] = static_cast<uint8_t>(q[e] >> kShift | q[e + 16] >> kShift << 4);
    }
  }
  nibbles.d = From::d(b);
  __builtin_memcpy(to, &nibbles, sizeof(nibbles));
}

void unpack_tq1_0(std::byte* to, const std::byte* block) {
  BlockTQ2_0 bits = {};
  for (int i = 0; i < 256; i += 32) {
    const BlockQuants<Int8TQ1_0> q(block, i);
    for (int e = 0; e < 32; ++e) {
      bits.qs[i / 128 * 32 + e] |= static_cast<uint8_t>(q[e] << i / 32 % 4 * 2);
    }
  }
  bits.d = reinterpret_cast<const BlockTQ1_0*>(block)->d;
  __builtin_memcpy(to, &bits, sizeof(bits));
}

void unpack_nvfp4(std::byte* to, const std::byte* block) {
  const auto& b = *reinterpret_cast<const BlockNVFP4*>(block);
  BlockNvfp4Halves halves;
  for (int g = 0; g < 4; ++g) halves.d[g] = kNvfp4Scales[b.d[g]];
  for (int i = 0; i < 32; ++i) {
    // 8 bytes of 16 elements become 16 nibbles.
    const uint8_t* from = b.qs + i / 16 * 16 + i % 8;
    const int shift = i / 8 % 2 * 4;
    halves.qs[i] = static_cast<uint8_t>((from[0] >> shift & 15) | (from[8] >> shift & 15) << 4);
  }
  __builtin_memcpy(to, &halves, sizeof(halves));
}

}  // namespace
}  // namespace h2o

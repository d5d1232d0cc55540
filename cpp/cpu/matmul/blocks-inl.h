// Readers of the element types, compiled once per instruction set (see cpu/kernels-inl.h).
//
// A row is a sequence of blocks of kBlock elements; a block is read in groups of kGroup, kWidth
// elements at a time. Scales are computed once per block and broadcast once per group:
//   Type block = Type::block(row, i);    // the block at element i of the row
//   auto group = block.group(g);         // its elements [g, g + kGroup)
//   Vec values = group.at(l);            // elements [l, l + kWidth) of the group
//
// A value is rounded at most once: d and dmin have 11 bits, a scale and q together 12, so their
// product is exact in a float's 24 bits, and the sum with a min is the same whether fused or not.
#pragma once

#include "core/blocks.h"
#include "cpu/elementwise-inl.h"

#define H2O_INLINE [[gnu::always_inline]] inline

namespace h2o {
namespace {

template <class T>
struct Plain {
  static constexpr int64_t kBlock = kWidth;
  static constexpr int64_t kGroup = kWidth;
  const T* p;

  static Plain block(const std::byte* row, int64_t i) {
    return {reinterpret_cast<const T*>(row) + i};
  }
  const Plain& group(int64_t) const { return *this; }
  Vec at(int64_t) const { return load(p); }
  void prefetch(int64_t bytes_ahead) const {
    __builtin_prefetch(reinterpret_cast<const std::byte*>(p) + bytes_ahead, 0, 2);
  }

  // The n < kWidth elements from i, then zeros. Rows of other types are whole blocks.
  static Vec tail(const std::byte* row, int64_t i, int64_t n) {
    return load_first(reinterpret_cast<const T*>(row) + i, n);
  }
};

// Common base of readers: Reader is constructed from one Block of kSize elements.
template <class Reader, class Block, int64_t kSize>
struct Blocks {
  static constexpr int64_t kBlock = kSize;
  static constexpr int64_t kGroup = 32;

  static Reader block(const std::byte* row, int64_t i) {
    return Reader(reinterpret_cast<const Block*>(row)[i / kSize]);
  }
  void prefetch(int64_t) const {}  // only for the cache, whose rows are contiguous
};

uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return word;
}

// The smallest value is denormal; computed as a product of two normal numbers.
Vec load(const E8M0* p) {
  const Ints exponent = load_bytes(&p->bits);
  const Ints half = shift_right(exponent, ints(1));
  const Vec root = times_power_of_two(broadcast(1), to_float(sub(half, ints(64))));
  return times_power_of_two(root, to_float(sub(sub(exponent, half), ints(64))));
}

// ---- Blocks of 32: one group. ----

template <class Reader, class Block>
struct OneGroup : Blocks<Reader, Block, 32> {
  const Reader& group(int64_t) const { return static_cast<const Reader&>(*this); }
};

// q of 4 bits.
Ints nibbles(const uint8_t* qs, int64_t l) {
  const Ints bytes = load_bytes(qs + l % 16);
  return bit_and(l < 16 ? bytes : shift_right(bytes, ints(4)), ints(15));
}

// q of 5 bits, the fifth in qh.
Ints nibbles(const uint8_t* qs, int64_t l, uint32_t qh) {
  const Ints fifth = shift_right(ints(static_cast<int32_t>(qh >> l << 4)), lanes());
  return bit_or(nibbles(qs, l), bit_and(fifth, ints(16)));
}

struct Q4_0 : OneGroup<Q4_0, BlockQ4_0> {
  const uint8_t* qs;
  Vec d;

  explicit Q4_0(const BlockQ4_0& b) : qs(b.qs), d(broadcast(to_float(b.d))) {}
  Vec at(int64_t l) const { return mul(d, to_float(sub(nibbles(qs, l), ints(8)))); }
};

struct Q4_1 : OneGroup<Q4_1, BlockQ4_1> {
  const uint8_t* qs;
  Vec d, m;

  explicit Q4_1(const BlockQ4_1& b)
      : qs(b.qs), d(broadcast(to_float(b.d))), m(broadcast(to_float(b.m))) {}
  Vec at(int64_t l) const { return fma(d, to_float(nibbles(qs, l)), m); }
};

struct Q5_0 : OneGroup<Q5_0, BlockQ5_0> {
  const uint8_t* qs;
  uint32_t qh;
  Vec d;

  explicit Q5_0(const BlockQ5_0& b) : qs(b.qs), qh(load_word(b.qh)), d(broadcast(to_float(b.d))) {}
  Vec at(int64_t l) const { return mul(d, to_float(sub(nibbles(qs, l, qh), ints(16)))); }
};

struct Q5_1 : OneGroup<Q5_1, BlockQ5_1> {
  const uint8_t* qs;
  uint32_t qh;
  Vec d, m;

  explicit Q5_1(const BlockQ5_1& b)
      : qs(b.qs), qh(load_word(b.qh)), d(broadcast(to_float(b.d))), m(broadcast(to_float(b.m))) {}
  Vec at(int64_t l) const { return fma(d, to_float(nibbles(qs, l, qh)), m); }
};

struct Q8_0 : OneGroup<Q8_0, BlockQ8_0> {
  const int8_t* qs;
  Vec d;

  explicit Q8_0(const BlockQ8_0& b) : qs(b.qs), d(broadcast(to_float(b.d))) {}
  Vec at(int64_t l) const { return mul(d, load(qs + l)); }
};

struct IQ4_NL : OneGroup<IQ4_NL, BlockIQ4_NL> {
  const uint8_t* qs;
  Vec d;

  explicit IQ4_NL(const BlockIQ4_NL& b) : qs(b.qs), d(broadcast(to_float(b.d))) {}
  Vec at(int64_t l) const { return mul(d, lookup(kIq4Values, nibbles(qs, l))); }
};

struct MXFP4 : OneGroup<MXFP4, BlockMXFP4> {
  const uint8_t* qs;
  Vec d;

  explicit MXFP4(const BlockMXFP4& b) : qs(b.qs) {
    E8M0 all[kWidth];
    for (E8M0& one : all) one = b.d;
    d = load(all);
  }
  Vec at(int64_t l) const { return mul(d, lookup(kMxfp4Values, nibbles(qs, l))); }
};

constexpr int64_t kLine = 64;  // bytes of a cache line

// Prefetches the outputs of a row before they are written: the next row's are too far away for
// hardware prefetchers.
template <int64_t kBytes>
H2O_INLINE void prefetch_to_write(const float* to) {
#pragma GCC unroll 4
  for (int64_t at = 0; at < kBytes / 4; at += kLine / 4) __builtin_prefetch(to + at, 1, 3);
}

// Decodes n elements of a row to float.
template <class Type>
void decode(float* y, const std::byte* x, int64_t n) {
  int64_t i = 0;
  for (; i + Type::kBlock <= n; i += Type::kBlock) {
    const Type block = Type::block(x, i);
    for (int64_t g = 0; g < Type::kBlock; g += Type::kGroup) {
      const auto group = block.group(g);
      for (int64_t l = 0; l < Type::kGroup; l += kWidth) store(y + i + g + l, group.at(l));
    }
  }
  if constexpr (Type::kBlock == kWidth) {
    if (i < n) store_first(y + i, Type::tail(x, i, n - i), n - i);
  }
}

}  // namespace
}  // namespace h2o

// The types that only an archive has: values in q2 and keys in q3 (see core/blocks.h), compiled
// once per instruction set (see cpu/kernels-inl.h).
#pragma once

#include "core/e5m3.h"
#include "cpu/matmul/blocks-inl.h"

namespace h2o {
namespace {

// q of 2 bits.
Ints pairs(const uint8_t* qs, int64_t l) {
  const uint32_t word = load_word(qs + l / 16 * 4) >> (l % 16 * 2);
  return bit_and(shift_right(ints(static_cast<int32_t>(word)), add(lanes(), lanes())), ints(3));
}

// Half a block.
struct Q2 : OneGroup<Q2, BlockQ2> {
  const uint8_t* qs;
  Vec d, zero;

  Q2(const BlockQ2& b, int64_t half)
      : qs(b.qs[half]),
        d(broadcast(to_float(b.d))),
        zero(broadcast(static_cast<float>(b.zero) / 64)) {}
  static Q2 block(const std::byte* row, int64_t i) {
    return {reinterpret_cast<const BlockQ2*>(row)[i / 64], i / 32 % 2};
  }
  Vec at(int64_t l) const { return mul(d, sub(to_float(pairs(qs, l)), zero)); }
};

struct Q3 : OneGroup<Q3, BlockQ3> {
  const uint8_t* qs;
  uint32_t qh;

  explicit Q3(const BlockQ3& b) : qs(b.qs), qh(load_word(b.qh)) {}
  Vec at(int64_t l) const {
    const Ints third = shift_right(ints(static_cast<int32_t>(qh >> l)), lanes());
    return to_float(bit_or(pairs(qs, l), shift_left(bit_and(third, ints(1)), ints(2))));
  }
};

// q is 0 for NaN.
void encode_q2(std::byte* y, const float* x, int64_t n) {
  BlockQ2* out = reinterpret_cast<BlockQ2*>(y);
  for (int64_t b = 0; b < n / 64; ++b, x += 64) {
    float smallest = 0, largest = 0;
    for (int64_t i = 0; i < 64; ++i) {
      smallest = x[i] < smallest ? x[i] : smallest;
      largest = x[i] > largest ? x[i] : largest;
    }
    out[b].d = rounded_up((largest - smallest) / 3);
    const float d = to_float(out[b].d);
    const float zero = -64 * smallest / d + 0.5f;
    out[b].zero = static_cast<uint8_t>(zero < 255 ? zero : 255);
    const float shift = static_cast<float>(out[b].zero) / 64 + 0.5f;
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < 64; ++i) {
      const float code = x[i] / d + shift;
      const auto q = static_cast<uint32_t>(code > 0 ? (code < 3 ? code : 3) : 0);
      words[i / 16] |= q << (i % 16 * 2);
    }
    __builtin_memcpy(out[b].qs, words, sizeof(words));
  }
}

// x is in units of codes (see KeyGrid); NaN: 0.
void encode_q3(std::byte* y, const float* x, int64_t n) {
  BlockQ3* out = reinterpret_cast<BlockQ3*>(y);
  for (int64_t b = 0; b < n / 32; ++b, x += 32) {
    uint32_t words[2] = {}, thirds = 0;
    for (uint32_t i = 0; i < 32; ++i) {
      const float code = x[i] + 0.5f;
      const auto q = static_cast<uint32_t>(code > 0 ? (code < 7 ? code : 7) : 0);
      words[i / 16] |= (q & 3) << (i % 16 * 2);
      thirds |= q >> 2 << i;
    }
    __builtin_memcpy(out[b].qs, words, sizeof(words));
    __builtin_memcpy(out[b].qh, &thirds, sizeof(thirds));
  }
}

}  // namespace
}  // namespace h2o

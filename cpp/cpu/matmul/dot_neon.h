// Dot products with instructions of every AArch64 CPU.
#pragma once

#include "cpu/simd/vec_neon.h"

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no 16-bit sums

// A product fits in 16 bits: it is at most 128 * 127. Pairs are summed in 32 bits.
Ints dot(Ints sums, Ints w, Ints x) {
  const int8x16_t a = vreinterpretq_s8_s32(w.v), b = vreinterpretq_s8_s32(x.v);
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
  return {vaddq_s32(sums.v, vpaddq_s32(low, high))};
}

// Unsigned bytes are below 128 here, so signed products are the same.
int32_t signed_start(int32_t) { return 0; }
Ints signed_dot(Ints sums, Ints w, Ints x) { return dot(sums, w, x); }

}  // namespace
}  // namespace h2o

// Dot products with the Arm v8.2 instruction.
#pragma once

#include "cpu/simd/vec_neon.h"

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no 16-bit sums

Ints dot(Ints sums, Ints w, Ints x) {
  return {vdotq_s32(sums.v, vreinterpretq_s8_s32(w.v), vreinterpretq_s8_s32(x.v))};
}

// Unsigned bytes are below 128 here, so signed products are the same.
int32_t signed_start(int32_t) { return 0; }
Ints signed_dot(Ints sums, Ints w, Ints x) { return dot(sums, w, x); }

}  // namespace
}  // namespace h2o

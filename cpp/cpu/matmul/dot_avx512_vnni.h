// Dot products with the AVX-512 VNNI instruction.
#pragma once

#include "cpu/simd/vec_avx512.h"

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no 16-bit sums

Ints dot(Ints sums, Ints w, Ints x) { return {_mm512_dpbusd_epi32(sums.v, w.v, x.v)}; }

// vpdpbusd multiplies unsigned by signed bytes: use w + 128, which is unsigned, and subtract 128
// times the sum of x.
int32_t signed_start(int32_t sum_of_x) { return -128 * sum_of_x; }
Ints signed_dot(Ints sums, Ints w, Ints x) {
  return dot(sums, {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}, x);
}

}  // namespace
}  // namespace h2o

// The dot products by the instruction that is made for them, of AVX-512 VNNI.
#pragma once

#include "cpu/simd/vec_avx512.h"

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no sums of 16 bits

Ints dot(Ints sums, Ints w, Ints x) { return {_mm512_dpbusd_epi32(sums.v, w.v, x.v)}; }

// vpdpbusd multiplies unsigned by signed bytes: w + 128 is unsigned, and 128 times the sum of x is
// taken off.
int32_t signed_start(int32_t sum_of_x) { return -128 * sum_of_x; }
Ints signed_dot(Ints sums, Ints w, Ints x) {
  return dot(sums, {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}, x);
}

}  // namespace
}  // namespace h2o

// Dot products with the instruction of AVX-VNNI.
#pragma once

#include "cpu/simd/vec_avx2.h"

namespace h2o {
namespace {

constexpr int kLargestPair = 0;  // no 16-bit sums

Ints dot(Ints sums, Ints w, Ints x) { return {_mm256_dpbusd_avx_epi32(sums.v, w.v, x.v)}; }

// As for AVX-512 VNNI: w + 128 is unsigned, and 128 times the sum of x is subtracted.
int32_t signed_start(int32_t sum_of_x) { return -128 * sum_of_x; }
Ints signed_dot(Ints sums, Ints w, Ints x) {
  return dot(sums, {_mm256_xor_si256(w.v, _mm256_set1_epi8(-128))}, x);
}

}  // namespace
}  // namespace h2o

// Dot products with the instructions of x86-64-v3.
#pragma once

#include "cpu/simd/vec_avx2.h"

namespace h2o {
namespace {

// maddubs multiplies unsigned by signed bytes; its 16-bit sums hold two products with w up to 128.
Ints dot(Ints sums, Ints w, Ints x) {
  const __m256i pairs = _mm256_maddubs_epi16(w.v, x.v);
  return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}

// The largest pair sum of maddubs; used to add several pair sums in 16 bits where they fit.
constexpr int kLargestPair = 0x7fff;
template <int kN>
[[gnu::always_inline]] inline Ints dot_quads(Ints sums, const Ints (&w)[kN], const Ints (&x)[kN]) {
  __m256i pairs = _mm256_maddubs_epi16(w[0].v, x[0].v);
#pragma GCC unroll 8
  for (int i = 1; i < kN; ++i) {
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[i].v, x[i].v));
  }
  return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}

// The sign of w is transferred to x.
int32_t signed_start(int32_t) { return 0; }
Ints signed_dot(Ints sums, Ints w, Ints x) {
  return dot(sums, {_mm256_abs_epi8(w.v)}, {_mm256_sign_epi8(x.v, w.v)});
}

}  // namespace
}  // namespace h2o

// dot() by the instruction that is made for it, of AVX-512 VNNI.
#pragma once

#include "cpu/vec_avx512.h"

namespace h2o {
namespace {

// vpdpbusd multiplies unsigned by signed bytes: w + 128 is unsigned, and 128 times the sum of x is
// taken off beforehand.
Ints dot_start(int32_t sum_of_x) { return ints(-128 * sum_of_x); }
Ints dot(Ints sums, Ints w, Ints x) {
  const __m512i biased = _mm512_xor_si512(w.v, _mm512_set1_epi8(-128));
  return {_mm512_dpbusd_epi32(sums.v, biased, x.v)};
}

}  // namespace
}  // namespace h2o

// dot() by the instructions of x86-64-v4.
#pragma once

#include "cpu/vec_avx512.h"

namespace h2o {
namespace {

Ints dot_start(int32_t) { return ints(0); }

// maddubs multiplies unsigned by signed bytes: the sign of w goes to x. Two products are at most
// 2 * 128 * 127, which its 16 bits hold.
Ints dot(Ints sums, Ints w, Ints x) {
  const __m512i signed_x =
      _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(w.v), _mm512_setzero_si512(), x.v);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.v), signed_x);
  return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}

}  // namespace
}  // namespace h2o

// Pairs of bf16 with AVX-512 BF16 instructions, which round to nearest even and flush denormals to
// zero.
#pragma once

#include "cpu/simd/vec_avx512.h"

namespace h2o {
namespace {

// Elements per register; rows are zero-padded to a multiple.
constexpr int64_t kPairWidth = 32;

struct Pairs {
  __m512bh v;
};

Pairs load_pairs(const BF16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
Pairs load_pairs(const F16* p) { return {_mm512_cvtne2ps_pbh(load(p + 16).v, load(p).v)}; }
Pairs load_pairs(const float* p) { return {_mm512_cvtne2ps_pbh(load(p + 16).v, load(p).v)}; }
void store_pairs(BF16* p, Pairs a) { _mm512_storeu_si512(p, (__m512i)a.v); }

// Loads n < kPairWidth numbers, then zeros.
template <class T>
Pairs load_first_pairs(const T* p, int64_t n) {
  T padded[kPairWidth] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return load_pairs(padded);
}

constexpr int64_t padded_to(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace
}  // namespace h2o

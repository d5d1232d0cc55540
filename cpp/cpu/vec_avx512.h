// Vec for x86-64-v4: AVX-512 F, BW, CD, DQ, VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/blocks.h"

namespace h2o {
namespace {

// What the registers hold in a matmul: rows times columns, or vectors of columns, of sums.
constexpr int kTileRows = 6;
constexpr int kTileColumns = 4;

constexpr int64_t kWidth = 16;

struct Vec {
  __m512 v;
};

float to_float(F16 h) { return _cvtsh_ss(h.bits); }

Vec zero() { return {_mm512_setzero_ps()}; }
Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
Vec load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
Vec load(const BF16* p) {
  const __m512i bits =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
}
Vec load(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
void store_f16(F16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b where one is NaN.
Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
Vec times_power_of_two(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
float maximum(Vec a) { return _mm512_reduce_max_ps(a.v); }

struct Ints {
  __m512i v;
};

Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
Ints lanes() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
Ints load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
Ints bit_and(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
Ints bit_or(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
Ints bit_xor(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
Ints shift_left(Ints a, Ints n) { return {_mm512_sllv_epi32(a.v, n.v)}; }
Ints shift_right(Ints a, Ints n) { return {_mm512_srlv_epi32(a.v, n.v)}; }
Vec to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
Vec lookup(const int8_t* table, Ints i) { return {_mm512_permutexvar_ps(i.v, load(table).v)}; }

// The f16 in the low and the high bits of the lanes.
Vec low_halves(Ints a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
Vec high_halves(Ints a) { return low_halves(shift_right(a, ints(16))); }

// ---- Four signed bytes in a lane; dot() is in dot_avx512*.h ----

constexpr int kTileVectors = 2;

Ints load_quads(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
Ints broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return ints(quad);
}

void store_bytes(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// kWidth times 8 quads to 8 times kWidth, `stride` bytes apart. The first 8 are in the lower halves
// of the vectors, the others in the upper.
[[gnu::always_inline]] inline void transpose_quads(int8_t* to, int64_t stride, const Quants* q) {
  __m512i a[8], b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)q[i]), (__m256i)q[i + 8], 1);
  }
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // in each half: quads 0, 1, 2, 3 of four rows, then 4, 5, 6, 7
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(to + i * stride, _mm512_permutex2var_epi64(a[i], low, a[i + 4]));
    _mm512_storeu_si512(to + (i + 4) * stride, _mm512_permutex2var_epi64(a[i], high, a[i + 4]));
  }
}

}  // namespace
}  // namespace h2o

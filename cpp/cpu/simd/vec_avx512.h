// Vec for x86-64-v4: AVX-512 F, BW, CD, DQ, VL.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "cpu/matmul/columns.h"

namespace h2o {
namespace {

// Size of a matmul tile in registers: rows times columns, or vectors of columns.
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

// The first n < kWidth elements, then zeros.
__mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
Vec load_first(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
Vec load_first(const F16* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
Vec load_first(const BF16* p, int64_t n) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
}
void store_first(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

// Elements 0, 2, 4, ... and 1, 3, 5, ... of 2 kWidth.
void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const __m512i evens =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + kWidth);
  even.v = _mm512_permutex2var_ps(a, evens, b);
  odd.v = _mm512_permutex2var_ps(a, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), b);
}
void store_even_odd(float* p, Vec even, Vec odd) {
  const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, lower, odd.v));
  _mm512_storeu_ps(p + kWidth, _mm512_permutex2var_ps(even.v, upper, odd.v));
}

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

// p[0], ..., p[3] = sum(a), ..., sum(d), each added in the same order.
void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const auto halves = [](Vec x, Vec y) {  // of both, added
    return _mm512_add_ps(_mm512_shuffle_f32x4(x.v, y.v, 0x44),
                         _mm512_shuffle_f32x4(x.v, y.v, 0xee));
  };
  const __m512 ab = halves(a, b), cd = halves(c, d);
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
  _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(
                       _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), s)));
}

// Lanes in the order of store_sums(): it adds pairs of them, then pairs of these, and so on.
constexpr int8_t kLaneOrder[] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// Rows to columns.
[[gnu::always_inline]] inline void transpose(Vec (&a)[kWidth]) {
  __m512 b[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i].v, a[i + 1].v);
    b[i + 1] = _mm512_unpackhi_ps(a[i].v, a[i + 1].v);
  }
  const auto low = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0x44); };
  const auto high = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0xee); };
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    a[i].v = low(b[i], b[i + 2]);
    a[i + 1].v = high(b[i], b[i + 2]);
    a[i + 2].v = low(b[i + 1], b[i + 3]);
    a[i + 3].v = high(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // quarters of vectors i, i + 4, i + 8, i + 12
    const __m512 even = _mm512_shuffle_f32x4(a[i].v, a[i + 4].v, 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(a[i].v, a[i + 4].v, 0xdd);
    const __m512 even_last = _mm512_shuffle_f32x4(a[i + 8].v, a[i + 12].v, 0x88);
    const __m512 odd_last = _mm512_shuffle_f32x4(a[i + 8].v, a[i + 12].v, 0xdd);
    b[i] = _mm512_shuffle_f32x4(even, even_last, 0x88);
    b[i + 4] = _mm512_shuffle_f32x4(odd, odd_last, 0x88);
    b[i + 8] = _mm512_shuffle_f32x4(even, even_last, 0xdd);
    b[i + 12] = _mm512_shuffle_f32x4(odd, odd_last, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i].v = b[i];
}

struct Ints {
  __m512i v;
};

Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
Ints lanes() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
Ints load_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
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

// ---- Four bytes in a lane; the dot products are in dot_avx512*.h ----

constexpr int kTileVectors = 2;

constexpr int kQuantColumns = 2;
typedef int8_t Quants __attribute__((vector_size(64)));

[[gnu::always_inline]] inline void load_quants(Quants* q, const Columns& columns, int64_t at) {
  const auto half = [&](int i) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns[i] + at));
  };
  *q = (Quants)_mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1);
}
[[gnu::always_inline]] inline void load_quants_twice(Quants* q, const Columns& columns,
                                                     int64_t at) {
  const auto quarter = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns[i] + at));
  };
  *q = (Quants)_mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(quarter(0)), 0xff00, quarter(1));
}
[[gnu::always_inline]] inline void lookup_quants(Quants* q, const int8_t* table) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  *q = (Quants)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), (__m512i)*q);
}

Ints repeat_quads(const int8_t* p, int64_t) {
  return {_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

Ints load_quads(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
Ints broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return ints(quad);
}

void store_bytes(int8_t* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// The columns are in order: lanes 0 to 7 are in the lower halves of the vectors.
__m512i lower_quarters() { return _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13); }
__m512i upper_quarters() { return _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15); }

[[gnu::always_inline]] inline void transpose_quads(int8_t* to, int64_t stride, const Quants* q) {
  __m512i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = (__m512i)q[i];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {  // in each half: quads 0, 1, 2, 3 of four rows, then 4, 5, 6, 7
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    const __m512i lower = _mm512_permutex2var_epi64(a[i], lower_quarters(), a[i + 4]);
    const __m512i upper = _mm512_permutex2var_epi64(a[i], upper_quarters(), a[i + 4]);
    _mm512_storeu_si512(to + i * stride, lower);
    _mm512_storeu_si512(to + (i + 4) * stride, upper);
  }
}

// The sums of neighbors, per quarter of the vectors: two of a, then two of b. kLargest: the
// largest possible magnitude.
template <int kLargest>
[[gnu::always_inline]] inline __m512i add_neighbors(__m512i a, __m512i b) {
  if constexpr (kLargest <= 0x7fff) {
    return _mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1));
  } else {
    const __m512 x = _mm512_castsi512_ps(a);
    const __m512 y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  }
}

template <int kLargest>
[[gnu::always_inline]] inline void sum_quads(Ints* sums, const Ints* products) {
  __m512i a[4], b[2];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    a[i] = add_neighbors<kLargest>(products[2 * i].v, products[2 * i + 1].v);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {  // in each quarter of a vector: four columns
    b[i] = add_neighbors<2 * kLargest>(a[2 * i], a[2 * i + 1]);
  }
  sums[0].v = _mm512_permutex2var_epi64(b[0], lower_quarters(), b[1]);
  sums[1].v = _mm512_permutex2var_epi64(b[0], upper_quarters(), b[1]);
}

}  // namespace
}  // namespace h2o

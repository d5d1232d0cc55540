// Vec for x86-64-v3: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "cpu/matmul/columns.h"

namespace h2o {
namespace {

// Size of a matmul tile in registers: rows times columns, or vectors of columns.
constexpr int kTileRows = 4;
constexpr int kTileColumns = 3;

constexpr int64_t kWidth = 8;

struct Vec {
  __m256 v;
};

float to_float(F16 h) { return _cvtsh_ss(h.bits); }

Vec zero() { return {_mm256_setzero_ps()}; }
Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
Vec load(const F16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
Vec load(const BF16* p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
}
Vec load(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
// Elements 0, 2, 4, ... and 1, 3, 5, ... of 2 kWidth.
void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + kWidth);
  const __m256 first = _mm256_permute2f128_ps(a, b, 0x20);
  const __m256 second = _mm256_permute2f128_ps(a, b, 0x31);
  // each half of these has the elements of a half of the result, which are in order
  even.v = _mm256_shuffle_ps(first, second, 0x88);
  odd.v = _mm256_shuffle_ps(first, second, 0xdd);
}
void store_even_odd(float* p, Vec even, Vec odd) {
  const __m256 lower = _mm256_unpacklo_ps(even.v, odd.v);
  const __m256 upper = _mm256_unpackhi_ps(even.v, odd.v);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(lower, upper, 0x20));
  _mm256_storeu_ps(p + kWidth, _mm256_permute2f128_ps(lower, upper, 0x31));
}

void store_f16(F16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b where one is NaN.
Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x * 2^n for an integer n in [-126, 127].
Vec times_power_of_two(Vec x, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

// p[0], ..., p[3] = sum(a), ..., sum(d), each added in the same order.
void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const auto halves = [](Vec x, Vec y) {  // of both, added
    return _mm256_add_ps(_mm256_permute2f128_ps(x.v, y.v, 0x20),
                         _mm256_permute2f128_ps(x.v, y.v, 0x31));
  };
  const __m256 ab = halves(a, b), cd = halves(c, d);
  __m256 s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  s = _mm256_add_ps(s, _mm256_movehdup_ps(s));  // a and c in the lower half, b and d in the upper
  const __m128 ac = _mm256_castps256_ps128(s), bd = _mm256_extractf128_ps(s, 1);
  _mm_storeu_ps(p, _mm_unpacklo_ps(_mm_shuffle_ps(ac, ac, 0x88), _mm_shuffle_ps(bd, bd, 0x88)));
}

float maximum(Vec a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// Lanes in the order of store_sums(): it adds pairs of them, then pairs of these, and so on.
constexpr int8_t kLaneOrder[] = {0, 4, 2, 6, 1, 5, 3, 7};

// Rows to columns.
[[gnu::always_inline]] inline void transpose(Vec (&a)[kWidth]) {
  __m256 b[kWidth];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i].v, a[i + 1].v);
    b[i + 1] = _mm256_unpackhi_ps(a[i].v, a[i + 1].v);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    a[i].v = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1].v = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2].v = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3].v = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x20);
    b[i + 4] = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i].v = b[i];
}

struct Ints {
  __m256i v;
};

Ints ints(int32_t x) { return {_mm256_set1_epi32(x)}; }
Ints lanes() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
Ints load_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
Ints bit_and(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
Ints bit_or(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
Ints bit_xor(Ints a, Ints b) { return {_mm256_xor_si256(a.v, b.v)}; }
Ints shift_left(Ints a, Ints n) { return {_mm256_sllv_epi32(a.v, n.v)}; }
Ints shift_right(Ints a, Ints n) { return {_mm256_srlv_epi32(a.v, n.v)}; }
Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }

// The low byte of each lane selects a byte of the table, sign-extended to the lane.
Vec lookup(const int8_t* table, Ints i) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i values = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), i.v);
  return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(values, 24), 24))};
}

// The f16 in the low and the high bits of the lanes.
Vec high_halves(Ints a) {
  const __m256i words = _mm256_srli_epi32(a.v, 16);
  return {_mm256_cvtph_ps(
      _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)))};
}
Vec low_halves(Ints a) { return high_halves(shift_left(a, ints(16))); }

// ---- Four bytes in a lane ----

constexpr int kTileVectors = 2;

constexpr int kQuantColumns = 1;
typedef int8_t Quants __attribute__((vector_size(32)));

[[gnu::always_inline]] inline void load_quants(Quants* q, const Columns& columns, int64_t at) {
  *q = (Quants)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns[0] + at));
}
[[gnu::always_inline]] inline void load_quants_twice(Quants* q, const Columns& columns,
                                                     int64_t at) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns[0] + at));
  *q = (Quants)_mm256_broadcastsi128_si256(half);
}
[[gnu::always_inline]] inline void lookup_quants(Quants* q, const int8_t* table) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  *q = (Quants)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), (__m256i)*q);
}

Ints repeat_quads(const int8_t* p, int64_t) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}

Ints load_quads(const int8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
Ints broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return ints(quad);
}

void store_bytes(int8_t* p, Vec a) {
  const __m256i all = _mm256_cvtps_epi32(a.v);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

[[gnu::always_inline]] inline void transpose_quads(int8_t* to, int64_t stride, const Quants* q) {
  __m256i a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = (__m256i)q[i];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {  // quads 0, 1, 2, 3 of four rows; quads 4, ... in the upper half
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const auto put = [&](int i, __m256i quads) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * stride), quads);
  };
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    put(i, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
    put(i + 4, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
  }
}

// The sums of neighbors, per half of the vectors: two of a, then two of b. kLargest: the largest
// possible magnitude.
template <int kLargest>
[[gnu::always_inline]] inline __m256i add_neighbors(__m256i a, __m256i b) {
  if constexpr (kLargest <= 0x7fff) {
    return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
  } else {
    const __m256 x = _mm256_castsi256_ps(a);
    const __m256 y = _mm256_castsi256_ps(b);
    return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
  }
}

template <int kLargest>
[[gnu::always_inline]] inline void sum_quads(Ints* sums, const Ints* products) {
  __m256i a[4], b[2];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    a[i] = add_neighbors<kLargest>(products[2 * i].v, products[2 * i + 1].v);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) {  // in each half of a vector: four columns
    b[i] = add_neighbors<2 * kLargest>(a[2 * i], a[2 * i + 1]);
  }
  sums[0].v = _mm256_permute2x128_si256(b[0], b[1], 0x20);
  sums[1].v = _mm256_permute2x128_si256(b[0], b[1], 0x31);
}

}  // namespace
}  // namespace h2o

// After the vector type it is written against:
#include "cpu/simd/first-inl.h"

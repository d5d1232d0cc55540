// Vec for any CPU: one float. The reference for the other instruction sets' tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "cpu/matmul/columns.h"

namespace h2o {
namespace {

// Size of a matmul tile in registers: rows times columns, or vectors of columns.
constexpr int kTileRows = 4;
constexpr int kTileColumns = 2;

constexpr int64_t kWidth = 1;

struct Vec {
  float v;
};

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

float to_float(F16 h) {
  const uint32_t sign = uint32_t{h.bits & 0x8000u} << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  if (magnitude < 0x0400) {  // zero or denormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
  }
  // infinity remains infinity
  const uint32_t rebias = magnitude < 0x7c00 ? 0x38000000u : 0x70000000u;
  return bit_cast<float>(((magnitude << 13) + rebias) | sign);
}

F16 to_f16(float x) {  // round to nearest even
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x03ff);  // NaN, made quiet
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // rounds above the largest f16
  } else if (magnitude < 0x38800000) {
    // Denormal: adding 0.5 puts the value, in units of 2^-24 and rounded, into the low bits.
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0x0fff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

Vec zero() { return {0.0f}; }
Vec broadcast(float x) { return {x}; }
Vec load(const float* p) { return {*p}; }
Vec load(const F16* p) { return {to_float(*p)}; }
Vec load(const BF16* p) { return {bit_cast<float>(uint32_t{p->bits} << 16)}; }
Vec load(const int8_t* p) { return {static_cast<float>(*p)}; }
void store(float* p, Vec a) { *p = a.v; }
// Elements 0 and 1.
void load_even_odd(const float* p, Vec& even, Vec& odd) { even.v = p[0], odd.v = p[1]; }
void store_even_odd(float* p, Vec even, Vec odd) { p[0] = even.v, p[1] = odd.v; }

void store_f16(F16* p, Vec a) { *p = to_f16(a.v); }

Vec add(Vec a, Vec b) { return {a.v + b.v}; }
Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
Vec div(Vec a, Vec b) { return {a.v / b.v}; }
Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
// min and max return b where one is NaN.
Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
Vec round(Vec a) { return {__builtin_rintf(a.v)}; }

// x * 2^n for an integer n in [-126, 127].
Vec times_power_of_two(Vec x, Vec n) {
  return {x.v * bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v) + 127) << 23)};
}

float sum(Vec a) { return a.v; }
float maximum(Vec a) { return a.v; }
void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  p[0] = a.v, p[1] = b.v, p[2] = c.v, p[3] = d.v;
}

constexpr int8_t kLaneOrder[] = {0};
inline void transpose(Vec (&)[kWidth]) {}

struct Ints {
  int32_t v;
};

Ints ints(int32_t x) { return {x}; }
Ints lanes() { return {0}; }
Ints load_bytes(const uint8_t* p) { return {*p}; }
Ints add(Ints a, Ints b) { return {a.v + b.v}; }
Ints sub(Ints a, Ints b) { return {a.v - b.v}; }
Ints bit_and(Ints a, Ints b) { return {a.v & b.v}; }
Ints bit_or(Ints a, Ints b) { return {a.v | b.v}; }
Ints bit_xor(Ints a, Ints b) { return {a.v ^ b.v}; }
Ints shift_left(Ints a, Ints n) { return {a.v << n.v}; }
Ints shift_right(Ints a, Ints n) {
  return {static_cast<int32_t>(static_cast<uint32_t>(a.v) >> n.v)};
}
Vec to_float(Ints a) { return {static_cast<float>(a.v)}; }
Vec lookup(const int8_t* table, Ints i) { return {static_cast<float>(table[i.v])}; }

// The f16 in the low and the high bits of the lanes.
Vec low_halves(Ints a) { return {to_float(F16{static_cast<uint16_t>(a.v)})}; }
Vec high_halves(Ints a) { return low_halves(shift_right(a, ints(16))); }

// ---- Four bytes in a lane ----

constexpr int kTileVectors = 16;

constexpr int kQuantColumns = 1;
typedef int8_t Quants __attribute__((vector_size(32)));

void load_quants(Quants* q, const Columns& columns, int64_t at) {
  __builtin_memcpy(q, columns[0] + at, sizeof(*q));
}
void load_quants_twice(Quants* q, const Columns& columns, int64_t at) {
  auto* half = reinterpret_cast<std::byte*>(q);
  __builtin_memcpy(half, columns[0] + at, 16);
  __builtin_memcpy(half + 16, columns[0] + at, 16);
}
void lookup_quants(Quants* q, const int8_t* table) {
  for (int i = 0; i < 32; ++i) (*q)[i] = table[(*q)[i]];
}

Ints load_quads(const int8_t* p) {
  Ints quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return quad;
}
Ints broadcast_quad(const int8_t* p) { return load_quads(p); }
Ints repeat_quads(const int8_t* p, int64_t i) { return load_quads(p + 4 * i); }
constexpr int kLargestPair = 0;  // no 16-bit sums

template <class Byte>
Ints dot_of(Ints sums, Ints w, Ints x) {
  Byte a[4];
  int8_t b[4];
  __builtin_memcpy(a, &w, sizeof(a));
  __builtin_memcpy(b, &x, sizeof(b));
  return {sums.v + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]};
}
Ints dot(Ints sums, Ints w, Ints x) { return dot_of<uint8_t>(sums, w, x); }
int32_t signed_start(int32_t) { return 0; }
Ints signed_dot(Ints sums, Ints w, Ints x) { return dot_of<int8_t>(sums, w, x); }
void store_bytes(int8_t* p, Vec a) { *p = static_cast<int8_t>(a.v); }

[[gnu::always_inline]] inline void transpose_quads(int8_t* to, int64_t stride, const Quants* q) {
  for (int i = 0; i < 8; ++i) {
    __builtin_memcpy(to + i * stride, reinterpret_cast<const int8_t*>(q) + 4 * i, 4);
  }
}
template <int kLargest>
void sum_quads(Ints* sums, const Ints* products) {
  sums[0] = sums[1] = {0};
  for (int i = 0; i < 8; ++i) sums[i / 4].v += products[i].v;
}

}  // namespace
}  // namespace h2o

// After the vector type it is written against:
#include "cpu/simd/first-inl.h"

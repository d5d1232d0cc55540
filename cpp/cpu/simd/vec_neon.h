// Vec for AArch64: NEON, which every such CPU has.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "cpu/matmul/columns.h"

namespace h2o {
namespace {

// Size of a matmul tile in registers: rows times columns, or vectors of columns.
constexpr int kTileRows = 4;
constexpr int kTileColumns = 4;

constexpr int64_t kWidth = 4;

struct Vec {
  float32x4_t v;
};

float to_float(F16 h) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h.bits))), 0);
}

Vec zero() { return {vdupq_n_f32(0)}; }
Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
Vec load(const float* p) { return {vld1q_f32(p)}; }
Vec load(const F16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))}; }
Vec load(const BF16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))}; }
Vec load(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  const int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(quad)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)))};
}
void store(float* p, Vec a) { vst1q_f32(p, a.v); }
// Elements 0, 2, 4, ... and 1, 3, 5, ... of 2 kWidth.
void load_even_odd(const float* p, Vec& even, Vec& odd) {
  const float32x4x2_t both = vld2q_f32(p);
  even.v = both.val[0], odd.v = both.val[1];
}
void store_even_odd(float* p, Vec even, Vec odd) { vst2q_f32(p, {even.v, odd.v}); }

void store_f16(F16* p, Vec a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }

Vec add(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
// min and max return b if one is NaN, unlike the NEON instructions of these names.
Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
Vec round(Vec a) { return {vrndnq_f32(a.v)}; }

// x * 2^n for an integer n in [-126, 127].
Vec times_power_of_two(Vec x, Vec n) {
  const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127));
  return {vmulq_f32(x.v, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)))};
}

float sum(Vec a) { return vaddvq_f32(a.v); }
float maximum(Vec a) { return vmaxvq_f32(a.v); }

// p[0], ..., p[3] = sum(a), ..., sum(d), each added in the same order.
void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  vst1q_f32(p, vpaddq_f32(vpaddq_f32(a.v, b.v), vpaddq_f32(c.v, d.v)));
}

// Lanes in the order of store_sums(): it adds pairs of them, then pairs of these, and so on.
constexpr int8_t kLaneOrder[] = {0, 1, 2, 3};

// Rows to columns.
[[gnu::always_inline]] inline void transpose(Vec (&a)[kWidth]) {
  const float32x4x2_t ab = vtrnq_f32(a[0].v, a[1].v), cd = vtrnq_f32(a[2].v, a[3].v);
  a[0].v = vcombine_f32(vget_low_f32(ab.val[0]), vget_low_f32(cd.val[0]));
  a[1].v = vcombine_f32(vget_low_f32(ab.val[1]), vget_low_f32(cd.val[1]));
  a[2].v = vcombine_f32(vget_high_f32(ab.val[0]), vget_high_f32(cd.val[0]));
  a[3].v = vcombine_f32(vget_high_f32(ab.val[1]), vget_high_f32(cd.val[1]));
}

struct Ints {
  int32x4_t v;
};

Ints ints(int32_t x) { return {vdupq_n_s32(x)}; }
Ints lanes() {
  constexpr int32_t kLanes[] = {0, 1, 2, 3};
  return {vld1q_s32(kLanes)};
}
Ints load_bytes(const uint8_t* p) {
  uint32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(quad)));
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words)))};
}
Ints add(Ints a, Ints b) { return {vaddq_s32(a.v, b.v)}; }
Ints sub(Ints a, Ints b) { return {vsubq_s32(a.v, b.v)}; }
Ints bit_and(Ints a, Ints b) { return {vandq_s32(a.v, b.v)}; }
Ints bit_or(Ints a, Ints b) { return {vorrq_s32(a.v, b.v)}; }
Ints bit_xor(Ints a, Ints b) { return {veorq_s32(a.v, b.v)}; }
Ints shift_left(Ints a, Ints n) { return {vshlq_s32(a.v, n.v)}; }
Ints shift_right(Ints a, Ints n) {
  return {vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.v), vnegq_s32(n.v)))};
}
Vec to_float(Ints a) { return {vcvtq_f32_s32(a.v)}; }

// The low byte of each lane selects a byte of the table, sign-extended to the lane.
Vec lookup(const int8_t* table, Ints i) {
  const int8x16_t values = vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(i.v));
  return {vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s8(values), 24), 24))};
}

// The f16 in the low and the high bits of the lanes.
Vec low_halves(Ints a) { return {vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(a.v)))}; }
Vec high_halves(Ints a) { return {vcvt_f32_f16(vreinterpret_f16_s16(vshrn_n_s32(a.v, 16)))}; }

// ---- Four bytes in a lane; the dot products are in dot_neon*.h ----

constexpr int kTileVectors = 4;

constexpr int kQuantColumns = 1;
typedef int8_t Quants __attribute__((vector_size(32)));

[[gnu::always_inline]] inline void load_quants(Quants* q, const Columns& columns, int64_t at) {
  __builtin_memcpy(q, columns[0] + at, sizeof(*q));
}
[[gnu::always_inline]] inline void load_quants_twice(Quants* q, const Columns& columns,
                                                     int64_t at) {
  auto* half = reinterpret_cast<std::byte*>(q);
  __builtin_memcpy(half, columns[0] + at, 16);
  __builtin_memcpy(half + 16, columns[0] + at, 16);
}
[[gnu::always_inline]] inline void lookup_quants(Quants* q, const int8_t* table) {
  auto* bytes = reinterpret_cast<uint8_t*>(q);
  const int8x16_t values = vld1q_s8(table);
  vst1q_s8(reinterpret_cast<int8_t*>(bytes), vqtbl1q_s8(values, vld1q_u8(bytes)));
  vst1q_s8(reinterpret_cast<int8_t*>(bytes + 16), vqtbl1q_s8(values, vld1q_u8(bytes + 16)));
}

Ints load_quads(const int8_t* p) { return {vreinterpretq_s32_s8(vld1q_s8(p))}; }
Ints repeat_quads(const int8_t* p, int64_t i) { return load_quads(p + 16 * i); }
Ints broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, sizeof(quad));
  return ints(quad);
}

void store_bytes(int8_t* p, Vec a) {
  const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(a.v));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  const int32_t quad = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
  __builtin_memcpy(p, &quad, sizeof(quad));
}

[[gnu::always_inline]] inline void transpose_quads(int8_t* to, int64_t stride, const Quants* q) {
  for (int half = 0; half < 2; ++half) {
    int32x4_t row[4];
    for (int j = 0; j < 4; ++j) {
      __builtin_memcpy(row + j, reinterpret_cast<const int8_t*>(q + j) + 16 * half, sizeof(row[j]));
    }
    const int32x4x2_t low = vtrnq_s32(row[0], row[1]), high = vtrnq_s32(row[2], row[3]);
    const auto put = [&](int i, int32x2_t left, int32x2_t right) {
      vst1q_s8(to + (4 * half + i) * stride, vreinterpretq_s8_s32(vcombine_s32(left, right)));
    };
    put(0, vget_low_s32(low.val[0]), vget_low_s32(high.val[0]));
    put(1, vget_low_s32(low.val[1]), vget_low_s32(high.val[1]));
    put(2, vget_high_s32(low.val[0]), vget_high_s32(high.val[0]));
    put(3, vget_high_s32(low.val[1]), vget_high_s32(high.val[1]));
  }
}

// Two vectors hold the products of a column.
template <int kLargest>
[[gnu::always_inline]] inline void sum_quads(Ints* sums, const Ints* products) {
  for (int half = 0; half < 2; ++half) {
    const Ints* p = products + half;
    sums[half].v = vpaddq_s32(vpaddq_s32(p[0].v, p[2].v), vpaddq_s32(p[4].v, p[6].v));
  }
}

}  // namespace
}  // namespace h2o

// After the vector type it is written against:
#include "cpu/simd/first-inl.h"

// Scales of quantized types for computing weights in f16, two at a time.
#pragma once

#include "cuda/matmul/scales.cuh"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {

// Integers below 1024 as halves: in 1024, 0x6400, the lowest bit is a one.
constexpr uint32_t kHalves1024 = 0x64006400;

// Two signed bytes as halves.
__device__ inline uint32_t bytes_as_halves(uint32_t pair) {
  return subtract_halves(permute_bytes(pair ^ 0x8080, 0x64, 0x4140), 0x64806480);
}

// Scales of a group: an element's is outer * inner, both of which f16 represents exactly, as
// their product may not be. operator()(q, zero, i): two q - zero to weights, where q is in halves
// from 1024 on; scale and minimum i. magic: kHalves1024.
template <class Scales>
struct HalfScales;

template <>
struct HalfScales<FloatScale> {
  __device__ HalfScales(const FloatScale::Raw& raw, int, uint32_t) : d(both_low(raw.d)) {}
  __device__ uint32_t operator()(uint32_t q, uint32_t zero, int) const {
    return multiply_halves(subtract_halves(q, zero), d);
  }
  uint32_t d;
};

template <>
struct HalfScales<FloatScaleAndMin> {
  __device__ HalfScales(const FloatScaleAndMin::Raw& raw, int, uint32_t)
      : d(both_low(raw.d_m)), m(both_high(raw.d_m)) {}
  __device__ uint32_t operator()(uint32_t q, uint32_t zero, int) const {
    return multiply_add_halves(subtract_halves(q, zero), d, m);
  }
  uint32_t d, m;
};

// Scales and mins of a few bits: (1024 + q) s - 1024 s is exact.
struct InnerScaleAndMin {
  // factors: 1024 + the scale, then the min; d_dmin: the outer ones.
  __device__ void set(uint32_t factors, uint32_t d_dmin) {
    const uint32_t halves = subtract_halves(factors, kHalves1024);
    inner = both_low(halves);
    less = multiply_halves(inner, kHalves1024 ^ 0x80008000);
    min = both_high(multiply_halves(halves, d_dmin ^ 0x80000000));
  }
  __device__ uint32_t operator()(uint32_t q, uint32_t outer) const {
    return multiply_add_halves(multiply_add_halves(q, inner, less), outer, min);
  }
  uint32_t inner, less, min;
};

template <>
struct HalfScales<SixBitScaleAndMin> {
  __device__ HalfScales(const SixBitScaleAndMin::Raw& raw, uint32_t g, uint32_t magic)
      : outer(both_low(raw.words.x)) {
    own.set(SixBitScaleAndMin::factors(raw, g, magic), raw.words.x);
  }
  __device__ uint32_t operator()(uint32_t q, uint32_t, int) const { return own(q, outer); }
  uint32_t outer;
  InnerScaleAndMin own;
};

template <>
struct HalfScales<FourBitScalesAndMins> {
  __device__ HalfScales(const FourBitScalesAndMins::Raw& raw, int, uint32_t magic)
      : outer(both_low(raw.d_dmin)) {
    const uint32_t pairs = raw.scales | raw.scales << 12;
    own[0].set((pairs & 0x000f000f) | magic, raw.d_dmin);
    own[1].set((pairs >> 8 & 0x000f000f) | magic, raw.d_dmin);
  }
  __device__ uint32_t operator()(uint32_t q, uint32_t, int i) const { return own[i](q, outer); }
  uint32_t outer;
  InnerScaleAndMin own[2];
};

template <>
struct HalfScales<ByteScales> {
  __device__ HalfScales(const ByteScales::Raw& raw, int, uint32_t) : outer(both_low(raw.d)) {
    const uint32_t halves = bytes_as_halves(raw.scales);
    inner[0] = both_low(halves);
    inner[1] = both_high(halves);
  }
  __device__ uint32_t operator()(uint32_t q, uint32_t zero, int i) const {
    return multiply_halves(multiply_halves(subtract_halves(q, zero), inner[i]), outer);
  }
  uint32_t outer, inner[2];
};

template <>
struct HalfScales<SixBitScale> {
  __device__ HalfScales(const SixBitScale::Raw& raw, uint32_t g, uint32_t magic)
      : outer(both_low(raw.words.x)),
        inner(both_low(
            subtract_halves((SixBitScale::factor(raw, g) + 32) | magic, kHalves1024 + 32))) {}
  __device__ uint32_t operator()(uint32_t q, uint32_t zero, int) const {
    return multiply_halves(multiply_halves(subtract_halves(q, zero), inner), outer);
  }
  uint32_t outer, inner;
};

}  // namespace h2o::cuda

// Scales of quantized types for computing weights in f16, two at a time.
#pragma once

#include "cuda/matmul/scales.cuh"
#include "cuda/runtime/ptx.cuh"

namespace h2o::cuda {

__device__ inline uint32_t both_halves(float x) { return pack_halves(x, x); }

// Scales of a group: an element's is outer * inner, both of which f16 represents exactly, as
// their product may not be. operator()(q, i): two q - offset to weights; scale and minimum i.
template <class Scales>
struct HalfScales;

template <>
struct HalfScales<FloatScale> {
  __device__ HalfScales(const FloatScale::Raw& raw, int) : d(raw.d | uint32_t{raw.d} << 16) {}
  __device__ uint32_t operator()(uint32_t q, int) const { return multiply_halves(q, d); }
  uint32_t d;
};

template <>
struct HalfScales<FloatScaleAndMin> {
  __device__ HalfScales(const FloatScaleAndMin::Raw& raw, int)
      : d(permute_bytes(raw.d_m, 0, 0x1010)), m(permute_bytes(raw.d_m, 0, 0x3232)) {}
  __device__ uint32_t operator()(uint32_t q, int) const { return multiply_add_halves(q, d, m); }
  uint32_t d, m;
};

template <>
struct HalfScales<SixBitScaleAndMin> {
  __device__ HalfScales(const SixBitScaleAndMin::Raw& raw, uint32_t g) {
    const auto [s, m] = SixBitScaleAndMin::factors(raw, g);
    outer = permute_bytes(raw.words.x, 0, 0x1010);
    inner = both_halves(static_cast<float>(s));
    min = both_halves(-high_half(raw.words.x) * static_cast<float>(m));
  }
  __device__ uint32_t operator()(uint32_t q, int) const {
    return multiply_add_halves(multiply_halves(q, inner), outer, min);
  }
  uint32_t inner, outer, min;
};

template <>
struct HalfScales<FourBitScalesAndMins> {
  __device__ HalfScales(const FourBitScalesAndMins::Raw& raw, int)
      : outer(permute_bytes(raw.d_dmin, 0, 0x1010)) {
    const float dmin = -high_half(raw.d_dmin);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inner[i] = both_halves(static_cast<float>(raw.scales >> 8 * i & 15));
      min[i] = both_halves(dmin * static_cast<float>(raw.scales >> (8 * i + 4) & 15));
    }
  }
  __device__ uint32_t operator()(uint32_t q, int i) const {
    return multiply_add_halves(multiply_halves(q, inner[i]), outer, min[i]);
  }
  uint32_t outer, inner[2], min[2];
};

template <>
struct HalfScales<ByteScales> {
  __device__ HalfScales(const ByteScales::Raw& raw, int) : outer(raw.d | uint32_t{raw.d} << 16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      inner[i] = both_halves(static_cast<float>(static_cast<int8_t>(raw.scales >> 8 * i)));
    }
  }
  __device__ uint32_t operator()(uint32_t q, int i) const {
    return multiply_halves(multiply_halves(q, inner[i]), outer);
  }
  uint32_t outer, inner[2];
};

template <>
struct HalfScales<SixBitScale> {
  __device__ HalfScales(const SixBitScale::Raw& raw, uint32_t g)
      : outer(permute_bytes(raw.words.x, 0, 0x1010)),
        inner(both_halves(static_cast<float>(SixBitScale::factor(raw, g)))) {}
  __device__ uint32_t operator()(uint32_t q, int) const {
    return multiply_halves(multiply_halves(q, inner), outer);
  }
  uint32_t outer, inner;
};

}  // namespace h2o::cuda

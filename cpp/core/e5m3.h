// Conversions of E5M3, on host and device. Each file has its own copy: the kernels of an
// instruction set share none.
#pragma once

#include "core/blocks.h"
#include "core/host_device.h"

namespace h2o {

// The first 12 bits of the smallest value as a float; larger values count up from there.
constexpr int32_t kE5M3Bias = (127 - 19) << 3;

H2O_HD static inline float to_float(E5M3 x) {
  const uint32_t bits = (uint32_t{x.bits} + kE5M3Bias) << 20;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// The smallest that is not below x >= 0; the largest if there is none, or for NaN.
H2O_HD static inline E5M3 rounded_up(float x) {
  if (!(x < 15 * 512)) return {255};
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  bits = ((bits + (1 << 20) - 1) >> 20) - kE5M3Bias;
  return {static_cast<uint8_t>(bits > 0 ? bits : 0)};
}

}  // namespace h2o

// Error bounds of devices relative to exact arithmetic, in addition to testing.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "device_rig.h"
#include "testing.h"

namespace h2o {

// An error relative to its bound: correct if at most 1. Infinite for NaN.
inline double in_bounds(double actual, double expected, double bound) {
  const double error = std::abs(actual - expected);
  if (error <= bound) return bound > 0 ? error / bound : 0;
  return bound > 0 && !std::isnan(error) ? error / bound : INFINITY;
}

// For e^x whose argument was rounded twice: on the CPU a polynomial, off by less than 4 units
// (Cephes: 1.7e-7); on CUDA __expf, off by 2 + floor(1.173 |x|) places of up to 2 units.
inline double power_error(double x) {
  const double fast = on_cuda() ? 2 * 1.173 * std::abs(x) : 0;
  return (2 * std::abs(x) + 4 + fast) * kUnit;
}

// Does a back end of that name multiply f16 and bf16 weights in bf16?
inline bool multiplies_in_bf16(const std::string& name) {
  return name.find("x86_64_v4_bf16") != std::string::npos ||
         (name.find("x86_64_v4_amx") != std::string::npos &&
          name.find("x86_64_v4_amx_int8") == std::string::npos);
}

// ---- Tensor cores: factors are rounded to 16 bits, products are exact, sums are f32. ----

// The maximum rounding error of x: zero if its bits suffice for x.
inline double rounding_error(DType type, double x) {
  if (type != DType::f16 && type != DType::bf16) return 0;
  const int bits = type == DType::f16 ? 11 : 8;
  int exponent;
  const double whole = std::ldexp(std::frexp(x, &exponent), bits);
  const bool normal = type == DType::bf16 || (exponent > -14 && exponent <= 16);
  if (x == 0 || (normal && whole == std::nearbyint(whole))) return 0;
  const double least = type == DType::f16 ? 0x1p-25 : 0;  // half a place below 2^-14
  return std::max(std::ldexp(std::abs(x), -bits), least);
}

// For a sum of n products. Tensor cores truncate up to 16 products and the sum so far at the last
// place of the largest (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021): 17 addends
// for every 16 products, each off by up to 2 units of the total.
inline double tensor_core_gamma(int64_t n) { return gamma(2 * (n + n / 16 + 1)); }

}  // namespace h2o

// How far products with weights may be from exact arithmetic, on the test device.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "bounds.h"
#include "random_weights.h"

namespace h2o {

inline bool is_quantised(DType dtype) { return info(dtype).block_size > 1; }

// What a device rounds the factors to. To multiply more than a few rows on tensor cores: with
// quantised weights f16, else the type of the weights. On a CPU with such products bf16, for floats
// of 16 bits. f32: it does not, or only a library does that was not found.
inline DType factor_type(const Backend& backend, DType weights, int64_t n_rows, int64_t n_in) {
  if (multiplies_in_bf16(backend.name())) {
    return weights == DType::f16 ? DType::bf16 : weights == DType::bf16 ? weights : DType::f32;
  }
  if (!on_cuda() || n_rows <= 8) return DType::f32;
  if (is_quantised(weights)) return DType::f16;
  const bool library = backend.name().find("no cuBLAS") == std::string::npos;
  return library || n_in % 8 == 0 ? weights : DType::f32;
}

// Integers whose largest of 32 is 127, so that 8 bits hold them; the others are small.
inline std::vector<float> random_integers(Random& random, int64_t n) {
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(random.integer(-3, 3));
  for (int64_t i = 0; i < n; i += 32) {
    const auto last = static_cast<int32_t>(std::min<int64_t>(31, n - i - 1));
    x[i + random.integer(0, last)] = random.flip() ? 127 : -127;
  }
  return x;
}

// How far what is multiplied may be from each number of a row of x: with quantised weights it may
// be 8 bits of the largest of 32; on tensor cores, 16.
inline std::vector<double> row_errors(std::span<const float> x, DType weights, DType factors) {
  std::vector<double> errors(x.size());
  for (size_t begin = 0; begin < x.size(); begin += 32) {
    const auto block = x.subspan(begin, std::min<size_t>(32, x.size() - begin));
    double largest = 0;
    for (const float value : block) largest = std::max<double>(largest, std::abs(value));
    for (size_t i = 0; i < block.size(); ++i) {
      double& error = errors[begin + i];
      error = rounding_error(factors, block[i]);
      if (is_quantised(weights) && factors == DType::f32 && largest != 127) {
        error = largest / 254 * (1 + 0x1p-16);  // and some roundings of the scale
      }
    }
  }
  return errors;
}

// The sum of products of a row of x and one of weights, and how far y may be from it, or from it
// and others that are `added`, of such magnitude. Integers are those of random_integers().
struct ExactProduct {
  double sum, bound;
};
inline ExactProduct exact_product(std::span<const float> x, std::span<const double> errors,
                                  std::span<const float> w, DType factors, double added,
                                  bool integers) {
  double sum = 0, magnitude = 0, off = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    sum += double{x[i]} * w[i];
    magnitude += std::abs(double{x[i]} * w[i]);
    off +=
        errors[i] * std::abs(w[i]) + rounding_error(factors, w[i]) * (std::abs(x[i]) + errors[i]);
  }
  magnitude += added + off;
  // Sums of whole numbers below 2^24 are not rounded, whatever their order. Others are in their
  // additions, of which 2 are of what is added, as are the products, and on the way from 8 bits
  // scales and sums.
  const int64_t n = std::ssize(x);
  double roundings = gamma(n + 16);
  if (factors != DType::f32 && on_cuda()) roundings += tensor_core_gamma(n);
  if (integers && magnitude < 0x1p24) roundings = 0;
  return {sum, roundings * magnitude + off};
}

}  // namespace h2o

// Error bounds of products with weights, on the test device.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "bounds.h"
#include "random_weights.h"

namespace h2o {

// The type that a device rounds factors to. For more than a few rows on tensor cores: f16 with
// quantized weights, otherwise the weights' type. On a CPU with bf16 products: bf16, for 16-bit
// floats. f32: no rounding, or only in a cuBLAS that was not found.
inline DType factor_type(const Backend& backend, DType weights, int64_t n_rows, int64_t n_in) {
  if (multiplies_in_bf16(backend.name())) {
    return weights == DType::f16 ? DType::bf16 : weights == DType::bf16 ? weights : DType::f32;
  }
  if (!on_cuda() || n_rows <= 8) return DType::f32;
  if (is_quantized(weights)) return DType::f16;
  const bool library = backend.name().find("no cuBLAS") == std::string::npos;
  return library || n_in % 8 == 0 ? weights : DType::f32;
}

// Integers with a maximum of 127 in every 32, so that 8 bits hold them; the others are small.
inline std::vector<float> random_integers(Random& random, int64_t n) {
  std::vector<float> x(n);
  for (float& value : x) value = static_cast<float>(random.integer(-3, 3));
  for (int64_t i = 0; i < n; i += 32) {
    const auto last = static_cast<int32_t>(std::min<int64_t>(31, n - i - 1));
    x[i + random.integer(0, last)] = random.flip() ? 127 : -127;
  }
  return x;
}

// The rounding error of each number of a row of x: with quantized weights up to 8 bits of the
// largest of 32; on tensor cores, 16; on Vulkan none.
inline std::vector<double> row_errors(std::span<const float> x, DType weights, DType factors) {
  std::vector<double> errors(x.size());
  for (size_t begin = 0; begin < x.size(); begin += 32) {
    const auto block = x.subspan(begin, std::min<size_t>(32, x.size() - begin));
    double largest = 0;
    for (const float value : block) largest = std::max<double>(largest, std::abs(value));
    for (size_t i = 0; i < block.size(); ++i) {
      double& error = errors[begin + i];
      error = rounding_error(factors, block[i]);
      if (is_quantized(weights) && !on_vulkan() && factors == DType::f32 && largest != 127) {
        error = largest / 254 * (1 + 0x1p-16);  // and some roundings of the scale
      }
    }
  }
  return errors;
}

// The rounding errors of weights.
inline std::vector<double> weight_errors(std::span<const float> w, DType factors) {
  std::vector<double> errors(w.size());
  std::ranges::transform(w, errors.begin(), [=](float x) { return rounding_error(factors, x); });
  return errors;
}

// The same for tens of rows on a GPU, which computes quantized weights in f16: besides the result,
// the minimum of a block is rounded (its weights without q), and a product of q and the scale
// within a superblock, if it is larger than f16 represents.
inline std::vector<double> weight_errors_in_halves(DType dtype, std::span<const float> w,
                                                   std::span<const std::byte> bytes) {
  const auto without_q = [&]<class Block>(Block*) {
    std::vector<std::byte> copy(bytes.begin(), bytes.end());
    for (Block& b : std::span(reinterpret_cast<Block*>(copy.data()), copy.size() / sizeof(Block))) {
      std::ranges::fill(b.qs, 0);
      if constexpr (requires { b.qh; }) std::ranges::fill(b.qh, 0);
    }
    std::vector<float> minima(w.size());
    choose_kernels("scalar").of(dtype).decode(minima.data(), copy.data(), std::ssize(minima));
    return minima;
  };
  std::vector<float> minima(w.size());
  if (dtype == DType::q4_1) minima = without_q(static_cast<BlockQ4_1*>(nullptr));
  if (dtype == DType::q5_1) minima = without_q(static_cast<BlockQ5_1*>(nullptr));
  if (dtype == DType::q2_k) minima = without_q(static_cast<BlockQ2_K*>(nullptr));
  if (dtype == DType::q4_k) minima = without_q(static_cast<BlockQ4_K*>(nullptr));
  if (dtype == DType::q5_k) minima = without_q(static_cast<BlockQ5_K*>(nullptr));
  const bool large = dtype == DType::q6_k || dtype == DType::iq4_xs;
  std::vector<double> errors(w.size());
  for (size_t i = 0; i < w.size(); ++i) {
    const double before = rounding_error(DType::f16, minima[i]) + large * std::abs(w[i]) * 0x1p-11;
    errors[i] = rounding_error(DType::f16, w[i]);
    if (before > 0) errors[i] = before + std::max((std::abs(w[i]) + before) * 0x1p-11, 0x1p-25);
  }
  return errors;
}

// The sum of products of a row of x and one of weights, and the error bound of y, which may also
// contain `added` terms of that magnitude. Integers are those of random_integers().
struct ExactProduct {
  double sum, bound;
};
inline ExactProduct exact_product(std::span<const float> x, std::span<const double> x_errors,
                                  std::span<const float> w, std::span<const double> w_errors,
                                  DType factors, double added, bool integers) {
  double sum = 0, magnitude = 0, off = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double product = double{x[i]} * w[i];
    sum += product;
    magnitude += std::abs(product);
    off += x_errors[i] * std::abs(w[i]) + w_errors[i] * (std::abs(x[i]) + x_errors[i]);
  }
  magnitude += added + off;
  // Sums of integers below 2^24 are exact in any order. Others are rounded in each addition, 2 of
  // which are for added terms, in each product, and in scales and sums of 8-bit values.
  const int64_t n = std::ssize(x);
  double roundings = gamma(n + 16);
  if (factors != DType::f32 && on_cuda()) roundings += tensor_core_gamma(n);
  if (integers && magnitude < 0x1p24) roundings = 0;
  return {sum, roundings * magnitude + off};
}

}  // namespace h2o

// Kernels of newer families: rms_norm, GELU, SwiGLU, rotary positions.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numbers>

#include "cpu/attention/rotate.h"
#include "cpu/isa/detect.h"
#include "testing.h"

namespace h2o {
namespace {

// Exponentials are clamped at e^-70 (elementwise-inl.h), which is negligible against numbers of
// order one.
constexpr double kNegligible = 1e-29;

double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

// Values of all signs and sizes, and the special ones.
std::vector<float> inputs(Random& random, int64_t n) {
  std::vector<float> x = random.reals(n, -6, 6);
  if (n > 4) {
    x[0] = 0;
    x[1] = -200;
    x[2] = 200;
    x[3] = -1e-6f;
  }
  return x;
}

// Applies `kernel` to n = 1 .. 70 values between canaries; calls check(i, x_i, y_i).
void for_all(const CpuKernels& table, const std::function<void(float*, int64_t)>& kernel,
             const std::function<void(double x, double y)>& check) {
  CAPTURE(std::string_view(table.isa));
  Random random(1);
  for (int64_t n = 1; n <= 70; ++n) {
    const std::vector<float> x = inputs(random, n);
    std::vector<float> y(n + 2, 7.0f);
    std::copy(x.begin(), x.end(), y.begin() + 1);
    kernel(y.data() + 1, n);
    CHECK(y.front() == 7.0f);
    CHECK(y.back() == 7.0f);
    for (int64_t i = 0; i < n; ++i) check(x[i], y[i + 1]);
  }
}

TEST_CASE("gelu_tanh") {
  for (const CpuKernels* table : supported_kernels()) {
    for_all(*table, table->gelu_tanh, [](double x, double y) {
      CAPTURE(x);
      const double z = 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      const double expected = x * sigmoid(z);
      // z takes five roundings and two rounded constants, amplified by |z| in e^-|z|; two
      // exponentials at 4 u each, a sum, a quotient and a product follow.
      const double bound = (8 * std::abs(z) + 12) * kUnit * std::abs(expected);
      CHECK(std::abs(y - expected) <= bound + kNegligible * std::abs(x));
    });
  }
}

TEST_CASE("gelu_erf") {
  for (const CpuKernels* table : supported_kernels()) {
    for_all(*table, table->gelu_erf, [](double x, double y) {
      CAPTURE(x);
      const double t = x / std::numbers::sqrt2;
      const double expected = x / 2 * (1 + std::erf(t));
      // No less accurate than x / 2 (1 + erff(t)): t has two roundings and erf a slope of
      // 2 / sqrt(pi) e^-t^2; erff is accurate to one place, and 1 + erf, a product and the halving
      // round once each.
      const double slope = 1.13 * std::exp(-t * t) * std::abs(t);
      CHECK(std::abs(y - expected) <= std::abs(x) / 2 * (2 * slope + 2 + 1 + 2) * kUnit);
    });
  }
}

TEST_CASE("gelu_erf of special values") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    std::vector<float> x = {0, -0.0f, kInfinity, std::nanf(""), -20, 20, 1e30f, -1e30f};
    table->gelu_erf(x.data(), std::ssize(x));
    CHECK(x[0] == 0);
    CHECK(x[1] == 0);
    CHECK(x[2] == kInfinity);
    CHECK(std::isnan(x[3]));
    CHECK(std::abs(x[4]) < 1e-29f);
    CHECK(x[5] == 20);
    CHECK(x[6] == 1e30f);
    CHECK(x[7] <= 0);
  }
}

TEST_CASE("swiglu") {
  for (const CpuKernels* table : supported_kernels()) {
    Random random(2);
    const std::vector<float> up = random.reals(70);
    for_all(
        *table,
        [&](float* gate, int64_t n) {
          std::vector<float> y(up.begin(), up.begin() + n);
          table->swiglu(y.data(), gate, n);
          for (int64_t i = 0; i < n; ++i) {
            const double g = gate[i];
            CAPTURE(g);
            const double expected = g * sigmoid(g) * up[i];
            // Two exponentials at 4 u, a sum, a quotient, two products.
            CHECK(std::abs(y[i] - expected) <=
                  12 * kUnit * std::abs(expected) + kNegligible * std::abs(g * up[i]));
          }
        },
        [](double, double) {});
  }
}

TEST_CASE("swiglu_clamped") {
  for (const CpuKernels* table : supported_kernels()) {
    Random random(4);
    std::vector<float> up = random.reals(70, -12, 12);  // many of them beyond the clamps
    up[0] = -7;
    up[1] = 7;
    up[2] = -1;  // makes up + 1 zero
    for_all(
        *table,
        [&](float* gate, int64_t n) {
          std::vector<float> y(up.begin(), up.begin() + n);
          table->swiglu_clamped(y.data(), gate, n);
          for (int64_t i = 0; i < n; ++i) {
            const double g = std::min<double>(gate[i], 7);
            const double u = std::clamp<double>(up[i], -7, 7) + 1;
            CAPTURE(gate[i]);
            CAPTURE(up[i]);
            const double z = 1.702 * g;
            const double expected = g * sigmoid(z) * u;
            // z takes a rounded constant and a product, amplified by |z| in e^-|z|; two
            // exponentials at 4 u each, a sum, a quotient, a sum and two products follow.
            CHECK(std::abs(y[i] - expected) <= (2 * std::abs(z) + 13) * kUnit * std::abs(expected) +
                                                   kNegligible * std::abs(g * u));
          }
        },
        [](double, double) {});
  }
}

TEST_CASE("rms_norm") {
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(3);
    for (int64_t n = 1; n <= 70; ++n) {
      const std::vector<float> x = random.reals(n);
      const std::vector<float> weight = random.reals(n);
      const float eps = 1e-5f;
      std::vector<float> y(n + 2, 7.0f);
      table->rms_norm(y.data() + 1, x.data(), weight.data(), n, eps);
      CHECK(y.front() == 7.0f);
      CHECK(y.back() == 7.0f);
      std::vector<float> in_place = x;
      table->rms_norm(in_place.data(), in_place.data(), weight.data(), n, eps);
      CHECK(same_bits(in_place, {y.data() + 1, static_cast<size_t>(n)}));

      double squares = 0;
      for (const float value : x) squares += static_cast<double>(value) * value;
      const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
      // The sum of squares has n roundings, a quotient and a sum; its root halves them. The root,
      // the inverse and two products follow.
      const double relative = gamma(n + 3) / 2 + gamma(4);
      for (int64_t i = 0; i < n; ++i) {
        const double expected = x[i] * scale * weight[i];
        CHECK(std::abs(y[i + 1] - expected) <= relative * std::abs(expected));
      }
    }
  }
}

TEST_CASE("rotary position embedding rotates pairs, and does not change other dimensions") {
  Random random(4);
  for (const RopeLayout layout : {RopeLayout::pairs, RopeLayout::halves}) {
    for (const int64_t half : {1, 3, 8, 21}) {
      const int64_t head_dim = 2 * half + 5;
      std::vector<float> frequencies = random.reals(half, 0.001f, 1);
      const Rope rope{
          layout, {reinterpret_cast<std::byte*>(frequencies.data()), DType::f32, 1, half}, 1.25f};
      for (const int32_t position : {0, 1, 1000, 100000}) {
        std::vector<float> rope_table(rope.n_rot());
        compute_rope_table(rope_table.data(), rope, position);
        for (const CpuKernels* kernels : supported_kernels()) {
          const std::vector<float> from = random.reals(head_dim);
          std::vector<float> to = from;
          rotate(*kernels, to.data(), rope_table.data(), rope);
          for (int64_t i = 0; i < half; ++i) {
            const int64_t first = layout == RopeLayout::pairs ? 2 * i : i;
            const int64_t second = layout == RopeLayout::pairs ? 2 * i + 1 : i + half;
            // The angle is defined as this float.
            const double angle = static_cast<float>(position) * frequencies[i];
            const double a = from[first];
            const double b = from[second];
            // Cosine and sine are accurate to one place, then scaled; two products and a sum.
            const double bound = 1.25 * 5 * kUnit * (std::abs(a) + std::abs(b));
            const double c = 1.25 * std::cos(angle);
            const double s = 1.25 * std::sin(angle);
            CHECK(std::abs(to[first] - (a * c - b * s)) <= bound);
            CHECK(std::abs(to[second] - (a * s + b * c)) <= bound);
          }
          for (int64_t i = 2 * half; i < head_dim; ++i) CHECK(to[i] == from[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace h2o

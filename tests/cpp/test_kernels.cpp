// The vector kernels of every instruction set: softmax, layer_norm, relu, add; and the list of
// tables.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>

#include "core/error.h"
#include "cpu/isa/detect.h"
#include "kv/policy.h"
#include "testing.h"

namespace h2o {
namespace {

// Softmax clamps probabilities to avoid denormals. The value only has to be negligible: a billion
// of these are less than a rounding.
constexpr double kNegligible = 1e-27;

bool is_intel() {
#ifdef __x86_64__
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}

TEST_CASE("the tables are those that this CPU supports") {
  const std::vector<const CpuKernels*> tables = supported_kernels();
  std::vector<std::string> names;
  for (const CpuKernels* table : tables) names.push_back(table->isa);
  std::vector<std::string> expected;
  for (const char* isa :
       {"x86_64_v4_amx", "x86_64_v4_amx_int8", "x86_64_v4_bf16", "x86_64_v4_vnni", "x86_64_v4",
        "x86_64_v3_vnni", "x86_64_v3", "neon_dotprod", "neon", "scalar"}) {
    if (cpu_has(isa)) expected.push_back(isa);
  }
  CHECK(names == expected);
  const std::string fastest = choose_kernels("").isa;
  CHECK((fastest == names.front() || (fastest == "x86_64_v4_vnni" && is_intel())));
  CHECK((fastest != "x86_64_v4_bf16" || !is_intel()));
  for (const CpuKernels* table : tables) {
    const CpuKernels& exact = choose_kernels(table->isa, true);
    CHECK((exact.round_rows == nullptr));
    CHECK((&exact == table || table->round_rows != nullptr));
  }
  for (const CpuKernels* table : tables) CHECK(&choose_kernels(table->isa) == table);
  CHECK_THROWS_AS(choose_kernels("x86_64_v5"), InvalidArgument);
}

// Softmax in double, and its error bound in f32.
struct Softmax {
  std::vector<double> p;
  std::vector<double> bound;
};

Softmax softmax_reference(const std::vector<float>& x, float scale, int64_t part) {
  const double largest = *std::max_element(x.begin(), x.end());
  // The exponent is rounded twice, so e^a is off by 2 u |a|; the polynomial adds less than 4 u
  // (Cephes: 1.7e-7). The sum's error is the mean of its terms' plus n roundings; the inverse and
  // the product are two more. In parts, an exponential is the product of two, and a merge rounds
  // three times and multiplies by another exponential of 4 u.
  std::vector<double> relative;
  double total = 0;
  double total_error = 0;
  Softmax s;
  for (const float value : x) {
    const double a = (value - largest) * scale;
    relative.push_back((2 * std::min(-a, 100.0) + 8) * kUnit);  // e^-100 is far below kNegligible
    s.p.push_back(std::exp(a));
    total += s.p.back();
    total_error += s.p.back() * relative.back();
  }
  const auto n_parts = (std::ssize(x) + part - 1) / part;
  const double common = total_error / total + gamma(std::ssize(x) + 2 + 7 * n_parts);
  for (size_t i = 0; i < x.size(); ++i) {
    s.p[i] /= total;
    s.bound.push_back(1.01 *
                      (s.p[i] * (relative[i] + common) + kNegligible));  // 1.01: second order
  }
  return s;
}

// Softmax of x in parts of this size, as in attention.
void softmax(const CpuKernels& table, std::span<float> x, int64_t part, float scale) {
  float largest = -std::numeric_limits<float>::max();
  float total = 0;
  std::vector<float> maxima;
  for (int64_t i = 0; i < std::ssize(x); i += part) {
    const int64_t n = std::min(part, std::ssize(x) - i);
    float keep, take, one;
    float sum = table.exponentiate(x.data() + i, n, scale, &one);
    table.merge_sums({&largest, &total}, {&one, &sum}, &keep, &take, 1, scale);
    maxima.push_back(one);
  }
  for (int64_t i = 0; i < std::ssize(x); i += part) {
    float weight;
    table.weights_of(&weight, &maxima[i / part], {&largest, &total}, 1, scale);
    table.weigh(x.data() + i, std::min(part, std::ssize(x) - i), weight);
  }
}

void check_softmax(const CpuKernels& table, const std::vector<float>& x, float scale,
                   int64_t part) {
  CAPTURE(std::string_view(table.isa));
  CAPTURE(x.size());
  CAPTURE(part);
  CAPTURE(scale);
  const int64_t n = std::ssize(x);
  std::vector<float> y(n + 2, 7.0f);
  std::copy(x.begin(), x.end(), y.begin() + 1);
  softmax(table, std::span(y).subspan(1, n), part, scale);
  CHECK(y.front() == 7.0f);
  CHECK(y.back() == 7.0f);

  const Softmax expected = softmax_reference(x, scale, part);
  int n_wrong = 0;
  int n_not_normal = 0;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float p = y[i + 1];
    sum += p;
    n_not_normal += std::fpclassify(p) != FP_NORMAL;
    n_wrong += !(std::abs(p - expected.p[i]) <= expected.bound[i]);
  }
  CHECK(n_wrong == 0);
  CHECK(n_not_normal == 0);  // neither NaN nor denormal
  // The terms sum to total (1 + gamma_n), inverted and multiplied.
  if (part >= n) CHECK(std::abs(sum - 1) <= 1.01 * gamma(n + 3));
}

void check_softmax(const CpuKernels& table, const std::vector<float>& x, float scale) {
  for (const int64_t part : {int64_t{std::ssize(x)}, int64_t{16}, int64_t{37}}) {
    check_softmax(table, x, scale, part);
  }
}

TEST_CASE("softmax") {
  for (const CpuKernels* table : supported_kernels()) {
    Random random(1);
    for (int64_t n = 1; n <= 70; ++n) {
      for (const float spread : {0.1f, 3.0f, 50.0f, 1000.0f}) {
        check_softmax(*table, random.reals(n, -spread, spread), random.real(0.01f, 2.0f));
      }
    }
    check_softmax(*table, random.reals(3001, -5, 5), 1.0f);
  }
}

TEST_CASE("parts merged together have the bits of parts merged one after the other") {
  constexpr float kScale = 0.3f;
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(2);
    for (const int64_t n_parts : {0, 1, 2, 15, 16, 17, 32, 49}) {
      for (const int64_t n_out : {1, 7, 16, 64, 83}) {
        // Every second number, every third and rows of four more than n_out.
        std::vector<float> largest = random.reals(2 * n_parts, -20, 20);
        std::vector<float> total = random.reals(3 * n_parts, 1, 100);
        const int64_t step = n_out + 4;
        const std::vector<float> outs = random.reals(n_parts * step);
        if (n_parts > 2) {  // a part of no keys
          largest[2] = -std::numeric_limits<float>::max();
          total[3] = 0;
        }
        float expected_largest = random.real(-20, 20), merged_largest = expected_largest;
        float expected_total = random.real(0, 9), merged_total = expected_total;
        std::vector<float> expected = random.reals(n_out), merged = expected;
        for (int64_t i = 0; i < n_parts; ++i) {
          float keep, take;
          table->merge_sums({&expected_largest, &expected_total}, {&largest[2 * i], &total[3 * i]},
                            &keep, &take, 1, kScale);
          table->mix(expected.data(), &outs[i * step], n_out, keep, take);
        }
        table->merge_parts({&merged_largest, &merged_total}, merged.data(),
                           {.largest = largest.data(),
                            .total = total.data(),
                            .out = outs.data(),
                            .largest_step = 2,
                            .total_step = 3,
                            .out_step = step,
                            .n = n_parts},
                           n_out, kScale);
        CHECK(same_bits(merged_largest, expected_largest));
        CHECK(same_bits(merged_total, expected_total));
        CHECK(same_bits(merged, expected));
      }
    }
  }
}

TEST_CASE("softmax of extremes") {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const CpuKernels* table : supported_kernels()) {
    for (const int64_t n : {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 67, 4099}) {
      for (const float value : {0.0f, -0.0f, 1e30f, -1e30f, kMax, -kMax}) {
        check_softmax(*table, std::vector<float>(n, value), 0.125f);  // all equal
      }
      for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
        std::vector<float> x(n, 1.0f);
        for (const float one : {1e30f, kMax, 100.0f, -100.0f, -1e30f, -kMax}) {
          x[at] = one;
          check_softmax(*table, x, 1.0f);
        }
      }
      std::vector<float> steps(n);  // differences of 1e30
      for (int64_t i = 0; i < n; ++i) steps[i] = static_cast<float>(-1e30 * (i % 5));
      check_softmax(*table, steps, 0.5f);
      std::vector<float> opposite(n);  // differences that are not finite
      for (int64_t i = 0; i < n; ++i) opposite[i] = i % 2 == 0 ? -kMax : kMax;
      check_softmax(*table, opposite, 0.5f);
    }
  }
}

TEST_CASE("layer_norm") {
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(2);
    for (int64_t n = 1; n <= 70; ++n) {
      for (const float offset : {0.0f, 1.0f, 100.0f}) {
        const float spread = n % 10 == 0 ? 0.0f : 1.0f;  // 0: all equal
        const std::vector<float> x = random.reals(n, offset - spread, offset + spread);
        const std::vector<float> weight = random.reals(n);
        const std::vector<float> bias = random.reals(n);
        const float eps = 1e-5f;
        std::vector<float> y(n + 2, 7.0f);
        table->layer_norm(y.data() + 1, x.data(), weight.data(), bias.data(), n, eps);
        CHECK(y.front() == 7.0f);
        CHECK(y.back() == 7.0f);
        std::vector<float> in_place = x;
        table->layer_norm(in_place.data(), in_place.data(), weight.data(), bias.data(), n, eps);
        CHECK(same_bits(in_place, {y.data() + 1, static_cast<size_t>(n)}));

        double mean = 0;
        double magnitude = 0;
        for (const float value : x) {
          mean += value / static_cast<double>(n);
          magnitude += std::abs(value) / static_cast<double>(n);
        }
        double variance = 0;
        for (const float value : x) {
          variance += (value - mean) * (value - mean) / static_cast<double>(n);
        }
        // The computed mean is off by `shift`: n sums, one division. It shifts every x - mean and
        // adds shift^2 to the variance. A square carries the roundings of x - mean twice and its
        // own; then n sums, a division and + eps. The root halves the error; it, the inverse and
        // the three operations of the output round once more each.
        const double shift = gamma(n + 1) * magnitude;
        const double denominator = variance + double{eps};
        const double scale = 1 / std::sqrt(denominator);
        const double relative =
            (gamma(n + 5) * (variance + shift * shift) + shift * shift) / denominator / 2 +
            gamma(6);
        int n_wrong = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double normal = (x[i] - mean) * scale * weight[i];
          const double bound = (std::abs(normal) + shift * scale * std::abs(weight[i])) * relative +
                               shift * scale * std::abs(weight[i]) + kUnit * std::abs(bias[i]);
          n_wrong += !(std::abs(y[i + 1] - (normal + bias[i])) <= 1.01 * bound);  // second order
        }
        CAPTURE(n);
        CAPTURE(offset);
        CHECK(n_wrong == 0);
      }
    }
  }
}

TEST_CASE("relu, relu_squared, add and raise") {
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(3);
    for (int64_t n = 1; n <= 70; ++n) {
      std::vector<float> x = random.reals(n + 2);
      x[1] = n % 3 == 0 ? -0.0f : n % 3 == 1 ? INFINITY : -INFINITY;
      std::vector<float> y = x;
      table->relu(y.data() + 1, n);
      std::vector<float> expected = x;
      for (int64_t i = 1; i <= n; ++i) expected[i] = x[i] > 0 ? x[i] : 0.0f;
      CHECK(same_bits(y, expected));

      y = x;
      table->relu_squared(y.data() + 1, n);
      for (int64_t i = 1; i <= n; ++i) expected[i] *= expected[i];
      CHECK(same_bits(y, expected));

      y = random.reals(n + 2);
      expected = y;
      for (int64_t i = 1; i <= n; ++i) expected[i] += x[i];  // rounded once: no choice
      table->add(y.data() + 1, x.data() + 1, n);
      CHECK(same_bits(y, expected));

      y = random.reals(n + 2);
      expected = y;
      for (int64_t i = 1; i <= n; ++i) expected[i] = std::max(expected[i], x[i]);
      table->raise(y.data() + 1, x.data() + 1, n);
      CHECK(same_bits(y, expected));
    }
  }
}

TEST_CASE("lowest selects the first in the order of Victim::before") {
  for (const CpuKernels* table : supported_kernels()) {
    CAPTURE(std::string_view(table->isa));
    Random random(9);
    for (int trial = 0; trial < 300; ++trial) {
      const int32_t n = random.integer(1, 70);
      std::vector<int32_t> positions(n);
      std::iota(positions.begin(), positions.end(), random.integer(0, 5));
      for (int32_t i = n - 1; i > 0; --i) std::swap(positions[i], positions[random.integer(0, i)]);
      std::vector<float> importances = random.reals(n);
      for (float& importance : importances) {
        if (trial % 3 == 0)
          importance = std::round(importance * 2);  // many equals, and negative ones
        if (trial % 5 == 0) importance *= 1e38f;
      }
      const int32_t begin = random.integer(0, 10);
      const int32_t end = random.integer(0, n + 5);
      const int32_t tail = trial % 3 == 0 ? 0 : random.integer(0, n);
      const int32_t tail_end = trial % 3 == 0 ? 0 : random.integer(tail, n);
      const bool equal = trial % 7 == 0;
      Victim expected{0, 0, -1};
      for (int32_t i = 0; i < n; ++i) {
        if (positions[i] < begin || positions[i] >= end) continue;
        if (positions[i] >= tail && positions[i] < tail_end) continue;
        const Victim candidate{equal ? 0.0f : importances[i], positions[i], i};
        if (expected.slot < 0 || candidate.before(expected)) expected = candidate;
      }
      CHECK(table->lowest(equal ? nullptr : importances.data(), positions.data(), n,
                          {begin, end, tail, tail_end}) == expected.slot);
    }
  }
}

}  // namespace
}  // namespace h2o

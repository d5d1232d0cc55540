// Checks of every layer with a recurrent state: it is within the bounds of its roundings, and does
// not depend on how rows are divided into steps. A test file has a Rig of the layer, a Reference,
// which computes row by row, and Rows, the inputs.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "approximate.h"
#include "recurrent_rig.h"

namespace h2o {

// The last row of inputs [n][n_channels], convolved with weights [n_taps, n_channels] channel by
// channel, then silu. bias: [n_channels], or empty.
inline std::vector<Approximate> convolved(const std::vector<std::vector<float>>& inputs,
                                          const std::vector<float>& weights, int64_t n_taps,
                                          const std::vector<float>& bias = {}) {
  const auto n = std::ssize(inputs.back());
  std::vector<Approximate> out;
  for (int64_t c = 0; c < n; ++c) {
    Sum sum;
    if (!bias.empty()) sum.add({bias[c], 0});
    for (int64_t t = 0; t < n_taps; ++t) {
      const int64_t i = std::ssize(inputs) - n_taps + t;
      const Approximate x = {i < 0 ? 0 : inputs[i][c], 0};
      sum.add(x * Approximate{weights[t * n + c], 0});
    }
    out.push_back(sum.result() * sigmoid(sum.result()));
  }
  return out;
}

// random_rows(random, sizes, n): inputs of n rows; width: of an output.
template <class Rig, class Reference, class Sizes, class RandomRows>
void check_bounds(const Sizes& sizes, int64_t width, Random& random,
                  const RandomRows& random_rows) {
  Rig rig(sizes, random);
  constexpr int32_t kRows = 9;
  const auto rows = random_rows(random, sizes, kRows);
  const std::vector<float> out = rig.step(rows, {kRows});
  Reference reference(sizes, rig);
  double worst = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const std::vector<Approximate> expected = reference.row(rows.part(sizes, row, 1));
    for (int64_t i = 0; i < width; ++i) {
      const Approximate& y = expected[i];
      // Bounds that are not much smaller than the numbers would prove nothing.
      CHECK(y.error < 0.01);
      worst = std::max(worst, in_bounds(out[row * width + i], y.value, y.error));
    }
  }
  CHECK(worst <= 1);
}

template <class Rig, class Sizes, class RandomRows>
void check_steps(const Sizes& sizes, int64_t width, Random& random, const RandomRows& random_rows) {
  Rig rig(sizes, random, 2);
  const auto first = random_rows(random, sizes, 12), second = random_rows(random, sizes, 12);
  const std::vector<float> whole = rig.step(first, {12});
  rig.reset();
  std::vector<float> parts;
  int64_t at = 0;
  for (const int32_t n : {1, 2, 5, 1, 3}) {  // beside another sequence
    auto both = first.part(sizes, at, n);
    both.append(second.part(sizes, at, n % 3));
    const std::vector<float> out = rig.step(both, {n, n % 3});
    parts.insert(parts.end(), out.begin(), out.begin() + n * width);
    at += n;
  }
  CHECK(same_bits(parts, whole));
}

}  // namespace h2o

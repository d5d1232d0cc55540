// Softmax over keys in parts, compiled once per instruction set (see cpu/kernels-inl.h). Partial
// sums are merged as in FlashAttention (arXiv 2205.14135).
#pragma once

#include "cpu/elementwise-inl.h"
#include "cpu/kernels.h"

namespace h2o {
namespace {

constexpr float kLargestFloat = 3.402823466e+38f;

float exponentiate(float* x, int64_t n, float scale, float* largest) {
  // The maximum is finite for any x, so that differences are never NaN. Four at a time, which do
  // not wait for each other.
  Vec m[4];
  for (Vec& one : m) one = broadcast(-kLargestFloat);
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) m[j] = max(load(x + i + j * kWidth), m[j]);
  }
  for (; i + kWidth <= n; i += kWidth) m[0] = max(load(x + i), m[0]);
  float most = maximum(max(max(m[0], m[1]), max(m[2], m[3])));
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  most = most < kLargestFloat ? most : kLargestFloat;
  *largest = most;

  const Vec shift = broadcast(-most);
  const Vec factor = broadcast(scale);
  Vec sums = zero();
  for (i = 0; i + kWidth <= n; i += kWidth) {
    const Vec power = exp_negative(mul(add(load(x + i), shift), factor));
    store(x + i, power);
    sums = add(sums, power);
  }
  float total = sum(sums);
  if (i < n) {
    store_first(x + i, exp_negative(mul(add(load_first(x + i, n - i), shift), factor)), n - i);
    for (; i < n; ++i) total += x[i];
  }
  return total;
}

void merge_sums(const SoftmaxSums& to, const SoftmaxSums& part, float* keep, float* take, int64_t n,
                float scale) {
  const Vec factor = broadcast(scale);
  for_vectors(n, [&](const auto& load, const auto& store) {
    const Vec before = load(to.largest);
    const Vec others = load(part.largest);
    const Vec largest = max(before, others);
    const Vec a = exp_negative(mul(sub(before, largest), factor));
    const Vec b = exp_negative(mul(sub(others, largest), factor));
    store(to.total, fma(load(to.total), a, mul(load(part.total), b)));
    store(to.largest, largest);
    store(keep, a);
    store(take, b);
  });
}

void merge_parts(const SoftmaxSums& to, float* out, const SoftmaxParts& parts, int64_t n_out,
                 float scale) {
  constexpr int64_t kTogether = 16;
  float before[kTogether], others[kTogether], largest[kTogether], keep[kTogether], take[kTogether];
  float most = *to.largest;
  Vec total = broadcast(*to.total);
  for (int64_t first = 0; first < parts.n; first += kTogether) {
    const int64_t n = parts.n - first < kTogether ? parts.n - first : kTogether;
    for (int64_t i = 0; i < n; ++i) {
      before[i] = most;
      others[i] = parts.largest[(first + i) * parts.largest_step];
      most = largest[i] = most > others[i] ? most : others[i];
    }
    for_vectors(n, [&](const auto& load, const auto& store) {
      const auto power = [&](const float* from) {
        return exp_negative(mul(sub(load(from), load(largest)), broadcast(scale)));
      };
      store(keep, power(before));
      store(take, power(others));
    });
    for (int64_t i = 0; i < n; ++i) {
      const Vec other = broadcast(parts.total[(first + i) * parts.total_step]);
      total = fma(total, broadcast(keep[i]), mul(other, broadcast(take[i])));
    }
    const float* const outs = parts.out + first * parts.out_step;
    for_vectors(n_out, [&](const auto& load, const auto& store) {
      Vec sums = load(out);
      for (int64_t i = 0; i < n; ++i) {
        const Vec other = load(outs + i * parts.out_step);
        sums = fma(sums, broadcast(keep[i]), mul(other, broadcast(take[i])));
      }
      store(out, sums);
    });
  }
  *to.largest = most;
  store_first(to.total, total, 1);
}

void weights_of(float* weights, const float* largest, const SoftmaxSums& all, int64_t n,
                float scale) {
  for_vectors(n, [&](const auto& load, const auto& store) {
    const Vec power = exp_negative(mul(sub(load(largest), load(all.largest)), broadcast(scale)));
    store(weights, div(power, load(all.total)));
  });
}

void mix(float* y, const float* x, int64_t n, float keep, float take) {
  for_vectors(n, [&](const auto& load, const auto& store) {
    store(y, fma(load(y), broadcast(keep), mul(load(x), broadcast(take))));
  });
}

// Clamped so that probabilities are never denormal.
Vec probability(Vec power, float weight) {
  return max(mul(power, broadcast(weight)), broadcast(1e-30f));
}

void weigh(float* y, int64_t n, float weight) {
  for_vectors(n,
              [&](const auto& load, const auto& store) { store(y, probability(load(y), weight)); });
}

void add_weighed(float* y, const float* x, int64_t n, float weight) {
  for_vectors(n, [&](const auto& load, const auto& store) {
    store(y, add(load(y), probability(load(x), weight)));
  });
}

}  // namespace
}  // namespace h2o

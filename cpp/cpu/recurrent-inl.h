// Kernels of layers with a recurrent state, compiled once per instruction set (see
// cpu/kernels-inl.h). A row's result does not depend on how the rows were divided into calls.
#pragma once

#include "backend/recurrent_limits.h"
#include "cpu/elementwise-inl.h"
#include "cpu/kernels.h"

namespace h2o {
namespace {

// Some channels at a time, whose last rows stay in the L1 cache.
void convolve(const Convolution& c) {
  constexpr int64_t kTogether = 64;
  float window[kMaxTaps][kTogether];  // the row of tap t at [(row + t) % n_taps]
  for (int64_t first = 0; first < c.n; first += kTogether) {
    const int64_t n = c.n - first < kTogether ? c.n - first : kTogether;
    const auto copy = [n](float* to, const float* from) {
      __builtin_memcpy(to, from, n * sizeof(float));
    };
    for (int64_t t = 0; t + 1 < c.n_taps; ++t) copy(window[t], c.before + t * c.stride + first);
    for (int64_t row = 0; row < c.n_rows; ++row) {
      float* const x = c.x + row * c.stride + first;
      copy(window[(row + c.n_taps - 1) % c.n_taps], x);
      for_vectors(n, [&](const auto& load, const auto& store) {
        Vec sum = c.bias != nullptr ? load(c.bias + first) : zero();
        for (int64_t t = 0; t < c.n_taps; ++t) {
          const float* const weights = c.weights + t * c.stride + first;
          sum = fma(load(window[(row + t) % c.n_taps]), load(weights), sum);
        }
        store(x, c.silu ? mul(sum, sigmoid(sum)) : sum);
      });
    }
    for (int64_t t = 0; t + 1 < c.n_taps; ++t) {
      copy(c.before + t * c.stride + first, window[(c.n_rows + t) % c.n_taps]);
    }
  }
}

void normalize(float* x, int64_t n, float length) {
  Vec sums = zero();
  for_vectors(n, [&](const auto& load, const auto&) { sums = fma(load(x), load(x), sums); });
  scale(x, n, length / __builtin_sqrtf(sum(sums) + 1e-6f));
}

// kBlocks blocks of columns at a time: as many sums as it takes to hide the latency of an addition.
template <int kBlocks>
void delta_rule_blocks(const DeltaRule& rule, int64_t first) {
  constexpr int kVecs = kDeltaColumns / kWidth;  // of a block
  constexpr int kAll = kBlocks * kVecs;
  const int64_t block_floats = rule.head_dim * kDeltaColumns;
  float* const state = rule.state + first * block_floats;
  const auto at = [&](int64_t i, int j) {
    return state + j / kVecs * block_floats + i * kDeltaColumns + j % kVecs * kWidth;
  };
  for (int64_t row = 0; row < rule.n_rows; ++row) {
    const float* const q = rule.q + row * rule.stride;
    const float* const k = rule.k + row * rule.stride;
    const float* const v = rule.v + row * rule.stride + first * kDeltaColumns;
    float* const out = rule.out + row * rule.out_stride + first * kDeltaColumns;
    const Vec decay = broadcast(rule.decay[row * rule.n_v_heads]);
    const Vec beta = broadcast(rule.beta[row * rule.n_v_heads]);

    Vec even[kAll], odd[kAll];  // S^T k
    for (int j = 0; j < kAll; ++j) even[j] = odd[j] = zero();
    for (int64_t i = 0; i < rule.head_dim; i += 2) {
#pragma GCC unroll 16
      for (int j = 0; j < kAll; ++j) {
        even[j] = fma(load(at(i, j)), broadcast(k[i]), even[j]);
        odd[j] = fma(load(at(i + 1, j)), broadcast(k[i + 1]), odd[j]);
      }
    }
    Vec delta[kAll], sums[kAll];
    for (int j = 0; j < kAll; ++j) {
      const Vec expected = mul(decay, add(even[j], odd[j]));
      delta[j] = mul(beta, sub(load(v + j * kWidth), expected));
      sums[j] = zero();
    }
    for (int64_t i = 0; i < rule.head_dim; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kAll; ++j) {
        const Vec s = fma(delta[j], broadcast(k[i]), mul(decay, load(at(i, j))));
        store(at(i, j), s);
        sums[j] = fma(s, broadcast(q[i]), sums[j]);
      }
    }
    for (int j = 0; j < kAll; ++j) store(out + j * kWidth, sums[j]);
  }
}

// Calls body.operator()<kBlocks>(first) for blocks of columns, as many at a time as fit in the
// registers.
template <class Body>
void for_blocks(int64_t n_blocks, const Body& body) {
  constexpr int kMost = kWidth > 8 ? 4 : kWidth > 4 ? 2 : 1;
  int64_t block = 0;
  for (; block + kMost <= n_blocks; block += kMost) body.template operator()<kMost>(block);
  for (; block < n_blocks; ++block) body.template operator()<1>(block);
}

void delta_rule(const DeltaRule& rule) {
  for_blocks(rule.n_blocks,
             [&]<int kBlocks>(int64_t first) { delta_rule_blocks<kBlocks>(rule, first); });
}

template <int kBlocks>
void scan_blocks(const StateScan& scan, int64_t first) {
  constexpr int kVecs = kDeltaColumns / kWidth;  // of a block
  constexpr int kAll = kBlocks * kVecs;
  const int64_t block_floats = scan.d_state * kDeltaColumns;
  float* const state = scan.state + first * block_floats;
  const auto at = [&](int64_t i, int j) {
    return state + j / kVecs * block_floats + i * kDeltaColumns + j % kVecs * kWidth;
  };
  for (int64_t row = 0; row < scan.n_rows; ++row) {
    const float* const x = scan.x + row * scan.stride + first * kDeltaColumns;
    const float* const b = scan.b + row * scan.stride;
    const float* const c = scan.c + row * scan.stride;
    float* const out = scan.out + row * scan.out_stride + first * kDeltaColumns;
    const Vec decay = broadcast(scan.decay[row * scan.n_heads]);
    const Vec dt = broadcast(scan.dt[row * scan.n_heads]);

    Vec input[kAll], sums[kAll];
    for (int j = 0; j < kAll; ++j) {
      input[j] = mul(dt, load(x + j * kWidth));
      sums[j] = mul(broadcast(scan.d), load(x + j * kWidth));
    }
    for (int64_t i = 0; i < scan.d_state; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kAll; ++j) {
        const Vec s = fma(input[j], broadcast(b[i]), mul(decay, load(at(i, j))));
        store(at(i, j), s);
        sums[j] = fma(s, broadcast(c[i]), sums[j]);
      }
    }
    for (int j = 0; j < kAll; ++j) store(out + j * kWidth, sums[j]);
  }
}

void scan_states(const StateScan& scan) {
  for_blocks(scan.n_blocks, [&]<int kBlocks>(int64_t first) { scan_blocks<kBlocks>(scan, first); });
}

}  // namespace
}  // namespace h2o

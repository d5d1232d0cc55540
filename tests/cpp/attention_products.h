// Helpers of the tests of attention's own products: those of split factors and those of
// rounded ones.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_check.h"
#include "cpu/isa/detect.h"

namespace h2o {

// Cached rows x [n_rows, n], and what they decode to.
struct CachedRows {
  std::vector<std::byte> bytes;
  std::vector<const std::byte*> rows;
  std::vector<float> values;  // [n_rows, n]

  CachedRows(DType dtype, const std::vector<float>& x, int64_t n)
      : bytes(byte_size(dtype, std::ssize(x))), values(x.size()) {
    const TypeKernels& type = choose_kernels("scalar").of(dtype);
    const int64_t row_bytes = byte_size(dtype, n);
    for (int64_t i = 0; i < std::ssize(x) / n; ++i) {
      std::byte* const row = bytes.data() + i * row_bytes;
      type.encode(row, x.data() + i * n, n);
      type.decode(values.data() + i * n, row, n);
      rows.push_back(row);
    }
  }
};

// The error of y, a sum of n terms term(0), term(1), ..., in bounds: bound(magnitudes of the
// terms).
template <class Term, class Bound>
double sum_error(float y, int64_t n, const Term& term, const Bound& bound) {
  double sum = 0, magnitude = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += term(i);
    magnitude += std::abs(term(i));
  }
  return in_bounds(y, sum, bound(magnitude));
}

// Two kv_heads of `group` query heads each.
inline KvShape two_heads(int32_t group, int32_t head_dim, DType k, DType v, bool may_roll = false) {
  return {.n_layers = 1,
          .n_sequences = 2,
          .n_heads = 2 * group,
          .n_kv_heads = 2,
          .head_dim = head_dim,
          .max_tokens = 1300,
          .max_rows = 700,
          .k_dtype = k,
          .v_dtype = v,
          .rope = may_roll ? rope_of(head_dim) : Rope{}};
}

// Short sequences are those of the reference, with a full cache and with eviction.
inline void check_short_sequences(Random& random, KvShape shape, const LogitRules& rules,
                                  Totals& totals) {
  shape.max_tokens = 100;
  const auto pieces = [](Random& next, const KvCache& cache) {
    std::vector<Piece> some;
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t n = std::min(next.flip() ? 1 : next.integer(1, 40), cache.room(s));
      if (n > 0) some.push_back({s, n});
    }
    return some;
  };
  for (const KvPolicy& policy : {KvPolicy{}, KvPolicy{.sinks = 1, .heavy = 30, .recent = 20}}) {
    check_against_reference(random, policy, shape, 8, pieces, totals, rules);
  }
}

// Long chunks are equivalent to their tokens one by one, for any threads.
inline void check_long_chunks(const KvShape& shape, const LogitRules& rules) {
  const KvPolicy policy{.sinks = 0, .heavy = 600, .recent = 490};
  Rig chunks(policy, shape, 1), threads(policy, shape, 3), steps(policy, shape, 1);
  for (Rig* rig : {&chunks, &threads, &steps}) rig->set_logits(rules);
  Random random(11);
  for (const int32_t n : {490, 37, 540}) {
    const Qkv in = random_qkv(random, shape, n);
    const std::vector<float> expected = steps.attend_singly(0, n, in);
    CHECK(same_bits(chunks.attend({{0, n}}, in), expected));
    CHECK(same_bits(threads.attend({{0, n}}, in), expected));
    CHECK(same_entries(chunks, 0, steps, 0, shape.n_kv_heads));
    CHECK(same_entries(threads, 0, steps, 0, shape.n_kv_heads));
  }
}

// A row does not see later values that are not finite: infinity times 0 would be NaN.
inline void check_later_values(const KvShape& shape, const LogitRules& rules) {
  const KvPolicy full{};
  Rig finite(full, shape), infinite(full, shape);
  for (Rig* rig : {&finite, &infinite}) rig->set_logits(rules);
  Random random(12);
  const Qkv in = random_qkv(random, shape, 60);
  const std::vector<float> expected = finite.attend({{0, 60}}, in);
  for (const int64_t row : {40, 41}) {  // keys of even and of odd index
    Qkv changed = in;
    changed.v[row * shape.n_kv_heads * shape.head_dim + 5] = INFINITY;  // of the first kv_head
    infinite.reset(0);
    const std::vector<float> out = infinite.attend({{0, 60}}, changed);
    const int64_t width = shape.n_heads * shape.head_dim;
    CHECK(same_bits(std::span(out).first(row * width), std::span(expected).first(row * width)));
    CHECK_FALSE(std::isfinite(out[row * width + 5]));
  }
}

}  // namespace h2o

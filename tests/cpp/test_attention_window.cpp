// Attention windows: a chunk of rows gives the same output as its rows one by one, if each is
// preceded by evicting the tokens outside its window. And scores count no other rows.
#include <doctest/doctest.h>

#include <cmath>

#include "attention_reference.h"

namespace h2o {
namespace {

// The output with the `window` newest tokens, row by row.
ReferenceHead::Output step_by_step(ReferenceHead& head, const KvShape& shape, int64_t group,
                                   const std::vector<float>& q, const std::vector<float>& k,
                                   const std::vector<float>& v) {
  ReferenceHead::Output all;
  const int64_t width = shape.head_dim;
  for (int64_t i = 0; i < std::ssize(k) / width; ++i) {
    const auto row = [&](const std::vector<float>& x, int64_t n) {
      return std::vector<float>(x.begin() + i * n, x.begin() + (i + 1) * n);
    };
    const auto one = head.step(1, row(q, group * width), row(k, width), row(v, width), false);
    all.value.insert(all.value.end(), one.value.begin(), one.value.end());
    all.bound.insert(all.bound.end(), one.bound.begin(), one.bound.end());
    std::vector<KvEntry> kept;
    for (const int32_t position : head.survivors()) kept.push_back({position, 0});
    REQUIRE(head.adopt(kept));
  }
  return all;
}

TEST_CASE("no row of a chunk sees beyond the window") {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const int32_t head_dim : {7, 64}) {
      for (const int32_t window : {2, 3, 17, 200}) {
        CAPTURE(info(dtype).name);
        CAPTURE(head_dim);
        CAPTURE(window);
        const KvShape shape{.n_heads = 3,
                            .n_kv_heads = 1,
                            .head_dim = head_dim,
                            .max_tokens = 150,
                            .max_rows = 40,
                            .k_dtype = dtype,
                            .v_dtype = dtype};
        const KvPolicy policy{.sinks = 0, .heavy = 0, .recent = window - 1};
        Random random(window);
        Rig rig(policy, shape);
        rig.set_window(window);
        ReferenceHead head(policy, shape);
        double worst = 0;
        for (const int32_t n : {5, 1, 40, 2, 1, 1, 19, 40, 3}) {
          const Qkv in = random_qkv(random, shape, n);
          const std::vector<float> out = rig.attend({{0, n}}, in);
          const ReferenceHead::Output expected =
              step_by_step(head, shape, shape.n_heads, in.q, in.k, in.v);
          REQUIRE(out.size() == expected.value.size());
          for (size_t i = 0; i < out.size(); ++i) {
            worst = std::max(worst, in_bounds(out[i], expected.value[i], expected.bound[i]));
          }
        }
        CHECK(worst <= 1);
      }
    }
  }
}

TEST_CASE("a key's score is the attention from the rows whose window it is in") {
  constexpr int32_t kRows = 40, kWindow = 7, kDim = 32;
  const KvShape shape{.n_heads = 2,
                      .n_kv_heads = 1,
                      .head_dim = kDim,
                      .max_tokens = kRows,
                      .max_rows = kRows,
                      .k_dtype = DType::f32,
                      .v_dtype = DType::f32};
  Rig rig({.sinks = 0, .heavy = 20, .recent = 20}, shape);
  rig.set_window(kWindow);
  Random random(1);
  const Qkv in = random_qkv(random, shape, kRows);
  rig.attend({{0, kRows}}, in);
  std::vector<double> expected(kRows);
  for (int32_t query = 0; query < kRows * shape.n_heads; ++query) {
    const int32_t row = query / shape.n_heads;
    const int32_t first = std::max(row - kWindow + 1, 0);
    std::vector<double> p;
    double total = 0;
    for (int32_t key = first; key <= row; ++key) {
      double logit = 0;
      for (int32_t i = 0; i < kDim; ++i) {
        logit += double{in.q[query * kDim + i]} * in.k[key * kDim + i];
      }
      p.push_back(std::exp(logit * attention_scale(shape)));
      total += p.back();
    }
    for (int32_t key = first; key <= row; ++key) expected[key] += p[key - first] / total;
  }
  // Logits are up to 32 / sqrt(32); the engine's are rounded in each of 32 sums.
  const double relative = 2 * gamma(kDim) * std::sqrt(kDim) + gamma(4 * kRows);
  const std::vector<KvEntry> entries = rig.entries(0, 0);
  REQUIRE(std::ssize(entries) == kRows);
  for (int32_t key = 0; key < kRows; ++key) {
    CHECK(std::abs(entries[key].score - expected[key]) <= relative * expected[key]);
  }
}

}  // namespace
}  // namespace h2o

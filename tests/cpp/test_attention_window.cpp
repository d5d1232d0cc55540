// Attention windows: a chunk of rows gives the same output as its rows one by one, if each is
// preceded by evicting the tokens outside its window. And scores count no other rows.
#include <doctest/doctest.h>

#include <cmath>
#include <tuple>

#include "attention_check.h"

namespace h2o {
namespace {

// The output with the `window` newest tokens, row by row.
ReferenceHead::Output step_by_step(ReferenceHead& head, const KvShape& shape,
                                   const std::vector<float>& q, const std::vector<float>& k,
                                   const std::vector<float>& v) {
  ReferenceHead::Output all;
  const int64_t width = shape.head_dim, group = shape.n_heads / shape.n_kv_heads;
  const int64_t n_rows = std::ssize(k) / width;
  for (int64_t i = 0; i < n_rows; ++i) {
    const auto row = [&](const std::vector<float>& x, int64_t n) {
      return std::vector<float>(x.begin() + i * n, x.begin() + (i + 1) * n);
    };
    const auto one = head.step(1, row(q, group * width), row(k, width), row(v, width), n_rows > 1);
    all.value.insert(all.value.end(), one.value.begin(), one.value.end());
    all.bound.insert(all.bound.end(), one.bound.begin(), one.bound.end());
    std::vector<KvEntry> kept;
    for (const int32_t position : head.survivors()) kept.push_back({position, 0});
    REQUIRE(head.adopt(kept));
  }
  return all;
}

// Batches of these numbers of rows of each sequence.
void check_window(const KvShape& shape, int32_t window, const LogitRules& rules,
                  const std::vector<std::vector<Piece>>& batches) {
  CAPTURE(info(shape.k_dtype).name);
  CAPTURE(shape.head_dim);
  CAPTURE(window);
  const KvPolicy policy{.sinks = 0, .heavy = 0, .recent = window - 1};
  Random random(window);
  Rig rig(policy, shape);
  rig.set_window(window);
  rig.set_logits(rules);
  std::vector<ReferenceHead> heads = reference_heads(policy, shape, rules);
  const auto step = [&](ReferenceHead& head, int64_t, const auto&... qkv) {
    return step_by_step(head, shape, qkv...);
  };
  for (const std::vector<Piece>& pieces : batches) {
    check_batch(random, rig, shape, heads, pieces, step,
                [](const Piece&, int32_t, const ReferenceHead&) {});
  }
}

TEST_CASE("no row of a chunk sees beyond the window") {
  for (const DType dtype : {DType::f32, DType::f16}) {
    for (const int32_t head_dim : {7, 64}) {
      for (const int32_t window : {2, 3, 17, 200}) {
        const KvShape shape{.n_heads = 3,
                            .n_kv_heads = 1,
                            .head_dim = head_dim,
                            .max_tokens = 150,
                            .max_rows = 40,
                            .k_dtype = dtype,
                            .v_dtype = dtype};
        check_window(shape, window, {},
                     {{{0, 5}},
                      {{0, 1}},
                      {{0, 40}},
                      {{0, 2}},
                      {{0, 1}},
                      {{0, 1}},
                      {{0, 19}},
                      {{0, 40}},
                      {{0, 3}}});
      }
    }
  }
}

// Chunks that begin before a window is full, that are longer than it, and that are short, with
// cached keys in no order; beside another sequence. A device skips tiles of keys, and may split the
// rest.
TEST_CASE("windows with slopes, soft-caps and sinks, of every type") {
  struct Case {
    DType dtype;
    int32_t head_dim, group, window;
    bool rolling;
  };
  int32_t n_cases = 0;
  for (const auto& [dtype, head_dim, group, window, rolling] :
       {Case{DType::f16, 64, 3, 30, false}, Case{DType::bf16, 20, 1, 100, false},
        Case{DType::q8_0, 96, 4, 20, true}, Case{DType::f16, 100, 2, 140, true},
        Case{DType::bf16, 256, 1, 40, false}, Case{DType::f32, 12, 2, 70, true}}) {
    KvShape shape{.n_sequences = 2,
                  .n_heads = 2 * group,
                  .n_kv_heads = 2,
                  .head_dim = head_dim,
                  .max_tokens = 600,
                  .max_rows = 210,
                  .k_dtype = dtype,
                  .v_dtype = dtype};
    if (rolling) shape.rope = still(head_dim);
    Random random(head_dim);
    LogitRules rules{.of_ranks = rolling};
    if (n_cases % 2 == 0) rules.slopes = random.reals(shape.n_heads, 0.01f, 0.3f);
    if (n_cases % 3 == 0) rules.softcap = 2;
    if (++n_cases % 2 == 0) rules.sinks = random.reals(shape.n_heads, -3, 3);
    check_window(shape, window, rules,
                 {{{0, 90}, {1, 1}}, {{1, 3}, {0, 200}}, {{0, 1}, {1, 50}}, {{1, 20}, {0, 9}}});
  }
}

void check_scores(DType dtype, int32_t head_dim, int32_t window, bool sloped) {
  CAPTURE(info(dtype).name);
  CAPTURE(window);
  constexpr int32_t kRows = 250;
  const KvShape shape{.n_heads = 2,
                      .n_kv_heads = 1,
                      .head_dim = head_dim,
                      .max_tokens = kRows,
                      .max_rows = 150,
                      .k_dtype = dtype,
                      .v_dtype = dtype};
  Rig rig({.sinks = 0, .heavy = 125, .recent = 125}, shape);
  rig.set_window(window);
  const std::vector<float> slopes = {sloped ? 0.1f : 0, sloped ? 0.02f : 0};
  rig.set_logits({.slopes = sloped ? slopes : std::vector<float>()});
  Random random(1);
  const Qkv in = random_qkv(random, shape, kRows);
  rig.attend({{0, 150}}, in.rows(shape, 0, 150));
  rig.attend({{0, 100}}, in.rows(shape, 150, 100));
  std::vector<double> expected(kRows);
  for (int32_t query = 0; query < kRows * shape.n_heads; ++query) {
    const int32_t row = query / shape.n_heads, head = query % shape.n_heads;
    const int32_t first = std::max(row - window + 1, 0);
    std::vector<double> p;
    double total = 0;
    for (int32_t key = first; key <= row; ++key) {
      double logit = 0;
      for (int32_t i = 0; i < head_dim; ++i) {
        logit += double{in.q[query * head_dim + i]} * in.k[key * head_dim + i];
      }
      p.push_back(std::exp(logit * attention_scale(shape) - slopes[head] * (row - key)));
      total += p.back();
    }
    for (int32_t key = first; key <= row; ++key) expected[key] += p[key - first] / total;
  }
  // Logits are sums of numbers up to head_dim / sqrt(head_dim) in all, and a slope's; each of
  // the engine's is rounded in each of head_dim sums, and the cache or both factors to 16 bits.
  const double magnitude = std::sqrt(head_dim) + (sloped ? 0.1 * window : 0);
  const double rounded = dtype == DType::f32 ? 0 : dtype == DType::f16 ? 0x1p-10 : 0x1.4p-8;
  const double logit = (gamma(head_dim + 4) + rounded) * magnitude +
                       (dtype != DType::f32 ? tensor_core_gamma(head_dim) * magnitude : 0);
  const double relative = std::expm1(2 * logit) + power_error(2 * magnitude) + gamma(4 * kRows);
  const std::vector<KvEntry> entries = rig.entries(0, 0);
  REQUIRE(std::ssize(entries) == kRows);
  for (int32_t key = 0; key < kRows; ++key) {
    CHECK(std::abs(entries[key].score - expected[key]) <= relative * expected[key]);
  }
}

// A device divides these rows among several blocks.
TEST_CASE("a key's score is the attention from the rows whose window it is in") {
  check_scores(DType::f32, 32, 7, false);
  check_scores(DType::f16, 64, 7, false);
  check_scores(DType::f16, 64, 70, true);
  check_scores(DType::bf16, 80, 150, false);
}

}  // namespace
}  // namespace h2o

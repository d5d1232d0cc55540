// Modifications of attention logits: soft-caps, sinks and slopes; with chunks and single rows of
// sizes that use different kernels.
#include <doctest/doctest.h>

#include "attention_check.h"

namespace h2o {
namespace {

constexpr KvPolicy kH2o{.sinks = 1, .heavy = 9, .recent = 8};

struct Heads {
  int32_t head_dim, group;
};

// Every combination of rules in supported models, and all of them together.
std::vector<LogitRules> random_rules(Random& random, int32_t n_heads) {
  const std::vector<float> sinks = random.reals(n_heads, -9, 9);
  const std::vector<float> slopes = random.reals(n_heads, 0.01f, 0.6f);
  return {{.softcap = 1.5f},
          {.softcap = 50},
          {.sinks = sinks},
          {.slopes = slopes},
          {.softcap = 3, .sinks = sinks},
          {.softcap = 3, .sinks = sinks, .slopes = slopes}};
}

// Chunks that fit and that do not, of one sequence and of two; and single rows.
std::vector<Piece> next_pieces(Random& random, const KvCache& cache) {
  std::vector<Piece> pieces;
  const bool decodes = random.flip();
  for (int32_t sequence = 0; sequence < cache.shape().n_sequences; ++sequence) {
    const int32_t n = decodes || random.flip() ? 1 : random.integer(2, 21);
    if (n <= cache.room(sequence)) pieces.push_back({sequence, n});
  }
  return pieces;
}

void check(DType dtype, const Heads& heads, bool rolling) {
  CAPTURE(rolling);
  constexpr int32_t kKvHeads = 2;
  KvShape shape{.n_layers = 1,
                .n_sequences = 2,
                .n_heads = kKvHeads * heads.group,
                .n_kv_heads = kKvHeads,
                .head_dim = heads.head_dim,
                .max_tokens = 90,
                .max_rows = 42,
                .k_dtype = dtype,
                .v_dtype = dtype};
  if (rolling) shape.rope = still(heads.head_dim);
  Random random(heads.head_dim + heads.group);
  Totals totals;
  for (LogitRules& rules : random_rules(random, shape.n_heads)) {
    CAPTURE(rules.softcap);
    CAPTURE(rules.sinks.size());
    CAPTURE(rules.slopes.size());
    rules.of_ranks = rolling;
    check_against_reference(random, kH2o, shape, 12, next_pieces, totals, rules);
    if (!rolling) check_against_reference(random, KvPolicy(), shape, 3, next_pieces, totals, rules);
  }
  CHECK(totals.n_outputs > 5000);
  CHECK(totals.n_evictions > 100);  // about 600; the minimum of 200,000 simulated runs was 116
}

TEST_CASE("attention with soft-caps, sinks and slopes") {
  int turn = 1;
  for (const DType dtype : {DType::f32, DType::f16, DType::q8_0}) {
    ++turn;
    for (const Heads& heads : {Heads{64, 3}, Heads{96, 1}, Heads{32, 9}, Heads{256, 2}}) {
      if (brief() && ++turn % 2 == 0) continue;  // f32 and q8_0 have the heads that f16 has not
      if (on_gpu() && dtype == DType::q8_0 && heads.head_dim > 64) continue;  // slow if emulated
      check(dtype, heads, false);
    }
    check(dtype, {64, 2}, true);
  }
  check(DType::bf16, {7, 1}, false);
}

// With more than one split of the slots in decode.
TEST_CASE("attention with sinks and soft-caps over many slots") {
  const KvShape shape{.n_layers = 1,
                      .n_sequences = 1,
                      .n_heads = 2,
                      .n_kv_heads = 1,
                      .head_dim = 64,
                      .max_tokens = 400,
                      .max_rows = 300,
                      .k_dtype = DType::f16,
                      .v_dtype = DType::f16};
  Random random(1);
  Totals totals;
  int step = 0;
  const auto pieces = [&](Random&, const KvCache&) {
    return std::vector<Piece>{{0, step++ == 0 ? 300 : 1}};
  };
  check_against_reference(random, {.sinks = 0, .heavy = 150, .recent = 149}, shape, 4, pieces,
                          totals, {.softcap = 5, .sinks = {6, -3}});
  CHECK(totals.n_outputs > 303 * 64);
  CHECK(totals.n_evictions >= 3);
}

}  // namespace
}  // namespace h2o

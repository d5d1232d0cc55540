// Attention over the bounded cache, step by step from the same state, compared with a simple
// reference in double.
#include <doctest/doctest.h>

#include <utility>

#include "attention_check.h"
#include "core/error.h"

namespace h2o {
namespace {

KvPolicy random_policy(Random& random) {
  const auto some = [&] { return random.integer(1, 12); };
  const int32_t sinks = random.integer(0, 3), begin = sinks + random.integer(0, 20), tail = some();
  switch (random.integer(0, 10)) {
    case 8:
      return {
          .sinks = sinks, .recent = tail + some(), .tail_begin = begin, .tail_end = begin + tail};
    case 9:
      return {.sinks = sinks,
              .heavy = some(),
              .recent = tail + random.integer(0, 3),
              .tail_begin = begin,
              .tail_end = begin + tail};
    case 10:
      return {.sinks = sinks, .heavy = some(), .recent = some(), .scoring = Scoring::random};
    case 0:
      return {};  // full
    case 1:
      return {.sinks = 0, .heavy = 0, .recent = some()};
    case 2:
      return {.sinks = some(), .heavy = 0, .recent = some()};
    case 3:
      return {.sinks = some(), .heavy = 0, .recent = 0};
    case 4:
      return {.sinks = 0, .heavy = some(), .recent = 0};
    case 5:
      return {.sinks = some(), .heavy = some(), .recent = random.integer(0, 3)};
    default:
      return {.sinks = 0, .heavy = some(), .recent = some()};
  }
}

KvShape random_shape(Random& random, DType dtype) {
  const int32_t n_kv_heads = random.integer(1, 3);
  return {.n_layers = 1,
          .n_sequences = random.integer(1, 3),
          .n_heads = n_kv_heads * random.integer(1, 4),
          .n_kv_heads = n_kv_heads,
          .head_dim = random.integer(1, 40),
          .max_tokens = random.integer(1, 60),
          .max_rows = 64,
          .k_dtype = dtype,
          .v_dtype = dtype};
}

// Splits a batch's rows over sequences: some get none, some one, some more than the pool holds.
std::vector<Piece> random_pieces(Random& random, const KvCache& cache) {
  std::vector<Piece> pieces;
  int32_t rows_left = cache.shape().max_rows;
  for (int32_t sequence = 0; sequence < cache.shape().n_sequences; ++sequence) {
    if (random.integer(0, 3) == 0) continue;
    int32_t n = random.flip() ? 1 : random.integer(1, 25);
    n = std::min({n, rows_left, cache.room(sequence)});
    if (n > 0) pieces.push_back({sequence, n});
    rows_left -= n;
  }
  if (random.flip()) std::reverse(pieces.begin(), pieces.end());
  return pieces;
}

TEST_CASE("attend is softmax attention over the tokens that H2O keeps") {
  const int n_trials = brief() ? (on_gpu() ? 15 : 25) : on_gpu() ? 50 : 150;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Random random(1);
    Totals totals;
    for (int trial = 0; trial < n_trials; ++trial) {
      const KvPolicy policy = random_policy(random);
      KvShape shape = random_shape(random, dtype);
      if (trial % 5 == 0) shape.head_dim = 64;  // whole vectors
      check_against_reference(random, policy, shape, 10, random_pieces, totals);
    }
    // The trials are meaningful: rounding explains almost none of the evictions, and few where
    // logits are products of f16.
    CHECK(totals.n_outputs > 600 * n_trials);
    CHECK(totals.n_evictions > 30 * n_trials);
    CHECK(totals.n_close_calls <= totals.n_evictions / (on_gpu() ? 50 : 1000));
  }
}

// Chunks evict many tokens, one, and none, and are longer and shorter than the rows that count.
TEST_CASE("scores of questions are the largest attention of the last rows, pooled") {
  const int n_trials = brief() ? 9 : on_gpu() ? 20 : 50;
  for (const DType dtype : {DType::f32, DType::f16}) {
    Random random(6);
    Totals totals;
    for (int trial = 0; trial < n_trials; ++trial) {
      const KvPolicy policy{.sinks = random.integer(0, 3),
                            .heavy = random.integer(1, 40),
                            .recent = random.integer(0, 20),
                            .scoring = Scoring::question};
      KvShape shape = random_shape(random, dtype);
      shape.max_tokens = random.integer(100, 300);
      shape.max_rows = 120;
      if (trial % 3 == 0) shape.head_dim = 64;  // tensor cores
      const auto pieces = [](Random& next, const KvCache& cache) {
        std::vector<Piece> pieces;
        int32_t rows_left = cache.shape().max_rows;
        for (int32_t sequence = 0; sequence < cache.shape().n_sequences; ++sequence) {
          const int32_t most = std::min(rows_left, cache.room(sequence));
          const int32_t n = std::min(next.flip() ? next.integer(1, 3) : next.integer(1, 120), most);
          if (n > 0) pieces.push_back({sequence, n});
          rows_left -= n;
        }
        return pieces;
      };
      check_against_reference(random, policy, shape, 4, pieces, totals);
    }
    CHECK(totals.n_evictions > 50 * n_trials);
    CHECK(totals.n_close_calls <= totals.n_evictions / 50);
  }
}

// More than a block of a device has threads; the slots of later chunks are not in order.
TEST_CASE("scores of questions are pooled over many slots") {
  const KvShape shape{
      .n_heads = 1, .n_kv_heads = 1, .head_dim = 8, .max_tokens = 1400, .max_rows = 1150};
  Random random(8);
  Totals totals;
  int32_t n = 1150;
  const auto pieces = [&](Random&, const KvCache&) {
    return std::vector<Piece>{{0, std::exchange(n, 60)}};
  };
  check_against_reference(random,
                          {.sinks = 2, .heavy = 1080, .recent = 20, .scoring = Scoring::question},
                          shape, 4, pieces, totals);
  CHECK(totals.n_evictions == 1150 + 3 * 60 - 1102);
}

TEST_CASE("without heavy hitters the cache keeps sinks and a window") {
  for (const int32_t sinks : {0, 1, 3}) {
    for (const int32_t recent : {0, 1, 5}) {
      if (sinks + recent == 0) continue;
      CAPTURE(sinks);
      CAPTURE(recent);
      const KvShape shape{
          .n_heads = 2, .n_kv_heads = 2, .head_dim = 5, .max_tokens = 100, .max_rows = 40};
      Rig rig({.sinks = sinks, .heavy = 0, .recent = recent}, shape);
      Random random(2);
      int32_t length = 0;
      for (const int32_t n : {1, 1, 1, 3, 1, 20, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 9}) {
        rig.attend({{0, n}}, random_qkv(random, shape, n));
        length += n;
        std::vector<int32_t> expected;
        for (int32_t position = 0; position < length; ++position) {
          if (length <= sinks + recent || position < sinks || position >= length - recent) {
            expected.push_back(position);
          }
        }
        std::vector<int32_t> actual;
        for (const KvEntry& entry : rig.entries(0, 1)) actual.push_back(entry.position);
        CHECK(actual == expected);
      }
    }
  }
}

TEST_CASE("of equal scores the older token is kept") {
  // Token i's key and query are a large multiple of unit vector i: it attends to itself alone and
  // every score is exactly 1, because e^-80 is negligible in f32.
  constexpr int32_t kTokens = 32;
  const KvShape shape{.n_heads = 1,
                      .n_kv_heads = 1,
                      .head_dim = kTokens,
                      .max_tokens = kTokens,
                      .max_rows = kTokens};
  Qkv all{std::vector<float>(kTokens * kTokens), std::vector<float>(kTokens * kTokens),
          std::vector<float>(kTokens * kTokens, 1.0f)};
  for (int i = 0; i < kTokens; ++i) {
    all.q[i * kTokens + i] = 100;
    all.k[i * kTokens + i] = 100;
  }
  for (const std::vector<int32_t>& chunks : std::vector<std::vector<int32_t>>{
           std::vector<int32_t>(kTokens, 1), {kTokens}, {10, 1, 1, 1, 15, 1, 1, 1, 1}, {3, 29}}) {
    Rig rig({.sinks = 0, .heavy = 4, .recent = 2}, shape);
    int32_t length = 0;
    for (const int32_t n : chunks) {
      rig.attend({{0, n}}, all.rows(shape, length, n));
      length += n;
    }
    REQUIRE(length == kTokens);
    std::vector<int32_t> positions;
    for (const KvEntry& entry : rig.entries(0, 0)) {
      positions.push_back(entry.position);
      CHECK(entry.score == 1.0f);
    }
    CHECK(positions == std::vector<int32_t>{0, 1, 2, 3, kTokens - 2, kTokens - 1});
  }
}

TEST_CASE("allocated bytes depend on the budget only, not on the number of tokens") {
  const KvPolicy policy{.sinks = 1, .heavy = 6, .recent = 4};
  const KvShape shape{.n_layers = 3,
                      .n_sequences = 2,
                      .n_heads = 4,
                      .n_kv_heads = 2,
                      .head_dim = 16,
                      .max_tokens = 1000,
                      .max_rows = 30,
                      .k_dtype = DType::f16,
                      .v_dtype = DType::f16};
  Rig rig(policy, shape);
  const size_t bytes = rig.cache().bytes();
  // K and V in f16, positions and scores of budget + 1 slots for each layer, sequence and kv_head;
  // the next slots, and each sequence's policy; a layer's six arrays are each rounded up to a cache
  // line.
  const size_t heads = 3 * 2 * 2;
  const size_t needed = heads * (12 * (2 * 16 * 2 + 4 + 4) + 4) + 3 * 2 * sizeof(KvPolicy);
  CHECK(bytes >= needed);
  CHECK(bytes < needed + 3 * 6 * 64);
  CHECK(KvCache::bytes({&policy, 1}, shape) == bytes);
  KvShape longer = shape;
  longer.max_tokens = 1'000'000;
  CHECK(KvCache::bytes({&policy, 1}, longer) == bytes);

  Random random(3);
  for (int i = 0; i < 50; ++i) {
    rig.attend({{0, 1}, {1, 29}}, random_qkv(random, shape, 30));
    REQUIRE(rig.entries(1, 0).size() == static_cast<size_t>(std::min((i + 1) * 29, 11)));
  }
  CHECK(rig.cache().bytes() == bytes);
  CHECK(rig.cache().length(1) == 50 * 29);
}

TEST_CASE("Q5_0 is not cached on CUDA") {
  const KvShape shape{
      .n_heads = 4, .n_kv_heads = 2, .head_dim = 32, .max_tokens = 10, .v_dtype = DType::q5_0};
  if (on_cuda()) {
    CHECK_THROWS_WITH_AS(Rig(KvPolicy(), shape), doctest::Contains("in Q5_0; use device=cpu"),
                         InvalidArgument);
  } else {
    CHECK_NOTHROW(Rig(KvPolicy(), shape));
  }
}

TEST_CASE("invalid cache shapes are rejected") {
  const auto backend = make_backend("cpu", 1);
  const KvShape good{.n_heads = 4, .n_kv_heads = 2, .head_dim = 8, .max_tokens = 10};
  const auto make = [&](const KvPolicy& policy, const KvShape& shape) {
    KvCache(*backend, policy, shape);
  };
  CHECK_NOTHROW(make({}, good));
  CHECK_THROWS_AS(make({.sinks = 0, .heavy = 0, .recent = 0}, good), InvalidArgument);
  CHECK_THROWS_AS(make({.sinks = -1, .heavy = 2, .recent = 2}, good), InvalidArgument);
  CHECK_THROWS_AS(make({.sinks = 1, .heavy = -2, .recent = 2}, good), InvalidArgument);
  CHECK_THROWS_AS(make({.sinks = 1, .heavy = 2, .recent = -1}, good), InvalidArgument);
  const auto refused = [&](auto change) {
    KvShape shape = good;
    change(shape);
    CHECK_THROWS_AS(make({}, shape), InvalidArgument);
  };
  refused([](KvShape& s) { s.n_layers = -1; });
  refused([](KvShape& s) { s.n_sequences = 0; });
  refused([](KvShape& s) { s.n_heads = 5; });
  refused([](KvShape& s) { s.n_kv_heads = 0; });
  refused([](KvShape& s) { s.head_dim = -8; });
  refused([](KvShape& s) { s.max_tokens = 0; });
  refused([](KvShape& s) { s.max_rows = 0; });
  refused([](KvShape& s) { s.k_dtype = DType::q5_1; });
  KvShape huge = good;
  huge.n_layers = huge.n_sequences = huge.max_tokens = 1 << 30;
  CHECK_THROWS_AS(make({}, huge), OutOfMemory);

  KvCache cache(*backend, KvPolicy{}, good);
  CHECK_THROWS_AS(cache.reset(1), InvalidArgument);
  CHECK_THROWS_AS(cache.reset(-1), InvalidArgument);
  CHECK_THROWS_AS(cache.room(1), InvalidArgument);
  CHECK_THROWS_AS(cache.entries(1, 0, 0), InvalidArgument);
  CHECK_THROWS_AS(cache.entries(0, 0, 2), InvalidArgument);
  CHECK(cache.room(0) == 10);
}

}  // namespace
}  // namespace h2o

// Caches whose layers differ in their heads or share slots: sizes, limits and contents. What they
// compute is compared with transformers in tests/python/test_gemma4.py.
#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <span>
#include <vector>

#include "attention_rig.h"
#include "bounds.h"
#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "kv/cache.h"

namespace h2o {
namespace {

constexpr KvPolicy kFew = {.sinks = 1, .heavy = 3, .recent = 2};

KvShape mixed_shape() {
  return {.n_layers = 4,
          .n_heads = 4,
          .n_kv_heads = 2,
          .head_dim = 16,
          .layer_heads = {{2, 8}, {1, 16}, {2, 8}, {1, 16}},
          .max_tokens = 20,
          .k_dtype = DType::f32,
          .v_dtype = DType::f32};
}

int64_t bytes_of(const KvShape& shape) {
  return static_cast<int64_t>(KvCache::bytes({&kFew, 1}, shape));
}

TEST_CASE("each layer has slots for its own heads") {
  KvShape same = mixed_shape();
  same.layer_heads.clear();
  CHECK(bytes_of(mixed_shape()) < bytes_of(same));
  const auto backend = test_backend();
  const KvCache cache(*backend, kFew, mixed_shape());
  CHECK(cache.layer(0).head_dim == 8);
  CHECK(cache.layer(1).head_dim == 16);
  CHECK(cache.entries(1, 0, 1).empty());  // a head that other layers have
  CHECK_THROWS_AS(cache.entries(1, 0, 2), InvalidArgument);
}

TEST_CASE("layers that share a cache have one set of slots") {
  KvShape shape = mixed_shape();
  const int64_t own = bytes_of(shape);
  shape.sources = {0, 1, 0, 1};
  CHECK(bytes_of(shape) < own * 6 / 10);
  const auto backend = test_backend();
  shape.n_sequences = 2;
  KvCache cache(*backend, std::vector<KvPolicy>{kFew, kFew, KvPolicy(), KvPolicy()}, shape);
  CHECK(cache.policy(2, 1) == kFew);
  cache.reserve_sequences(3);
  for (int32_t l = 2; l < 4; ++l) {
    const KvView &mine = cache.layer(l), &its = cache.layer(l - 2);
    CHECK(mine.k == its.k);
    CHECK(mine.scores == its.scores);
    CHECK(mine.staged_k == its.staged_k);
    CHECK(mine.policies == its.policies);
    CHECK(cache.policy(l, 2) == kFew);
  }
  CHECK(cache.layer(0).staged_k != cache.layer(1).staged_k);
}

// Two layers with the same keys and values, in caches of their own or in one.
struct TwoLayers {
  TwoLayers(const KvPolicy& policy, bool shares, std::unique_ptr<Backend> on)
      : backend(std::move(on)),
        cache(*backend, policy,
              {.n_layers = 2,
               .n_heads = 4,
               .n_kv_heads = 2,
               .head_dim = 16,
               .max_tokens = 40,
               .max_rows = 30,
               .k_dtype = DType::f32,
               .v_dtype = DType::f32,
               .sources = shares ? std::vector<int32_t>{0, 0} : std::vector<int32_t>{}}),
        shares(shares) {}

  // The outputs of both layers, for n rows; in another case than `shares`, the second stores too.
  std::vector<float> attend(int32_t n, const std::vector<float>& numbers) {
    Batch batch;
    batch.add(0, cache.length(0), std::vector<int32_t>(n));
    std::vector<float> all;
    for (int32_t layer = 0; layer < 2; ++layer) {
      const auto part = [&](int64_t at, int64_t width) {
        return DeviceMatrix(*backend, std::span(numbers).subspan(at * n, width * n), n, width);
      };
      const DeviceMatrix q = part(layer * 64, 64), k = part(128, 32), v = part(160, 32);
      const DeviceMatrix out(*backend, n, 64);
      const bool reads = shares && layer == 1;
      const Attention attention{.out = out,
                                .q = q,
                                .k = reads ? Tensor() : Tensor(k),
                                .v = reads ? Tensor() : Tensor(v),
                                .rope = {},
                                .scale = 0.25f,
                                .sinks = {},
                                .slopes = {},
                                .evicts = !shares || layer == 1};
      backend->run(batch, [&] { backend->attend(attention, cache.layer(layer), batch); });
      const std::vector<float> rows = out.read();
      all.insert(all.end(), rows.begin(), rows.end());
    }
    cache.advance(batch);
    return all;
  }

  std::unique_ptr<Backend> backend;
  KvCache cache;
  const bool shares;
};

TEST_CASE("a layer that reads another's cache attends as with its own" * doctest::skip(on_gpu())) {
  for (const int n_threads : {1, 3}) {
    for (const KvPolicy& policy :
         {KvPolicy(), KvPolicy{.sinks = 1, .heavy = 20, .recent = 10}, kFew}) {
      CAPTURE(policy.heavy);
      TwoLayers one(policy, true, test_backend(n_threads));
      TwoLayers two(policy, false, test_backend(n_threads));
      Random random(5);
      // The first chunk fits or is staged; the others are attended to by what is kept of it.
      for (const int32_t n : {9, 1, 1, 12}) {
        CAPTURE(n);
        const std::vector<float> numbers = random.reals(n * int64_t{192});
        const std::vector<float> mine = one.attend(n, numbers), its = two.attend(n, numbers);
        const bool evicts = one.cache.length(0) > policy.budget();
        if (!evicts || one.cache.length(0) == n) CHECK(same_bits(mine, its));
        CHECK(same_entries(one.cache.entries(0, 0, 1), one.cache.entries(1, 0, 1)));
        if (evicts) break;
        for (size_t i = 0; i < one.cache.entries(0, 0, 1).size(); ++i) {
          const float sum =
              two.cache.entries(0, 0, 1)[i].score + two.cache.entries(1, 0, 1)[i].score;
          // Two sums of at most 2 * 23 numbers up to 1.
          CHECK(std::abs(one.cache.entries(0, 0, 1)[i].score - sum) <= gamma(46) * sum);
        }
      }
    }
  }
}

TEST_CASE("scores of layers that share a cache match the CPU") {
  KvPolicy policy{.sinks = 1, .heavy = 20, .recent = 10};
  for (const Scoring scoring : {Scoring::sum, Scoring::question}) {
    for (const float decay : {1.0f, 0.8f}) {
      CAPTURE(decay);
      policy.scoring = scoring, policy.decay = decay;
      TwoLayers device(policy, true, test_backend(2));
      TwoLayers cpu(policy, true, make_cpu_backend(1, "scalar"));
      Random random(6);
      for (const int32_t n : {9, 1, 1, 12}) {
        const std::vector<float> numbers = random.reals(n * int64_t{192});
        device.attend(n, numbers);
        cpu.attend(n, numbers);
        const std::vector<KvEntry> mine = device.cache.entries(1, 0, 1);
        const std::vector<KvEntry> its = cpu.cache.entries(0, 0, 1);
        REQUIRE(mine.size() == its.size());
        // Logits are sums of 16 products up to 4, scaled by 1/4, so up to 16; a probability is a
        // quotient of powers, and a score a sum of up to 4 * 23, each with a decay.
        const double relative = 4 * (16 * gamma(20) + power_error(-32)) + gamma(200);
        for (size_t i = 0; i < mine.size(); ++i) {
          CHECK(in_bounds(mine[i].score, its[i].score, relative * its[i].score) <= 1);
        }
      }
    }
  }
}

TEST_CASE("what layers cannot share is refused") {
  const auto refused = [](const auto& change) {
    KvShape shape = mixed_shape();
    shape.sources = {0, 1, 0, 1};
    change(shape);
    CHECK_THROWS_AS(bytes_of(shape), InvalidArgument);
  };
  refused([](KvShape& shape) { shape.sources = {0, 1, 0}; });
  refused([](KvShape& shape) { shape.sources = {0, 1, 1, 0}; });  // other heads
  refused([](KvShape& shape) { shape.sources = {2, 1, 2, 1}; });  // a later layer
  refused([](KvShape& shape) { shape.layer_heads = {}, shape.sources = {0, 0, 1, 1}; });
  refused([](KvShape& shape) { shape.max_drafts = 2; });
  refused([](KvShape& shape) { shape.rope.layout = RopeLayout::halves; });
  refused([](KvShape& shape) { shape.archive.n_recalled = 1; });
  refused([](KvShape& shape) { shape.layer_heads.pop_back(); });
  refused([](KvShape& shape) { shape.layer_heads[1].n = 3; });
  refused([](KvShape& shape) { shape.layer_heads[1].dim = 17; });
}

}  // namespace
}  // namespace h2o

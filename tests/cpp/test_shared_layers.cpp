// Caches whose layers differ in their heads or share slots: sizes, limits and contents. What they
// compute is compared with transformers in tests/python/test_gemma4.py.
#include <doctest/doctest.h>

#include <vector>

#include "core/error.h"
#include "device_rig.h"
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
  if (!backend->capabilities().shared_layers) {
    CHECK_THROWS_WITH_AS(KvCache(*backend, kFew, shape),
                         doctest::Contains("does not support layers that share a cache"),
                         InvalidArgument);
    return;
  }
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

// AttentionCache: the cache alone, compared with the reference in double.
#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "attention_reference.h"
#include "core/error.h"
#include "device_rig.h"
#include "kv/attention_cache.h"
#include "random_weights.h"

namespace h2o {
namespace {

using Lengths = AttentionCache::Lengths;

const KvShape kShape{.n_sequences = 2,
                     .n_heads = 4,
                     .n_kv_heads = 2,
                     .head_dim = 16,
                     .max_tokens = 64,
                     .k_dtype = DType::f32,
                     .v_dtype = DType::f32};
constexpr KvPolicy kPolicy{.sinks = 1, .heavy = 4, .recent = 3};

AttentionCache make_cache(const KvPolicy& policy = kPolicy, const KvShape& shape = kShape,
                          const std::optional<Rotary>& rotary = {}, const HeadLogits& logits = {}) {
  return {test_backend(), policy, shape, rotary, logits, std::nullopt};
}

struct Rows {
  int64_t n, heads;
  std::vector<float> values;

  Rows(int64_t n, int64_t heads, Random& random)
      : n(n), heads(heads), values(random.reals(n * heads * kShape.head_dim)) {}
  operator FloatArray() const { return {values.data(), {n, heads, kShape.head_dim}}; }

  // Rows [begin, begin + count) of heads [head, head + n_heads).
  std::vector<float> part(int64_t begin, int64_t count, int64_t head, int64_t n_heads) const {
    std::vector<float> part;
    for (int64_t i = begin; i < begin + count; ++i) {
      const auto row = values.begin() + (i * heads + head) * kShape.head_dim;
      part.insert(part.end(), row, row + n_heads * kShape.head_dim);
    }
    return part;
  }
};

template <class Body>
std::string error(const Body& body) {
  try {
    body();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("an AttentionCache attends, evicts and scores as the reference does") {
  AttentionCache cache = make_cache();
  std::vector<ReferenceHead> heads(size_t{2} * kShape.n_kv_heads, {kPolicy, kShape});
  Random random(7);
  const int32_t group = kShape.n_heads / kShape.n_kv_heads;
  for (const Lengths& lengths :
       {Lengths{{0, 3}, {1, 1}}, Lengths{{1, 7}}, Lengths{{1, 1}, {0, 9}}, Lengths{{0, 1}, {1, 1}},
        Lengths{{1, 1}, {0, 1}}, Lengths{{0, 1}}}) {
    int64_t n = 0;
    for (const auto& [sequence, rows] : lengths) n += rows;
    const Rows q(n, kShape.n_heads, random);
    const Rows k(n, kShape.n_kv_heads, random), v(n, kShape.n_kv_heads, random);
    const std::vector<float> out = cache.attend(q, k, v, lengths);
    REQUIRE(std::ssize(out) == n * kShape.n_heads * kShape.head_dim);

    int64_t begin = 0;
    for (const auto& [sequence, rows] : lengths) {
      for (int32_t h = 0; h < kShape.n_kv_heads; ++h) {
        ReferenceHead& head = heads[sequence * kShape.n_kv_heads + h];
        const auto expected = head.step(rows, q.part(begin, rows, h * group, group),
                                        k.part(begin, rows, h, 1), v.part(begin, rows, h, 1), true);
        const int64_t width = group * kShape.head_dim;
        for (int64_t i = 0; i < rows * width; ++i) {
          const int64_t row = begin + i / width;
          const float got = out[(row * kShape.n_kv_heads + h) * width + i % width];
          CHECK(std::abs(got - expected.value[i]) <= expected.bound[i]);
        }
        const std::vector<KvEntry> kept = cache.kept(h, sequence);
        CHECK(head.adopt(kept));
        for (size_t i = 0; i < kept.size(); ++i) {
          CHECK(std::abs(kept[i].score - head.kept()[i].score) <= head.kept()[i].score_error());
        }
      }
      begin += rows;
    }
  }
  CHECK(cache.length(0) == 15);
  CHECK(cache.length(1) == 11);
  CHECK(cache.kept(0, 0).size() == static_cast<size_t>(kPolicy.budget()));
}

TEST_CASE("a sequence of an AttentionCache begins anew after a reset, with another policy") {
  AttentionCache cache = make_cache();
  Random random(8);
  const Rows q(12, kShape.n_heads, random), k(12, kShape.n_kv_heads, random);
  const std::vector<float> first = cache.attend(q, k, k, {{0, 12}});
  cache.reset(0, std::nullopt);
  CHECK(cache.length(0) == 0);
  CHECK(cache.attend(q, k, k, {{0, 12}}) == first);
  cache.reset(0, KvPolicy{.recent = 2});
  cache.attend(q, k, k, {{0, 12}});
  const std::vector<KvEntry> kept = cache.kept(0, 0);
  REQUIRE(kept.size() == 2);
  CHECK(kept[0].position == 10);
  CHECK(kept[1].position == 11);
}

TEST_CASE("rolling positions of an AttentionCache are ranks: equal queries attend equally") {
  const Rotary rotary{.frequencies = std::vector<float>(kShape.head_dim / 2, 0.7f),
                      .pairs = false,
                      .rolling = true};
  AttentionCache cache = make_cache({.recent = 3}, kShape, rotary);
  Random random(9);
  const Rows q(1, kShape.n_heads, random), k(1, kShape.n_kv_heads, random);
  // The budget and the next token's slot: after that many steps the same ranks are in the same
  // slots.
  constexpr size_t kSlots = 4;
  std::vector<std::vector<float>> outs;
  for (size_t i = 0; i < 5 * kSlots; ++i) {
    outs.push_back(cache.attend(q, k, k, {{1, 1}}));
    if (i >= 2 * kSlots) CHECK(outs[i] == outs[i - kSlots]);
  }
}

TEST_CASE("an AttentionCache names the argument that is wrong") {
  AttentionCache cache = make_cache();
  Random random(10);
  const Rows q(2, 4, random), k(2, 2, random), v(2, 2, random), other(2, 3, random);
  CHECK(error([&] { cache.attend(q, other, v, {{0, 2}}); }) ==
        "k has shape [2, 3, 16], expected [n, 2, 16] with the same n for q, k and v");
  CHECK(error([&] { cache.attend({q.values.data(), {}}, k, v, {{0, 2}}); }) ==
        "q has shape [], expected [n, 4, 16] with the same n for q, k and v");
  CHECK(error([&] { cache.attend(q, k, v, {{0, 1}, {0, 1}}); }) == "sequence 0 is named twice");
  CHECK(error([&] { cache.attend(q, k, v, {{0, 1}}); }).starts_with("the sequences have 1 rows"));
  CHECK(error([&] { cache.attend(q, k, v, {{0, 2}, {1, 0}}); }).starts_with("sequence 1 has no"));
  Rows infinite = v;
  infinite.values[5] = -std::numeric_limits<float>::infinity();
  CHECK(error([&] { cache.attend(q, k, infinite, {{0, 2}}); }).starts_with("[attend] v has -inf"));
  CHECK(cache.length(0) == 0);

  AttentionCache halves =
      make_cache(kPolicy, {.n_heads = 4, .n_kv_heads = 2, .head_dim = 16, .max_tokens = 9});
  Rows large = k;
  large.values[3] = 65505;
  CHECK(error([&] { halves.attend(q, large, v, {{0, 2}}); }).starts_with("[attend] k has 65505,"));
  CHECK_NOTHROW(halves.attend(q, k, v, {{0, 2}}));

  CHECK(error([] { make_cache(kPolicy, kShape, {}, {.sinks = {1, 2}, .slopes = {}}); }) ==
        "2 numbers, expected one for each of 4 heads");
  CHECK(error([] {
          make_cache(kPolicy, kShape, Rotary{{1, 2, 3, 4, 5, 6, 7, 8, 9}, true, false});
        }).starts_with("9 rotary frequencies"));
  const std::vector<float> gram(7);
  CHECK(error([&] { AttentionCache(test_backend(), kPolicy, kShape, {}, {}, gram); }) ==
        "output_gram has 7 elements, expected [2, 16, 16]");
}

}  // namespace
}  // namespace h2o

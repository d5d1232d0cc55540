// Attention to queries, keys and values that are not finite, or too large for the cache's type:
// scores stay finite, so that every token is kept or archived, once.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "archive_rig.h"
#include "kv/range.h"

namespace h2o {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// Every third number is extreme, or every number of a row.
void make_extreme(Random& random, std::vector<float>& values, int64_t row) {
  constexpr float kExtremes[] = {NAN,  INFINITY, -INFINITY, kLargest, -kLargest, 65520,
                                 0.0f, 1e-40f,   -1e-40f,   1e20f,    -1e20f};
  const auto extreme = [&] { return kExtremes[random.integer(0, std::size(kExtremes) - 1)]; };
  for (int64_t begin = 0; begin < std::ssize(values); begin += row) {
    const bool whole = random.integer(0, 3) == 0;
    const float same = extreme();
    for (int64_t i = begin; i < begin + row; ++i) {
      if (whole) {
        values[i] = same;
      } else if (random.integer(0, 2) == 0) {
        values[i] = extreme();
      }
    }
  }
}

// Which pages have how many tokens of a kv_head.
int64_t n_archived(const KvArchive& archive, int32_t kv_head) {
  const ArchiveHead head = archive.head(0, 0, kv_head);
  int64_t n = 0;
  for (int32_t page = 0; page < archive.n_pages(); ++page) {
    CHECK(head.counts[page] >= 0);
    CHECK(head.counts[page] <= archive.page_tokens());
    n += head.counts[page];
  }
  return n;
}

void check_extremes(Random& random, const KvPolicy& policy, const KvShape& shape, int n_threads,
                    const LogitRules& rules) {
  CAPTURE(policy.sinks);
  CAPTURE(policy.heavy);
  CAPTURE(policy.recent);
  CAPTURE(static_cast<int>(policy.scoring));
  CAPTURE(static_cast<int>(policy.value_norm));
  CAPTURE(info(shape.k_dtype).name);
  CAPTURE(info(shape.archive.k_dtype).name);
  Rig rig(policy, shape, n_threads), copy(policy, shape);
  rig.set_logits(rules);
  copy.set_logits(rules);
  int32_t length = 0;
  for (const int32_t n : {30, 1, 1, 1, 5, 1, 70, 1, 1, 1}) {
    Qkv in = random_qkv(random, shape, n);
    for (std::vector<float>* values : {&in.q, &in.k, &in.v}) {
      make_extreme(random, *values, shape.head_dim);
    }
    rig.attend({{0, n}}, in);
    length += n;
    for (int32_t h = 0; h < shape.n_kv_heads; ++h) {
      const std::vector<KvEntry> entries = rig.entries(0, h);
      REQUIRE(std::ssize(entries) == policy.kept(length));
      for (size_t i = 0; i < entries.size(); ++i) {
        CHECK(std::isfinite(entries[i].score));
        CHECK(entries[i].score >= 0);
        CHECK(entries[i].position >= 0);
        CHECK(entries[i].position < length);
        CHECK((i == 0 || entries[i].position > entries[i - 1].position));
      }
      const KvArchive* const archive = rig.cache().archive();
      if (archive != nullptr && archive->archives(0, h)) {
        CHECK(n_archived(*archive, h) == length - policy.kept(length));
      }
    }
    const std::vector<std::byte> bytes = bytes_of(rig);
    ByteReader reader("the sequence", bytes);
    CHECK_NOTHROW(read_sequence(copy.cache(), 0, length, reader));
    CHECK(bytes_of(copy) == bytes);
  }
}

TEST_CASE("numbers that a cache cannot store become the largest that it can") {
  std::vector<DType> types{DType::f16, DType::q8_0, DType::q4_0};
  if (!on_cuda()) types.push_back(DType::q5_0);
  for (const DType dtype : types) {
    CAPTURE(info(dtype).name);
    const KvShape shape = shape_with(dtype, 64, 0);
    const float most = most_stored(dtype);
    REQUIRE(most < kLargest);
    Random random(1);
    for (const KvPolicy& policy : {KvPolicy{}, KvPolicy{.sinks = 1, .heavy = 9, .recent = 4}}) {
      Rig large(policy, shape), largest(policy, shape);
      for (const int32_t n : {30, 1, 5}) {
        Qkv in = random_qkv(random, shape, n), clamped = in;
        for (auto [values, to] : {std::pair{&in.k, &clamped.k}, std::pair{&in.v, &clamped.v}}) {
          for (size_t i = 3; i < values->size(); i += 7) {
            (*values)[i] = i % 2 == 0 ? 1.5f * most : -1e30f;
            (*to)[i] = i % 2 == 0 ? most : -most;
          }
        }
        const std::vector<float> out = large.attend({{0, n}}, in);
        CHECK(std::ranges::all_of(out, [](float x) { return std::isfinite(x); }));
        CHECK(out == largest.attend({{0, n}}, clamped));
        CHECK(bytes_of(large) == bytes_of(largest));
      }
    }
  }
}

TEST_CASE("scores are finite for any queries, keys and values") {
  Random random(1);
  const int n_trials = on_gpu() ? 20 : brief() ? 60 : 200;
  for (int trial = 0; trial < n_trials; ++trial) {
    const auto one_of = [&](const auto& values) {
      return values[random.integer(0, static_cast<int32_t>(std::size(values)) - 1)];
    };
    constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};
    constexpr Scoring kScorings[] = {Scoring::sum, Scoring::mean, Scoring::inverse,
                                     Scoring::question, Scoring::random};
    constexpr int32_t kSizes[] = {0, 1, 2, 9};
    KvPolicy policy{.sinks = one_of(kSizes), .heavy = one_of(kSizes), .recent = one_of(kSizes)};
    policy.scoring = one_of(kScorings);
    policy.value_norm = random.flip() ? ValueNorm::l1 : ValueNorm::none;
    policy.decay = random.flip() ? 1.0f : 0.5f;
    if (policy.budget() == 0) policy.heavy = 1;

    const bool archived = archives() && random.flip();
    KvShape shape = shape_with(one_of(kTypes), 64, archived ? random.integer(1, 12) : 0);
    shape.max_tokens = 120;
    if (archived && random.flip()) {
      shape.archive.k_dtype = DType::q3;
      shape.archive.v_dtype = DType::q2;
    }
    if (archived && random.flip()) shape.archive.heads = {1};
    if (!archived && random.flip()) {
      shape.rope = rope_of(shape.head_dim);
    }
    LogitRules rules;
    if (random.flip()) rules.softcap = 0.5f;
    if (random.flip()) rules.sinks = {NAN, INFINITY, -INFINITY, kLargest};
    check_extremes(random, policy, shape, random.flip() ? 1 : 3, rules);
  }
}

}  // namespace
}  // namespace h2o

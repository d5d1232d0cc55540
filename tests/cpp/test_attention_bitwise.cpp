// Attention does not depend on these, bit for bit: the state before a reset, other sequences'
// policies, a budget that is never reached; and on the CPU, the rest of the batch, the threads, and
// the chunking of tokens that all fit.
#include <doctest/doctest.h>

#include "attention_rig.h"
#include "core/error.h"

namespace h2o {
namespace {

constexpr KvPolicy kFull{};
constexpr KvPolicy kWindow{.sinks = 0, .heavy = 0, .recent = 20};
constexpr KvPolicy kSinks{.sinks = 4, .heavy = 0, .recent = 16};
constexpr KvPolicy kH2o{.sinks = 0, .heavy = 12, .recent = 8};
constexpr KvPolicy kH2oSinks{.sinks = 2, .heavy = 10, .recent = 0};
constexpr KvPolicy kMean{.sinks = 1, .heavy = 9, .recent = 6, .scoring = Scoring::mean};
constexpr KvPolicy kWeighed{
    .sinks = 0, .heavy = 11, .recent = 9, .decay = 0.75f, .value_norm = ValueNorm::l1};
constexpr KvPolicy kQuestion{
    .heavy = 12, .recent = 8, .scoring = Scoring::question, .decay = 0.75f};
constexpr KvPolicy kRandom{.sinks = 1, .heavy = 9, .recent = 10, .scoring = Scoring::random};
constexpr KvPolicy kPolicies[] = {kFull, kWindow,  kSinks,    kH2o,   kH2oSinks,
                                  kMean, kWeighed, kQuestion, kRandom};

// Parameters of a test run.
struct Kind {
  DType dtype;
  bool may_roll;
};

KvShape shape_of(int32_t n_sequences, const Kind& kind) {
  return {.n_layers = 1,
          .n_sequences = n_sequences,
          .n_heads = 8,
          .n_kv_heads = 4,
          .head_dim = 24,
          .max_tokens = 400,
          .max_rows = 150,
          .k_dtype = kind.dtype,
          .v_dtype = kind.dtype,
          .rope = kind.may_roll ? rope_of(24) : Rope{}};
}

template <class Body>
void for_all(const Body& body) {
  for (const KvPolicy& policy : kPolicies) {
    for (const Kind& kind : {Kind{DType::f32, false}, {DType::f16, false}, {DType::f16, true}}) {
      if (kind.may_roll && policy.recent == KvPolicy::kUnbounded) continue;
      CAPTURE(policy.sinks);
      CAPTURE(policy.heavy);
      CAPTURE(policy.recent);
      CAPTURE(info(kind.dtype).name);
      CAPTURE(kind.may_roll);
      body(policy, kind);
    }
  }
}

// Batches of three sequences: together, separately, short, longer than the pools of 21.
const std::vector<std::vector<Piece>> kBatches = {
    {{0, 5}, {1, 17}, {2, 1}}, {{2, 60}},         {{1, 4}, {0, 1}, {2, 1}},
    {{0, 1}, {1, 1}, {2, 1}},  {{1, 40}, {0, 1}}, {{0, 90}, {2, 2}, {1, 1}},
    {{2, 1}, {1, 1}, {0, 1}},  {{0, 1}, {2, 40}}};

int32_t n_rows(const std::vector<Piece>& pieces) {
  int32_t n = 0;
  for (const Piece& piece : pieces) n += piece.n_rows;
  return n;
}

// On a GPU this one, and a chunk compared with its tokens, only hold up to rounding: the kernels
// used depend on the batch. test_attention.cpp compares all of them with one reference.
TEST_CASE("sequences of a batch do not see each other" * doctest::skip(on_gpu())) {
  for_all([](const KvPolicy& policy, const Kind& kind) {
    const KvShape shape = shape_of(3, kind);
    Rig together(policy, shape);
    std::vector<std::unique_ptr<Rig>> alone;
    for (int i = 0; i < 3; ++i) alone.push_back(std::make_unique<Rig>(policy, shape_of(1, kind)));
    Random random(1);
    for (const std::vector<Piece>& pieces : kBatches) {
      const Qkv in = random_qkv(random, shape, n_rows(pieces));
      const std::vector<float> out = together.attend(pieces, in);
      std::vector<float> expected;
      int64_t row = 0;
      for (const auto& [sequence, n] : pieces) {
        const std::vector<float> part = alone[sequence]->attend({{0, n}}, in.rows(shape, row, n));
        expected.insert(expected.end(), part.begin(), part.end());
        row += n;
      }
      CHECK(same_bits(out, expected));
      for (int sequence = 0; sequence < 3; ++sequence) {
        CHECK(same_entries(together, sequence, *alone[sequence], 0, shape.n_kv_heads));
      }
    }
  });
}

TEST_CASE("results do not depend on the number of threads" * doctest::skip(on_gpu())) {
  for_all([](const KvPolicy& policy, const Kind& kind) {
    const KvShape shape = shape_of(3, kind);
    Rig one(policy, shape, 1);
    Rig two(policy, shape, 2);
    Rig three(policy, shape, 3);
    Random random(2);
    for (const std::vector<Piece>& pieces : kBatches) {
      const Qkv in = random_qkv(random, shape, n_rows(pieces));
      const std::vector<float> out = one.attend(pieces, in);
      CHECK(same_bits(two.attend(pieces, in), out));
      CHECK(same_bits(three.attend(pieces, in), out));
      for (int sequence = 0; sequence < 3; ++sequence) {
        CHECK(same_entries(one, sequence, two, sequence, shape.n_kv_heads));
        CHECK(same_entries(one, sequence, three, sequence, shape.n_kv_heads));
      }
    }
  });
}

// With several blocks of keys: attention is divided by rows in long chunks, and by keys if there
// are few rows.
TEST_CASE("long sequences do not depend on the number of threads" * doctest::skip(on_gpu())) {
  const std::vector<std::vector<Piece>> batches = {{{0, 650}},
                                                   {{0, 250}, {1, 40}, {2, 1}},
                                                   {{0, 1}, {1, 1}, {2, 1}},
                                                   {{1, 600}, {0, 1}},
                                                   {{0, 30}, {1, 30}},
                                                   {{1, 1}},
                                                   {{0, 3}, {2, 560}},
                                                   {{0, 1}, {2, 1}}};
  // The third one evicts within chunks and while decoding. The last one with one type.
  const KvPolicy policies[] = {kFull,
                               {.sinks = 1, .heavy = 700, .recent = 500},
                               {.sinks = 0, .heavy = 400, .recent = 150, .decay = 0.9f},
                               {.heavy = 300, .recent = 100, .scoring = Scoring::question}};
  // Every pair of a type and a number of heads, of a type and a policy, and of a number and a
  // policy.
  const DType dtypes[] = {DType::f32,  DType::f16,  DType::bf16,
                          DType::q8_0, DType::q5_0, DType::q4_0};
  for (size_t i = 0; i < std::size(dtypes); ++i) {
    for (size_t j = 0; j < std::size(policies); ++j) {
      const KvPolicy& policy = policies[j];
      if (policy.scoring == Scoring::question && dtypes[i] != DType::f16) continue;
      if (brief() && (i + j) % 2 == 0) continue;
      const int32_t n_kv_heads = 1 << (i + j) % 3;
      CAPTURE(info(dtypes[i]).name);
      CAPTURE(n_kv_heads);
      CAPTURE(policy.heavy);
      KvShape shape = shape_of(3, {dtypes[i], false});
      shape.n_heads = 4;
      shape.n_kv_heads = n_kv_heads;
      shape.head_dim = 32;
      shape.max_tokens = 1100;
      shape.max_rows = 700;
      Rig one(policy, shape, 1);
      std::vector<std::unique_ptr<Rig>> others;
      for (const int n_threads : {2, 3, 7, 16}) {
        others.push_back(std::make_unique<Rig>(policy, shape, n_threads));
      }
      Random random(10);
      for (const std::vector<Piece>& pieces : batches) {
        const Qkv in = random_qkv(random, shape, n_rows(pieces));
        const std::vector<float> out = one.attend(pieces, in);
        for (const auto& other : others) {
          CHECK(same_bits(other->attend(pieces, in), out));
          for (int sequence = 0; sequence < 3; ++sequence) {
            CHECK(same_entries(one, sequence, *other, sequence, n_kv_heads));
          }
        }
      }
    }
  }
}

TEST_CASE("a reset sequence behaves like a new one, and others are unchanged") {
  for_all([](const KvPolicy& policy, const Kind& kind) {
    const KvShape shape = shape_of(2, kind);
    for (const int32_t past : {1, 20, 21, 22, 50}) {
      CAPTURE(past);
      Rig used(policy, shape);
      Rig fresh(policy, shape);
      Random random(3);
      // Sequence 1 continues; sequence 0 has a history.
      const Qkv first = random_qkv(random, shape, past + 30);
      used.attend({{0, past}}, first.rows(shape, 0, past));
      used.attend({{0, 1}}, random_qkv(random, shape, 1));
      for (Rig* rig : {&used, &fresh}) rig->attend({{1, 30}}, first.rows(shape, past, 30));
      used.reset(0);
      CHECK(used.cache().length(0) == 0);
      CHECK(used.cache().kept(0) == 0);
      CHECK(used.entries(0, 0).empty());
      for (const int32_t n : {1, 3, 1, 30, 1, 1}) {
        const Qkv in = random_qkv(random, shape, n + 1);
        CHECK(same_bits(used.attend({{0, n}, {1, 1}}, in), fresh.attend({{0, n}, {1, 1}}, in)));
        CHECK(same_entries(used, 0, fresh, 0, shape.n_kv_heads));
        CHECK(same_entries(used, 1, fresh, 1, shape.n_kv_heads));
      }
    }
  });
}

TEST_CASE("a budget that is never reached is the full cache") {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const KvShape shape = shape_of(1, {dtype, false});
    for (const KvPolicy& policy : {KvPolicy{.sinks = 0, .heavy = 60, .recent = 60},
                                   KvPolicy{.sinks = 4, .heavy = 0, .recent = 116},
                                   KvPolicy{.sinks = 0, .heavy = 120, .recent = 0}}) {
      Rig full(kFull, shape);
      Rig bounded(policy, shape);
      Random random(4);
      for (const int32_t n : {20, 1, 1, 77, 1, 20, 1}) {  // 121: the last one fills the last slot
        const Qkv in = random_qkv(random, shape, n);
        CHECK(same_bits(full.attend({{0, n}}, in), bounded.attend({{0, n}}, in)));
      }
      // One more token, and they diverge.
      const Qkv in = random_qkv(random, shape, 1);
      CHECK_FALSE(same_bits(full.attend({{0, 1}}, in), bounded.attend({{0, 1}}, in)));
    }
  }
}

TEST_CASE("a chunk that fits is equivalent to its tokens one by one" * doctest::skip(on_gpu())) {
  for_all([](const KvPolicy& policy, const Kind& kind) {
    const KvShape shape = shape_of(1, kind);
    const bool bounded = policy.budget() < shape.max_tokens;
    const int32_t fits = bounded ? static_cast<int32_t>(policy.budget()) + 1 : 50;
    Random random(5);
    for (int32_t past = 0; past < fits; past += 4) {
      CAPTURE(past);
      Rig chunk(policy, shape);
      Rig steps(policy, shape);
      const Qkv in = random_qkv(random, shape, fits + 30);
      if (past > 0) {
        chunk.attend({{0, past}}, in.rows(shape, 0, past));
        steps.attend({{0, past}}, in.rows(shape, 0, past));
      }
      const Qkv rest = in.rows(shape, past, fits - past);
      const std::vector<float> expected = steps.attend_singly(0, fits - past, rest);
      CHECK(same_bits(chunk.attend({{0, fits - past}}, rest), expected));
      CHECK(same_entries(chunk, 0, steps, 0, shape.n_kv_heads));
      // Later results are the same too, long after the first eviction.
      for (int32_t i = fits; i < fits + 30; ++i) {
        const Qkv next = in.rows(shape, i, 1);
        CHECK(same_bits(chunk.attend({{0, 1}}, next), steps.attend({{0, 1}}, next)));
      }
      CHECK(same_entries(chunk, 0, steps, 0, shape.n_kv_heads));
    }
  });
}

// Past the end of a block of keys.
TEST_CASE("long chunks that fit are equivalent to their tokens one by one" *
          doctest::skip(on_gpu())) {
  for (const int n_threads : {1, 3}) {
    for (const bool may_roll : {false, true}) {
      const KvShape shape = [&] {
        KvShape s = shape_of(1, {DType::f16, may_roll});
        s.max_tokens = 1200;
        s.max_rows = 700;
        return s;
      }();
      const KvPolicy policy{.sinks = 0, .heavy = 600, .recent = 490};
      Rig chunks(policy, shape, n_threads);
      Rig steps(policy, shape, n_threads);
      Random random(11);
      for (const int32_t n : {490, 60, 500, 41}) {
        const Qkv in = random_qkv(random, shape, n);
        const std::vector<float> expected = steps.attend_singly(0, n, in);
        CHECK(same_bits(chunks.attend({{0, n}}, in), expected));
        CHECK(same_entries(chunks, 0, steps, 0, shape.n_kv_heads));
      }
    }
  }
}

TEST_CASE("layers do not see each other") {
  KvShape shape = shape_of(2, {DType::f16, true});
  Rig one(kH2o, shape);
  shape.n_layers = 3;
  Rig three(kH2o, shape);
  Random random(6);
  for (const int32_t n : {7, 1, 40, 1, 1, 1, 9}) {
    const Qkv in = random_qkv(random, shape, n);
    CHECK(same_bits(one.attend({{1, n}}, in), three.attend({{1, n}}, in)));
    CHECK(same_entries(one, 1, three, 1, shape.n_kv_heads));
  }
}

TEST_CASE("each layer follows its own policy") {
  KvShape shape = shape_of(1, {DType::f32, false});
  shape.n_layers = 3;
  const KvPolicy policies[] = {kH2o, kWindow, kFull};
  Rig layers(policies, shape);
  shape.n_layers = 1;
  CHECK(layers.cache().room(0) == shape.max_tokens);  // the full layer's
  Random random(7);
  Rig h2o(kH2o, shape), window(kWindow, shape), full(kFull, shape);
  Rig* const alone[] = {&h2o, &window, &full};
  for (const int32_t n : {7, 1, 40, 1, 1}) {
    const Qkv in = random_qkv(random, shape, n);
    layers.attend({{0, n}}, in);
    for (int32_t l = 0; l < 3; ++l) {
      alone[l]->attend({{0, n}}, in);
      CHECK(layers.cache().kept(l, 0) == alone[l]->cache().kept(0));
      for (int32_t h = 0; h < shape.n_kv_heads; ++h) {
        CHECK(same_entries(layers.cache().entries(l, 0, h), alone[l]->entries(0, h)));
      }
    }
  }
  CHECK(layers.cache().kept(0) == 50);
}

TEST_CASE("each sequence follows its own policy") {
  for (const bool may_roll : {false, true}) {
    const Kind kind{DType::f16, may_roll};
    const KvPolicy small{.sinks = 1, .heavy = 3, .recent = 5};
    Rig together(kH2o, shape_of(3, kind));
    together.reset(1, {&small, 1});
    together.reset(2, {&kWindow, 1});
    // The same batches, with one policy for all.
    std::vector<std::unique_ptr<Rig>> alike;
    for (const KvPolicy& policy : {kH2o, small, kWindow}) {
      alike.push_back(std::make_unique<Rig>(kH2o, shape_of(3, kind)));
      for (int32_t sequence = 0; sequence < 3; ++sequence) {
        alike.back()->reset(sequence, {&policy, 1});
      }
    }
    Random random(8);
    for (const std::vector<Piece>& pieces : kBatches) {
      const KvShape& shape = together.cache().shape();
      const Qkv in = random_qkv(random, shape, n_rows(pieces));
      const std::vector<float> out = together.attend(pieces, in);
      std::vector<std::vector<float>> expected;
      for (const auto& rig : alike) expected.push_back(rig->attend(pieces, in));
      int64_t row = 0;
      const int64_t width = shape.n_heads * shape.head_dim;
      for (const auto& [sequence, n] : pieces) {
        const auto mine = [&, n = n](const std::vector<float>& x) {
          return std::span(x).subspan(row * width, n * width);
        };
        CHECK(same_bits(mine(out), mine(expected[sequence])));
        CHECK(same_entries(together, sequence, *alike[sequence], sequence, shape.n_kv_heads));
        row += n;
      }
    }
    CHECK(together.cache().kept(1) == 9);
    CHECK(together.cache().kept(0) == 20);
  }
  Rig window(kWindow, shape_of(1, {DType::f16, false}));
  CHECK_THROWS_WITH_AS(window.reset(0, {&kFull, 1}), doctest::Contains("needs 400 slots"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(window.reset(0, {&kH2o, 1}), doctest::Contains("needs scores"),
                       InvalidArgument);
  Rig h2o(kH2o, shape_of(1, {DType::f16, false}));
  CHECK_THROWS_WITH_AS(h2o.reset(0, {&kWeighed, 1}), doctest::Contains("needs norms"),
                       InvalidArgument);
}

// Original positions are equal to ranks until something has been evicted: a cache that begins to
// roll then has the same keys as one that rolled from the start, except for rotating them forth and
// back.
TEST_CASE("a sequence begins to roll in the middle") {
  const KvShape shape = shape_of(2, {DType::f32, true});
  for (const int32_t past : {0, 1, 15, 20, 35}) {
    CAPTURE(past);
    Rig always(kH2o, shape);
    Rig later(kH2o, shape, 1, true);
    Random random(9);
    const Qkv first = random_qkv(random, shape, past);
    if (past > 0) {
      // One chunk: its rows attend to each other at their positions in both.
      const std::vector<float> a = always.attend({{1, past}}, first);
      const std::vector<float> b = later.attend({{1, past}}, first);
      for (size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= 1e-4f);
    }
    CHECK_FALSE(later.cache().rolling(1));
    later.roll(1);
    CHECK(later.cache().rolling(1));
    CHECK_FALSE(later.cache().rolling(0));
    for (const int32_t n : {1, 1, 12, 30, 1, 1}) {
      const Qkv in = random_qkv(random, shape, n);
      const std::vector<float> a = always.attend({{1, n}}, in);
      const std::vector<float> b = later.attend({{1, n}}, in);
      // An angle of up to 35 is off by 35 * 2^-24, a rotation by that and three roundings, forth
      // and back; a logit of 24 products below 16 by at most 24 * 16 * 1e-5 / sqrt(24).
      for (size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) <= 1e-3f);
    }
  }
  Rig full(kFull, shape_of(1, {DType::f32, false}));
  CHECK_THROWS_WITH_AS(full.roll(0), doctest::Contains("cannot roll"), InvalidArgument);
}

}  // namespace
}  // namespace h2o

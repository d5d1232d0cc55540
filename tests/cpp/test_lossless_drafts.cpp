// The model with a smaller cache as draft model of itself: what it is filled with, and that outputs
// are those of the full cache.
#include <doctest/doctest.h>

#include <numeric>

#include "core/error.h"
#include "engine_rig.h"
#include "text/draft_model.h"

namespace h2o {
namespace {

constexpr KvPolicy kScored{.heavy = 100, .recent = 100};  // keeps scores and all tokens

SessionOptions small_options(const KvPolicy& policy) {
  SessionOptions options = engine_options(1);
  options.policies = {policy};
  options.n_batch = 40;
  options.positions = Positions::original;
  return options;
}

std::vector<std::byte> state(const Session& session, int32_t sequence) {
  SnapshotText text;
  text.tokens.resize(session.tokens_seen(sequence));
  return session.save(sequence, std::move(text));
}

// Positions that a policy keeps after `n` tokens with these scores, by a sort of all.
std::vector<int32_t> kept_by(const KvPolicy& policy, std::vector<KvEntry> entries) {
  const auto n = static_cast<int32_t>(entries.size());
  std::ranges::stable_sort(entries, [&](const KvEntry& a, const KvEntry& b) {
    const bool a_stays = a.position < policy.sinks || a.position >= n - policy.recent;
    const bool b_stays = b.position < policy.sinks || b.position >= n - policy.recent;
    return a_stays != b_stays ? a_stays : a.score > b.score;
  });
  std::vector<int32_t> kept;
  for (int64_t i = 0; i < std::min<int64_t>(n, policy.budget()); ++i) {
    kept.push_back(entries[i].position);
  }
  std::ranges::sort(kept);
  return kept;
}

TEST_CASE(
    "a cache is filled with the sinks, the recent tokens and the heavy hitters of a full one") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  const Config& config = model->config;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const KvPolicy policy{.sinks = random.integer(0, 2),
                          .heavy = random.integer(0, 6),
                          .recent = random.integer(1, 6)};
    SessionOptions full_options = small_options({});
    full_options.n_sequences = 2;
    Session full(model, full_options), small(model, small_options(policy));
    Session scored(model, small_options(kScored));
    const std::vector<int32_t> tokens =
        random_tokens(random, *model, random.integer(1, Session::kMostObserved));
    feed(full, 1, tokens);
    feed(scored, 0, tokens);  // in one chunk
    const std::vector<std::byte> before = state(full, 1);
    small.fill(0, full, 1, tokens);
    CHECK(state(full, 1) == before);
    CHECK(small.tokens_seen(0) == std::ssize(tokens));
    for (int32_t l = 0; l < config.n_layers; ++l) {
      for (int32_t h = 0; h < config.n_kv_heads; ++h) {
        const std::vector<KvEntry> all = scored.entries(l, 0, h), kept = small.entries(l, 0, h);
        std::vector<int32_t> positions;
        for (const KvEntry& entry : kept) {
          positions.push_back(entry.position);
          if (policy.keeps_scores()) CHECK(entry.score == all[entry.position].score);
        }
        CHECK(positions == kept_by(policy, all));
      }
    }
  }
}

// Rows of a snapshot may be those of other kernels.
TEST_CASE("a full cache keeps its own rows, whatever would be computed for them now") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  Session full(model, small_options({})), small(model, small_options({.heavy = 4, .recent = 4}));
  Random random(7);
  feed(full, 0, random_tokens(random, *model, 20));
  const std::vector<std::byte> before = state(full, 0);
  small.fill(0, full, 0, random_tokens(random, *model, 9));
  CHECK(state(full, 0) == before);
}

TEST_CASE("a filled cache that evicts nothing continues as the full one") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  for (uint64_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Session full(model, small_options({})), small(model, small_options({}));
    const std::vector<int32_t> tokens = random_tokens(random, *model, random.integer(2, 30));
    feed(full, 0, tokens);
    const int32_t n_last = random.integer(1, static_cast<int32_t>(tokens.size()));
    small.fill(0, full, 0, std::span(tokens).last(n_last));
    CHECK(state(small, 0) == state(full, 0));
    CHECK(feed(small, 0, {7, 8}) == feed(full, 0, {7, 8}));
  }
}

TEST_CASE("tokens that were read ahead leave no trace") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  for (uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    SessionOptions options = small_options({.sinks = random.integer(0, 2),
                                            .heavy = random.integer(0, 6),
                                            .recent = random.integer(1, 6)});
    if (random.integer(0, 3) == 0) options.policies = {};
    if (random.flip()) options.positions = Positions::automatic;
    options.max_drafts = 5;
    Session session(model, options), plain(model, options);
    const std::vector<int32_t> tokens = random_tokens(random, *model, random.integer(1, 30));
    CHECK(feed(session, 0, tokens) == feed(plain, 0, tokens));
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::byte> before = state(session, 0);
      const int32_t n = random.integer(1, 5);
      const int32_t n_wrong = random.integer(0, n);
      std::vector<std::vector<float>> logits;
      std::vector<int32_t> ahead = random_tokens(random, *model, n);
      for (const int32_t& token : ahead) {
        Input input{0, {&token, 1}};
        input.ahead = true;
        const std::span<const float> row = session.step({&input, 1});
        logits.emplace_back(row.begin(), row.end());
      }
      session.retract(0, n_wrong);
      for (int32_t i = 0; i < n - n_wrong; ++i) CHECK(feed(plain, 0, {ahead[i]}) == logits[i]);
      CHECK(state(session, 0) == state(plain, 0));
      if (n_wrong == n) CHECK(state(session, 0) == before);
      CHECK(feed(session, 0, {3}) == feed(plain, 0, {3}));
    }
  }
}

TEST_CASE("reading ahead has limits") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  SessionOptions options = small_options({.heavy = 2, .recent = 2});
  options.max_drafts = 1;
  options.n_sequences = 2;
  Session session(model, options);
  const std::vector<int32_t> tokens = {3, 4};
  const auto ahead = [](int32_t sequence, std::span<const int32_t> some) {
    Input input{sequence, some};
    input.ahead = true;
    return input;
  };
  const auto refused = [&](const std::vector<Input>& inputs) {
    CHECK_THROWS_AS(session.step(inputs), InvalidArgument);
  };
  refused({ahead(0, tokens)});
  refused({ahead(0, {tokens.data(), 1}), ahead(1, {tokens.data(), 1})});
  refused({ahead(0, {tokens.data(), 1}), {1, tokens}});
  session.step(std::vector{ahead(0, {tokens.data(), 1})});
  refused({ahead(0, {tokens.data(), 1})});  // more than max_drafts
  refused({ahead(1, {tokens.data(), 1})});
  session.step(std::vector{Input{0, tokens}});
  session.step(std::vector{ahead(1, {tokens.data(), 1})});

  Session full(model, small_options({})), evicting(model, small_options({.recent = 2}));
  feed(full, 0, {3, 4, 5});
  feed(evicting, 0, {3, 4, 5});
  CHECK_THROWS_AS(session.fill(0, full, 0, {}), InvalidArgument);
  CHECK_THROWS_AS(session.fill(0, full, 0, std::vector<int32_t>(4)), InvalidArgument);
  CHECK_THROWS_AS(session.fill(0, evicting, 0, tokens), InvalidArgument);
  CHECK_THROWS_AS(session.fill(0, session, 1, tokens), InvalidArgument);
  SessionOptions other = small_options({});
  other.k_dtype = DType::f32;
  Session wide(model, other);
  feed(wide, 0, {3, 4, 5});
  CHECK_THROWS_AS(session.fill(0, wide, 0, tokens), InvalidArgument);
  CHECK(session.tokens_seen(0) == 3);
}

TEST_CASE("options that lossless does not support are errors") {
  if (on_gpu()) return;
  const auto refused = [](const std::shared_ptr<Model>& model, const SessionOptions& options,
                          const char* message) {
    CHECK_THROWS_WITH_AS(DraftModel::of_full_cache(model, options), doctest::Contains(message),
                         InvalidArgument);
  };
  const auto model = rotary_model();
  SessionOptions options = engine_options(1);
  options.positions = Positions::rolling;
  refused(model, options, "roll");
  options = engine_options(1);
  options.policies[0].value_norm = ValueNorm::l1;
  refused(model, options, "weighs values");
  options = engine_options(1);
  options.archive = {.n_recalled = 1, .k_dtype = DType::f16, .v_dtype = DType::f16};
  refused(model, options, "archive");
  refused(load(H2O_SOURCE_DIR "/tests/data/golden/gemma2.gguf", 1), engine_options(1), "window");
}

// Lets a drafter propose whatever the time of a step.
class Free final : public Drafter {
 public:
  explicit Free(std::shared_ptr<Drafter> inner) : inner_(std::move(inner)) {}

  std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                   const DraftStep& step) override {
    const std::vector<double> same(step.most + 1, 1.0);
    DraftStep free = step;
    free.times = same;
    free.seconds = 1e9;
    return inner_->propose(tokens, free);
  }

 private:
  std::shared_ptr<Drafter> inner_;
};

TEST_CASE("outputs with a smaller cache that proposes are those of the full cache") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  int64_t n_accepted = 0, n_wrong = 0, n_sampled = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int32_t n = random.integer(1, 4);
    SessionOptions full = engine_options(n);
    full.policies = {};
    full.max_drafts = random.integer(1, 6);
    SessionOptions smaller = full;
    smaller.max_sequences = random.integer(1, n);
    smaller.n_sequences = 1;
    smaller.policies = {
        {.sinks = random.integer(0, 1), .heavy = random.integer(0, 3), .recent = 2}};
    const auto drafts = DraftModel::of_full_cache(model, smaller);
    const auto engine = std::make_shared<Engine>(model, LetterVocabulary::get().tokenizer(), full,
                                                 PrefixCacheOptions{.max_bytes = 1 << 20}, drafts);
    SessionOptions plain = full;
    plain.max_drafts = 0;
    std::vector<Outcome> expected;
    std::vector<Engine::Handle> generations;
    for (int32_t i = 0; i < n; ++i) {
      Request request = random_request(random);
      request.policies = {};
      expected.push_back(alone(model, request, plain));
      request.drafter = std::make_shared<Free>(drafts->drafter());
      request.eager = true;
      generations.push_back(engine->submit(request));
    }
    for (int32_t i = 0; i < n; ++i) {
      const Engine::Handle& g = generations[i];
      CHECK(finished(*engine, g) == expected[i]);
      n_accepted += g->progress().n_accepted;
      n_wrong += g->progress().n_drafted - g->progress().n_accepted;
      if (g->request().sampling.temperature > 0) n_sampled += g->progress().n_accepted;
    }
  }
  CHECK(n_accepted > 60);
  CHECK(n_wrong > 50);
  CHECK(n_sampled > 15);  // drawn with the same random numbers
}

}  // namespace
}  // namespace h2o

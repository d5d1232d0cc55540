// DraftModel: what it proposes, and that outputs do not depend on it.
#include <doctest/doctest.h>

#include "engine_rig.h"
#include "text/draft_model.h"

namespace h2o {
namespace {

constexpr int32_t kVocab = 61;
constexpr int32_t kMost = 5;
// Proposals seem to take no time.
const std::vector<double> kSame(kMost + 1, 1.0);

DraftStep free_step(int32_t most) { return {most, 0, std::span(kSame).first(most + 1), 1e9}; }

std::shared_ptr<DraftModel> draft_model(SessionOptions options, int32_t n_vocab = kVocab) {
  options.max_drafts = kMost;
  return std::make_shared<DraftModel>(rotary_model(), options, n_vocab);
}

// Lets a drafter propose whatever the time of a step.
class Free final : public Drafter {
 public:
  explicit Free(std::shared_ptr<Drafter> inner) : inner_(std::move(inner)) {}

  std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                   const DraftStep& step) override {
    return inner_->propose(tokens, free_step(std::min(step.most, kMost)));
  }

 private:
  std::shared_ptr<Drafter> inner_;
};

TEST_CASE("a draft model proposes what it would generate") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Random random(seed);
    std::vector<int32_t> tokens = random_tokens(random, *model, random.integer(1, 20));
    Session session(model, engine_options(1));
    const auto drafter = draft_model(engine_options(1))->drafter();
    // Four at a time, as a prompt of the options' n_batch.
    std::vector<int32_t> expected;
    const auto read = [&](std::span<const int32_t> part) {
      int32_t next = 0;
      while (!part.empty()) {
        const auto n = std::min<size_t>(part.size(), session.options().n_batch);
        const Input input{0, part.first(n)};
        next = session.greedy({&input, 1})[0];
        part = part.subspan(n);
      }
      return next;
    };
    for (int32_t next = read(tokens); std::ssize(expected) < kMost;) {
      expected.push_back(next);
      next = read({&expected.back(), 1});
    }
    std::span<const int32_t> got;
    for (int step = 0; step < 6 && got.empty(); ++step) {  // a chunk of the prompt each
      got = drafter->propose(tokens, free_step(kMost));
    }
    CHECK(std::vector(got.begin(), got.end()) == expected);
  }
}

TEST_CASE("a draft model proposes nothing where nothing is gained") {
  if (on_gpu()) return;
  Random random(1);
  const auto model = rotary_model();
  const std::vector<int32_t> tokens = random_tokens(random, *model, 4);
  const auto drafts = draft_model(engine_options(1));
  CHECK(drafts->drafter()->propose(tokens, {kMost, 0, kSame, 0}).empty());  // no time is known
  std::vector<double> slow{1};
  for (int32_t n = 1; n <= kMost; ++n) slow.push_back(1 + n);
  CHECK(drafts->drafter()->propose(tokens, {kMost, 0, slow, 1e9}).empty());

  const auto first = drafts->drafter(), second = drafts->drafter();
  CHECK(!first->propose(tokens, free_step(1)).empty());
  CHECK(second->propose(tokens, free_step(1)).empty());  // its only sequence is in use
  const auto small = draft_model(engine_options(1), 1);  // of tokens that the other does not have
  CHECK(small->drafter()->propose(tokens, free_step(kMost)).size() <= kMost);
}

TEST_CASE("a text that ends gives its sequence back") {
  if (on_gpu()) return;
  Random random(2);
  const auto model = rotary_model();
  const std::vector<int32_t> tokens = random_tokens(random, *model, 4);
  const auto drafts = draft_model(engine_options(1));
  const auto propose = [&] {
    const auto drafter = drafts->drafter();
    const std::span<const int32_t> got = drafter->propose(tokens, free_step(3));
    return std::vector(got.begin(), got.end());
  };
  const std::vector<int32_t> once = propose();
  CHECK(once.size() == 3);
  CHECK(propose() == once);
}

TEST_CASE("a text that has ended holds no sequence, even if its handle is kept") {
  if (on_gpu()) return;
  SessionOptions options = engine_options(1);
  options.max_drafts = 3;
  const auto drafts = draft_model(engine_options(1));
  const auto engine = std::make_shared<Engine>(rotary_model(), LetterVocabulary::get().tokenizer(),
                                               options, PrefixCacheOptions{}, drafts);
  std::vector<Engine::Handle> kept;
  for (int32_t i = 0; i < 3; ++i) {
    Request request{.prompt = {3, 4, 5}, .max_tokens = 8, .ignore_end = true};
    request.drafter = std::make_shared<Free>(drafts->drafter());
    kept.push_back(engine->submit(request));
    request.drafter = nullptr;
    finished(*engine, kept.back());
    CHECK(kept.back()->progress().n_drafted > 0);
  }
  engine->close();
  CHECK_THROWS_AS(engine->submit({.prompt = {3}, .drafts = true}), std::runtime_error);
}

TEST_CASE("a draft model stops at the end of its own context") {
  if (on_gpu()) return;
  SessionOptions options = engine_options(1);
  options.policies = {};
  options.n_ctx = 8;
  Random random(3);
  const std::vector<int32_t> tokens = random_tokens(random, *rotary_model(), 12);
  const auto drafter = draft_model(options)->drafter();
  CHECK(!drafter->propose(std::span(tokens).first(4), free_step(kMost)).empty());
  for (size_t n = 5; n <= tokens.size(); ++n) {
    const size_t n_drafts = drafter->propose(std::span(tokens).first(n), free_step(kMost)).size();
    CHECK(n_drafts <= (n < 8 ? 8 - n + 1 : 0));
  }
}

TEST_CASE("outputs are the same with a draft model") {
  if (on_gpu()) return;
  const auto model = rotary_model();
  int64_t n_accepted = 0, n_wrong = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int32_t n = random.integer(1, 4);
    SessionOptions options = engine_options(n);
    options.max_drafts = random.integer(1, kMost);
    SessionOptions smaller = engine_options(random.integer(1, n));
    smaller.policies = {{.sinks = 1, .heavy = 1, .recent = random.integer(1, 12)}};
    const auto drafts = draft_model(smaller);
    const auto engine = std::make_shared<Engine>(model, LetterVocabulary::get().tokenizer(),
                                                 options, PrefixCacheOptions{}, drafts);
    std::vector<Outcome> expected;
    std::vector<Engine::Handle> generations;
    for (int32_t i = 0; i < n; ++i) {
      Request request = random_request(random);
      expected.push_back(alone(model, request));
      request.drafter = std::make_shared<Free>(drafts->drafter());
      request.eager = true;
      generations.push_back(engine->submit(request));
    }
    for (int32_t i = 0; i < n; ++i) {
      CHECK(finished(*engine, generations[i]) == expected[i]);
      n_accepted += generations[i]->progress().n_accepted;
      n_wrong += generations[i]->progress().n_drafted - generations[i]->progress().n_accepted;
    }
  }
  CHECK(n_accepted > 20);
  CHECK(n_wrong > 20);
}

}  // namespace
}  // namespace h2o

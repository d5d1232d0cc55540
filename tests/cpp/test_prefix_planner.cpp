// PrefixPlanner: which states of prompts are saved, and that prompts which start from them continue
// bit for bit as if they had been processed whole.
#include <doctest/doctest.h>

#include <vector>

#include "core/error.h"
#include "session_rig.h"
#include "text/prefix_planner.h"

namespace h2o {
namespace {

constexpr int32_t kChunk = 16;
constexpr size_t kMin = PrefixCache::kMinTokens;
static_assert(kMin == 2 * kChunk);

constexpr KvPolicy kEvicts{.sinks = 1, .heavy = 8, .recent = 8};
constexpr KvPolicy kFull{.recent = 200};

struct Rig {
  explicit Rig(KvPolicy policy, bool ends = false, size_t max_bytes = 64 << 20)
      : policies{policy},
        model(tiny_model(1)),
        session(model, {.policies = policies, .n_ctx = 200, .n_batch = kChunk, .n_sequences = 2}),
        planner(session, kChunk, {.max_bytes = max_bytes, .ends = ends}) {}

  // Starts a prompt in an empty sequence: returns the number of its tokens found in the cache.
  size_t start(int32_t sequence, const std::vector<int32_t>& prompt) {
    session.reset(sequence);
    PrefixPlan& plan = plans[sequence] = {};
    const PrefixReader reader{sequence, prompt, policies, plan};
    const FoundPrefix found = planner.find(prompt, policies);
    size_t n = 0;
    if (found.entry != nullptr && planner.load(found, reader, logits)) n = found.n_tokens;
    planner.plan(reader, n);
    return n;
  }

  // Processes the next chunk of a prompt; returns the logits after it.
  std::vector<float> read_chunk(int32_t sequence, const std::vector<int32_t>& prompt) {
    const int32_t seen = session.tokens_seen(sequence);
    const auto n = std::min<int32_t>(kChunk, static_cast<int32_t>(prompt.size()) - seen);
    const Input input{sequence, std::span(prompt).subspan(seen, n)};
    const std::span<const float> row = session.step({&input, 1});
    const std::vector<float> out(row.begin(), row.end());
    planner.save(reader(sequence, prompt), out);
    return out;
  }

  // Processes the rest of a prompt.
  std::vector<float> read(int32_t sequence, const std::vector<int32_t>& prompt) {
    std::vector<float> out;
    while (session.tokens_seen(sequence) < std::ssize(prompt)) out = read_chunk(sequence, prompt);
    return out;
  }

  PrefixReader reader(int32_t sequence, const std::vector<int32_t>& tokens) {
    return {sequence, tokens, policies, plans[sequence]};
  }

  std::vector<KvPolicy> policies;
  std::shared_ptr<Model> model;
  Session session;
  PrefixPlanner planner;
  PrefixPlan plans[2];
  std::vector<float> logits;
};

std::vector<int32_t> prompt_of(const Rig& rig, int64_t n, uint64_t seed = 1) {
  Random random(seed);
  return random_tokens(random, *rig.model, n);
}

// The first n tokens, then others.
std::vector<int32_t> diverging(const Rig& rig, std::vector<int32_t> prompt, size_t n,
                               int64_t n_more) {
  prompt.resize(n);
  for (const int32_t token : prompt_of(rig, n_more, 2)) prompt.push_back(token);
  return prompt;
}

// The logits after a prompt that is processed whole.
std::vector<float> whole(KvPolicy policy, const std::vector<int32_t>& prompt) {
  Rig rig(policy, false, 0);
  CHECK(rig.start(0, prompt) == 0);
  CHECK(rig.plans[0].save_at.empty());
  return rig.read(0, prompt);
}

TEST_CASE("a prompt starts from the last chunk end that it shares with an earlier one") {
  Rig rig(kEvicts);
  const std::vector<int32_t> first = prompt_of(rig, 70);
  CHECK(rig.start(0, first) == 0);
  CHECK(rig.plans[0].save_at == std::vector<size_t>{64});  // nothing else is known to be common
  CHECK(rig.read(0, first) == whole(kEvicts, first));
  CHECK(rig.planner.bytes() > 0);

  const std::vector<int32_t> longer = diverging(rig, first, 68, 20);
  CHECK(rig.start(1, longer) == 64);
  CHECK(rig.session.tokens_seen(1) == 64);
  CHECK(rig.read(1, longer) == whole(kEvicts, longer));
}

TEST_CASE("where prompts diverge, the second saves what the third starts from") {
  Rig rig(kEvicts);
  const std::vector<int32_t> first = prompt_of(rig, 90);
  rig.start(0, first);
  rig.read(0, first);
  const std::vector<int32_t> second = diverging(rig, first, 53, 40);
  CHECK(rig.start(0, second) == 0);  // the state after 80 tokens is of no use
  CHECK(rig.plans[0].save_at == std::vector<size_t>{48, 80});
  rig.read(0, second);
  const std::vector<int32_t> third = diverging(rig, first, 50, 5);
  CHECK(rig.start(0, third) == 48);
  CHECK(rig.read(0, third) == whole(kEvicts, third));
}

TEST_CASE("states of short prompts are not saved") {
  Rig rig(kEvicts);
  const std::vector<int32_t> prompt = prompt_of(rig, kMin - 1);
  rig.start(0, prompt);
  CHECK(rig.plans[0].save_at.empty());
  rig.read(0, prompt);
  CHECK(rig.planner.bytes() == 0);
}

TEST_CASE("any prefix of a state without evictions is usable") {
  Rig rig(kFull);
  const std::vector<int32_t> first = prompt_of(rig, 70);
  rig.start(0, first);
  rig.read(0, first);
  CHECK(rig.planner.bytes() == 0);  // saved once the first token has been generated
  std::vector<int32_t> tokens = first;
  tokens.push_back(7);
  rig.read(0, tokens);
  CHECK(rig.planner.bytes() > 0);
  for (const size_t n : {size_t{69}, size_t{50}, kMin}) {
    CAPTURE(n);
    const std::vector<int32_t> prompt = diverging(rig, first, n, 5);
    CHECK(rig.start(1, prompt) == n);
    CHECK(rig.read(1, prompt) == whole(kFull, prompt));
  }
  CHECK(rig.start(1, diverging(rig, first, kMin - 1, 5)) == 0);
  CHECK(rig.start(1, first) == 69);  // one token must be processed
}

TEST_CASE("a prompt that another one is reading is processed once") {
  Rig rig(kEvicts);
  const std::vector<int32_t> prompt = prompt_of(rig, 70);
  rig.start(0, prompt);
  rig.read_chunk(0, prompt);

  SUBCASE("the same prompt starts from its end, with its logits") {
    CHECK(rig.planner.plan_for(rig.reader(0, prompt), prompt, rig.policies, 0));
    const std::vector<float> logits = rig.read(0, prompt);
    rig.logits.clear();
    CHECK(rig.start(1, prompt) == 70);
    CHECK(rig.logits == logits);
  }
  SUBCASE("one that diverges starts from a chunk end") {
    const std::vector<int32_t> other = diverging(rig, prompt, 50, 5);
    CHECK(rig.planner.plan_for(rig.reader(0, prompt), other, rig.policies, 0));
    rig.read(0, prompt);
    CHECK(rig.start(1, other) == 48);
    CHECK(rig.read(1, other) == whole(kEvicts, other));
  }
  SUBCASE("it does not wait for a state that the reader has passed, or that saves little") {
    const auto plans_for = [&](size_t n_common, size_t n_cached = 0) {
      const std::vector<int32_t> other = diverging(rig, prompt, n_common, 30);
      return rig.planner.plan_for(rig.reader(0, prompt), other, rig.policies, n_cached);
    };
    CHECK(!plans_for(0));
    CHECK(!plans_for(31));
    CHECK(plans_for(32));
    CHECK(!plans_for(32, 1));
    CHECK(plans_for(50, 16));
    CHECK(!plans_for(50, 17));
    while (rig.session.tokens_seen(0) < 48) rig.read_chunk(0, prompt);
    CHECK(!plans_for(50));
    CHECK(plans_for(64));
    rig.read(0, prompt);
    CHECK(!plans_for(64));  // it has read everything
  }
  SUBCASE("nor for one with other policies, or whose sequence began in a snapshot") {
    const std::vector<KvPolicy> others{kFull};
    CHECK(!rig.planner.plan_for(rig.reader(0, prompt), prompt, others, 0));
    rig.plans[0].is_from_beginning = false;
    CHECK(!rig.planner.plan_for(rig.reader(0, prompt), prompt, rig.policies, 0));
  }
}

TEST_CASE("ends of outputs are saved only on request") {
  for (const bool ends : {false, true}) {
    Rig rig(kEvicts, ends);
    std::vector<int32_t> tokens = prompt_of(rig, 20);
    rig.start(0, tokens);
    rig.read(0, tokens);
    for (const int32_t token : prompt_of(rig, 20, 3)) {
      tokens.push_back(token);
      rig.read(0, tokens);
    }
    rig.planner.save_end(rig.reader(0, tokens));
    const std::vector<int32_t> next = diverging(rig, tokens, 40, 5);
    CHECK(rig.start(1, next) == (ends ? 40 : 0));
  }
}

TEST_CASE("nothing is planned, saved or found while the cache is off") {
  Rig rig(kEvicts, true, 0);
  CHECK(!rig.planner.enabled());
  const std::vector<int32_t> prompt = prompt_of(rig, 70);
  CHECK(rig.start(0, prompt) == 0);
  CHECK(rig.plans[0].save_at.empty());
  rig.read(0, prompt);
  rig.planner.save_end(rig.reader(0, prompt));
  CHECK(rig.planner.bytes() == 0);
  CHECK(rig.start(1, prompt) == 0);
}

}  // namespace
}  // namespace h2o

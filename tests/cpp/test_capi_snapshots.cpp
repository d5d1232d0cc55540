// The C API: snapshots of sessions.
#include <doctest/doctest.h>

#include "capi_rig.h"
#include "kv/names.h"
#include "session_rig.h"
#include "text/sampler.h"

namespace h2o {
namespace {

constexpr std::string_view kPrompt = "It was a dark night, and the old man of the sea";

TEST_CASE("a snapshot continues as the session would have") {
  const api::Model model = load_model();
  api::Session source = open_session(model, with_budget(16));
  streamed(source, kPrompt, up_to(20));
  const std::string snapshot = source.save();
  api::Session copy(model, with_budget(16));
  streamed(copy, "something else", up_to(5));
  copy.load(snapshot);
  CHECK(copy.tokens() == source.tokens());
  CHECK(streamed(copy, " and", up_to(30)) == streamed(source, " and", up_to(30)));
  CHECK(copy.tokens() == source.tokens());
  CHECK(copy.save() == source.save());  // random numbers too
}

TEST_CASE("decoding continues after a snapshot of processed tokens") {
  const api::Model model = load_model();
  api::Session source = open_session(model, with_budget(16)),
               copy = open_session(model, with_budget(16), 9);
  source.feed(model.tokenize(kPrompt));
  copy.load(source.save());
  const float *expected = nullptr, *got = nullptr;
  int32_t n_vocab = 0;
  CHECK(h2o_logits(source.handle(), &expected, &n_vocab) == H2O_OK);
  CHECK(h2o_logits(copy.handle(), &got, &n_vocab) == H2O_OK);
  CHECK(std::equal(expected, expected + n_vocab, got));
  for (int i = 0; i < 20; ++i) {
    const int32_t token = source.sample();
    CHECK(copy.sample() == token);
    source.decode(token);
    copy.decode(token);
  }
  CHECK(copy.save() == source.save());

  // With another vocabulary.
  const auto same = tiny_model(1);
  const Session empty(same, {.policies = {{.heavy = 8, .recent = 8}}, .n_batch = 32});
  const std::string before = copy.save();
  const std::vector<std::byte> wrong =
      empty.save(0, {.tokens = {}, .note = {}, .logits = {1, 2, 3}});
  CHECK(h2o_snapshot_load(copy.handle(), wrong.data(), wrong.size()) == H2O_BAD_FORMAT);
  CHECK(copy.save() == before);
}

// Python's policies are those of budget_policy() too. A cache takes a snapshot of its own policy
// only.
TEST_CASE("budgets and policies by name are those of the Python package") {
  const api::Model model = load_model();
  const auto same = tiny_model(1);
  const auto takes = [&](double hh, const char* name, const KvPolicy& policy) {
    Session direct(same, {.policies = {policy}, .n_ctx = 100, .n_batch = 32});
    feed(direct, 0, {2, 5, 6, 7});
    const std::vector<std::byte> bytes = direct.save(0, {.tokens = {2, 5, 6, 7, 8}, .note = {}});
    h2o_session_options options = with_budget(hh, 100);
    options.policy = name;
    const api::Session session(model, options);
    return h2o_snapshot_load(session.handle(), bytes.data(), bytes.size()) == H2O_OK;
  };
  const KvPolicy full;
  CHECK(takes(0, nullptr, full));
  CHECK(takes(101, nullptr, full));  // more than n_ctx
  CHECK(takes(5000, nullptr, full));
  CHECK(takes(1e12, "window", full));
  CHECK_FALSE(takes(5000, nullptr, {.heavy = 2500, .recent = 2500}));
  CHECK_FALSE(takes(100, nullptr, full));
  CHECK(takes(100, nullptr, {.heavy = 50, .recent = 50}));
  CHECK(takes(0.29, nullptr, {.heavy = 14, .recent = 14}));
  for (const std::string_view name : policy_names()) {
    CAPTURE(name);
    CHECK(takes(20, std::string(name).c_str(), named_policy(name, 20)));
    CHECK_FALSE(takes(20, std::string(name).c_str(), named_policy(name, 19)));
  }
}

TEST_CASE("snapshots are interchangeable with the Python package") {
  const api::Model model = load_model();
  const auto same = tiny_model(1);
  Session direct(same, {.policies = {{.heavy = 8, .recent = 8}}, .n_batch = 32});
  feed(direct, 0, {2, 5, 6, 7});
  api::Session session = open_session(model, with_budget(16));
  SnapshotText text = {.tokens = {2, 5, 6, 7, 8}, .note = "{\"a\": [1]}"};
  const auto load = [&] {
    const std::vector<std::byte> bytes = direct.save(0, text);
    return h2o_snapshot_load(session.handle(), bytes.data(), bytes.size());
  };
  CHECK(load() == H2O_OK);
  CHECK(session.tokens() == text.tokens);
  CHECK(session.stats().n_read == 4);
  text.random_state = Sampler({.seed = 3}, 10).random_state();
  CHECK(load() == H2O_OK);
  streamed(session, "", up_to(1));
  CHECK(session.stats().n_read == 5);

  for (const char* state : {"x", "1 2 3"}) {
    const std::string before = session.save();
    text.random_state = state;
    CHECK(load() == H2O_BAD_FORMAT);
    CHECK(session.save() == before);
  }

  // Held-back text comes first, once; it may turn out to begin a stop string.
  text = {.tokens = text.tokens, .note = {}, .held_text = "na", .held_bytes = "\xc3"};
  REQUIRE(load() == H2O_OK);
  const std::string before = session.save();
  api::Session again = open_session(model, with_budget(16));
  again.load(before);
  CHECK(again.save() == before);
  CHECK(streamed(session, "", up_to(5)).starts_with("na"));
  CHECK(!streamed(session, "", up_to(5)).starts_with("na"));
  const char* const stops[] = {"nowhere", "na"};
  h2o_stream_options options = up_to(5);
  options.n_stop = 2;
  options.stop = stops;
  h2o_generation generation = H2O_GENERATION;
  CHECK(streamed(again, "", options, &generation).empty());
  CHECK(generation.finish == H2O_FINISH_STOP);
  CHECK(generation.stop == 1);
  CHECK(generation.n_generated == 0);
}

}  // namespace
}  // namespace h2o

// Session calls that throw, and leave the session unchanged.
#include <doctest/doctest.h>

#include "core/error.h"
#include "session_rig.h"

namespace h2o {
namespace {

TEST_CASE("options out of range are rejected") {
  const std::shared_ptr<Model> model = tiny_model(1);
  const auto refused = [&](auto change) {
    SessionOptions options;
    change(options);
    CHECK_THROWS_AS(Session(model, options), InvalidArgument);
  };
  refused([](SessionOptions& o) { o.n_batch = -1; });
  refused([](SessionOptions& o) { o.n_sequences = 0; });
  refused([](SessionOptions& o) { o.n_ctx = -1; });
  refused([&](SessionOptions& o) { o.n_ctx = model->config.n_ctx_train + 1; });
  refused([](SessionOptions& o) { o.v_dtype = DType::q5_1; });
  refused([](SessionOptions& o) { o.policies = {{.sinks = 0, .heavy = 0, .recent = 0}}; });

  Session whole(model, {});
  CHECK(whole.room(0) == model->config.n_ctx_train);
  SessionOptions most;
  most.n_ctx = model->config.n_ctx_train;
  CHECK_NOTHROW(Session(model, most));
}

TEST_CASE("a pass has as many rows as suit the back end") {
  const std::shared_ptr<Model> model = tiny_model(1);
  const int32_t n_ctx = model->config.n_ctx_train;
  CHECK(Session(model, {}).options().n_batch == std::min(on_cuda() ? 2048 : 512, n_ctx));
  SessionOptions seven;
  seven.n_batch = 7;
  CHECK(Session(model, seven).options().n_batch == 7);
}

TEST_CASE("only layers that rotate alike, each with a cache of its own, roll") {
  Config config = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1)->config;
  CHECK(config.can_roll());
  config.kv_sources.assign(config.n_layers, 0);
  CHECK(!config.can_roll());
  config.kv_sources.clear();
  config.sliding_window.size = 4;  // with frequencies of its own
  config.window_rope = config.rope;
  CHECK(!config.can_roll());
}

TEST_CASE("a step that throws changes nothing") {
  const std::shared_ptr<Model> model = tiny_model(1);
  const int32_t n_vocab = model->config.n_vocab;
  for (const KvPolicy& policy :
       {KvPolicy{}, KvPolicy{.sinks = 0, .heavy = 5, .recent = 3}, KvPolicy{.recent = 8}}) {
    CAPTURE(policy.heavy);
    const SessionOptions options{
        .policies = {policy}, .n_ctx = 64, .n_batch = 20, .n_sequences = 2};
    Session tried(model, options);
    Session untouched(model, options);
    Random random(1);
    const std::vector<int32_t> start = random_tokens(random, *model, 15);
    for (Session* session : {&tried, &untouched}) {
      for (const int32_t sequence : {0, 1}) feed(*session, sequence, start);
    }

    const std::vector<int32_t> good = {5, 6, 7};
    const std::vector<int32_t> none;
    const std::vector<int32_t> negative = {5, -1, 7};
    const std::vector<int32_t> unknown = {5, 6, n_vocab};
    const std::vector<int32_t> ten(10, 1);
    const std::vector<int32_t> eleven(11, 1);
    const std::vector<int32_t> twenty_one(21, 1);
    const std::vector<std::vector<Input>> calls = {
        {},
        {{0, none}},
        {{0, good}, {1, none}},
        {{0, negative}},
        {{0, unknown}},
        {{0, good}, {1, unknown}},
        {{2, good}},
        {{-1, good}},
        {{INT32_MAX, good}},
        {{0, good}, {2, good}},
        {{0, good}, {0, good}},
        {{1, good}, {0, good}, {1, good}},
        {{0, twenty_one}},
        {{0, ten}, {1, eleven}},
    };
    for (const std::vector<Input>& call : calls) {
      CHECK_THROWS_AS(tried.step(call), InvalidArgument);
      if (call.size() == 1) {
        CHECK_THROWS_AS(tried.score(call[0], [](int32_t, auto) {}), InvalidArgument);
      }
      CHECK(tried.room(0) == untouched.room(0));
      for (const int32_t sequence : {0, 1}) {
        const std::vector<int32_t> next = {random.integer(0, n_vocab - 1)};
        CHECK(same_bits(feed(tried, sequence, next), feed(untouched, sequence, next)));
      }
    }
    CHECK_THROWS_AS(tried.reset(2), InvalidArgument);
    CHECK_THROWS_AS(tried.room(-1), InvalidArgument);

    // Exactly n_batch rows are allowed, and so is the last token of n_ctx; one more is not.
    tried.reset(1);
    untouched.reset(1);
    const std::vector<int32_t> twenty(20, 2);
    for (int i = 0; i < 3; ++i) {
      CHECK(same_bits(feed(tried, 1, twenty), feed(untouched, 1, twenty)));
    }
    REQUIRE(tried.room(1) == 4);
    CHECK_THROWS_AS(feed(tried, 1, {1, 2, 3, 4, 5}), InvalidArgument);
    CHECK(same_bits(feed(tried, 1, {1, 2, 3, 4}), feed(untouched, 1, {1, 2, 3, 4})));
    CHECK(tried.room(1) == 0);
    CHECK_THROWS_AS(feed(tried, 1, {1}), InvalidArgument);
    CHECK(same_bits(feed(tried, 0, good), feed(untouched, 0, good)));
  }
}

}  // namespace
}  // namespace h2o

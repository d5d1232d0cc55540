// The forward pass of the tiny model: what its logits must not depend on, bit for bit; and that it
// does not allocate. On a GPU some of this only holds up to rounding, see test_devices.cpp.
#include <doctest/doctest.h>

#include <cstdlib>

#include "allocations.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr KvPolicy kFull{};
constexpr KvPolicy kH2o{.sinks = 0, .heavy = 10, .recent = 6};
constexpr KvPolicy kSinks{.sinks = 4, .heavy = 0, .recent = 12};

SessionOptions options_of(const KvPolicy& policy, int32_t n_sequences = 1,
                          DType kv_dtype = DType::f16) {
  return {.policies = {policy},
          .n_ctx = 128,
          .n_batch = 96,
          .n_sequences = n_sequences,
          .k_dtype = kv_dtype,
          .v_dtype = kv_dtype};
}

TEST_CASE("H2O_ISA and H2O_TEST_DEVICE select what computes") {
  const char* isa = std::getenv("H2O_ISA");
  CHECK(test_backend()->name().starts_with(test_device()));
  const std::string name = make_backend("cpu", 1)->name();
  if (isa != nullptr) CHECK(name == std::string("cpu (") + isa + ", 1 thread)");
  CHECK(name.starts_with("cpu ("));
}

TEST_CASE("sequences of a batch do not see each other" * doctest::skip(on_gpu())) {
  const std::shared_ptr<Model> model = tiny_model(1);
  for (const KvPolicy& policy : {kFull, kH2o, kSinks}) {
    Session together(model, options_of(policy, 3));
    Session alone[] = {
        {model, options_of(policy)}, {model, options_of(policy)}, {model, options_of(policy)}};
    Random random(1);
    const std::vector<std::vector<std::pair<int32_t, int32_t>>> batches = {
        {{0, 5}, {1, 24}, {2, 1}},
        {{0, 1}, {1, 1}, {2, 1}},
        {{2, 1}, {0, 21}},
        {{1, 1}, {2, 7}, {0, 1}},
        {{0, 1}, {1, 1}, {2, 1}}};
    for (const auto& batch : batches) {
      std::vector<std::vector<int32_t>> tokens;
      std::vector<Input> inputs;
      for (const auto& [sequence, n] : batch) tokens.push_back(random_tokens(random, *model, n));
      for (size_t i = 0; i < batch.size(); ++i) inputs.push_back({batch[i].first, tokens[i]});
      const std::span<const float> logits = together.step(inputs);
      const size_t n_vocab = model->config.n_vocab;
      REQUIRE(logits.size() == inputs.size() * n_vocab);
      for (size_t i = 0; i < batch.size(); ++i) {
        const std::vector<float> expected = feed(alone[batch[i].first], 0, tokens[i]);
        CHECK(same_bits(logits.subspan(i * n_vocab, n_vocab), expected));
      }
    }
  }
}

TEST_CASE("results do not depend on the number of threads" * doctest::skip(on_gpu())) {
  for (const KvPolicy& policy : {kFull, kH2o}) {
    Session one(tiny_model(1), options_of(policy));
    Session two(tiny_model(2), options_of(policy));
    Session three(tiny_model(3), options_of(policy));
    Random random(2);
    for (const int32_t n : {1, 40, 1, 9, 1}) {
      const std::vector<int32_t> tokens = random_tokens(random, one.model(), n);
      const std::vector<float> logits = feed(one, 0, tokens);
      CHECK(same_bits(feed(two, 0, tokens), logits));
      CHECK(same_bits(feed(three, 0, tokens), logits));
    }
  }
}

TEST_CASE("with the full cache results do not depend on chunk boundaries" *
          doctest::skip(on_gpu())) {
  const std::shared_ptr<Model> model = tiny_model(2);
  for (const DType dtype : {DType::f32, DType::f16}) {
    CAPTURE(info(dtype).name);
    Random random(3);
    const std::vector<int32_t> text = random_tokens(random, *model, 25);
    const auto part = [&](int begin, int end) {
      return std::vector<int32_t>(text.begin() + begin, text.begin() + end);
    };
    Session whole(model, options_of(kFull, 1, dtype));
    const std::vector<float> expected = feed(whole, 0, text);

    Session decoded(model, options_of(kFull, 1, dtype));
    feed(decoded, 0, part(0, 18));
    for (int i = 18; i < 24; ++i) feed(decoded, 0, part(i, i + 1));
    CHECK(same_bits(feed(decoded, 0, part(24, 25)), expected));

    for (const int cut : {1, 11, 24}) {
      Session chunks(model, options_of(kFull, 1, dtype));
      feed(chunks, 0, part(0, cut));
      CHECK(same_bits(feed(chunks, 0, part(cut, 25)), expected));
    }

    // Different sequences have different logits.
    std::vector<int32_t> other = text;
    other[3] = (other[3] + 1) % model->config.n_vocab;
    Session different(model, options_of(kFull, 1, dtype));
    CHECK_FALSE(same_bits(feed(different, 0, other), expected));
  }
}

TEST_CASE("score gives the logits after every token, as step does one by one" *
          doctest::skip(on_gpu())) {
  const std::shared_ptr<Model> model = tiny_model(2);
  Session steps(model, options_of(kFull));
  Session scored(model, options_of(kFull));
  Random random(4);
  const std::vector<int32_t> start = random_tokens(random, *model, 3);
  feed(steps, 0, start);
  feed(scored, 0, start);
  const std::vector<int32_t> text = random_tokens(random, *model, 70);  // in three parts
  std::vector<std::vector<float>> logits;
  scored.score({0, text}, [&](int32_t i, std::span<const float> row) {
    REQUIRE(i == std::ssize(logits));
    logits.emplace_back(row.begin(), row.end());
  });
  REQUIRE(logits.size() == text.size());
  for (size_t i = 0; i < text.size(); ++i) CHECK(same_bits(logits[i], feed(steps, 0, {text[i]})));
  const std::vector<int32_t> last = random_tokens(random, *model, 1);
  CHECK(same_bits(feed(scored, 0, last), feed(steps, 0, last)));
}

TEST_CASE("a reset sequence behaves like a new one") {
  const std::shared_ptr<Model> model = tiny_model(1);
  for (const KvPolicy& policy : {kFull, kH2o, kSinks}) {
    Session used(model, options_of(policy, 2));
    Session fresh(model, options_of(policy, 2));
    Random random(5);
    feed(used, 1, random_tokens(random, *model, 20));
    feed(used, 1, random_tokens(random, *model, 1));
    used.reset(1);
    CHECK(used.room(1) == 128);
    for (const int32_t n : {18, 1, 24, 1}) {
      const std::vector<int32_t> tokens = random_tokens(random, *model, n);
      CHECK(same_bits(feed(used, 1, tokens), feed(fresh, 1, tokens)));
    }
  }
}

TEST_CASE("a step allocates nothing, not even the first" * doctest::skip(on_gpu())) {
  const int64_t before = allocations();
  ::operator delete(::operator new(1));
  REQUIRE(allocations() == before + 1);  // the counter works

  for (const int n_threads : {1, 2}) {
    const std::shared_ptr<Model> model = tiny_model(n_threads);
    for (const KvPolicy& policy : {kFull, kH2o, kSinks}) {
      CAPTURE(n_threads);
      CAPTURE(policy.heavy);
      Random random(6);
      const std::vector<int32_t> tokens = random_tokens(random, *model, 24);
      const std::span<const int32_t> all = tokens;
      const Input prefill[] = {{0, all.first(20)}, {1, all.first(18)}};
      const Input decode[] = {{0, all.first(1)}, {1, all.last(1)}};
      const Input mixed[] = {{1, all.first(24)}, {0, all.last(1)}};
      Session session(model, options_of(policy, 2));
      int64_t counts[4] = {allocations()};
      session.step(prefill);
      counts[1] = allocations();
      for (int i = 0; i < 4; ++i) session.step(decode);
      counts[2] = allocations();
      session.step(mixed);
      counts[3] = allocations();
      CHECK(counts[1] == counts[0]);
      CHECK(counts[2] == counts[1]);
      CHECK(counts[3] == counts[2]);

      Session fresh(model, options_of(policy, 2));
      counts[0] = allocations();
      fresh.step(decode);
      CHECK(allocations() == counts[0]);
    }
  }
}

}  // namespace
}  // namespace h2o

// Sessions of a model of which only a part of the weights is in memory at a time.
#include <doctest/doctest.h>

#include <charconv>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "session_rig.h"

namespace h2o {
namespace {

std::shared_ptr<Model> with_resident(size_t n_bytes, int n_threads) {
  return std::make_shared<Model>(H2O_SOURCE_DIR "/models/tiny-opt.gguf", test_backend(n_threads),
                                 nullptr, n_bytes);
}

// The fewest bytes, as the error says.
size_t least_resident() {
  size_t n = 0;
  try {
    with_resident(1, 1);
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    const size_t at = message.find_last_of(' ') + 1;
    std::from_chars(message.data() + at, message.data() + message.size(), n);
  }
  REQUIRE(n > 0);
  return n;
}

SessionOptions options() {
  return {.policies = {KvPolicy{.sinks = 0, .heavy = 9, .recent = 9}},
          .n_ctx = 128,
          .n_batch = 40,
          .n_sequences = 2};
}

// A prompt in one sequence, then a token of it beside a prompt of another, then single tokens.
std::vector<float> logits_of(const std::shared_ptr<Model>& model, uint64_t seed) {
  Random random(seed);
  Session session(model, options());
  std::vector<float> all = feed(session, 0, random_tokens(random, *model, 30));
  const std::vector<int32_t> one = random_tokens(random, *model, 1);
  const std::vector<int32_t> prompt = random_tokens(random, *model, 25);
  const Input both[] = {{0, one}, {1, prompt}};
  const std::span<const float> logits = session.step(both);
  all.insert(all.end(), logits.begin(), logits.end());
  for (int step = 0; step < 4; ++step) {
    const std::vector<float> next = feed(session, step % 2, random_tokens(random, *model, 1));
    all.insert(all.end(), next.begin(), next.end());
  }
  return all;
}

TEST_CASE("logits are the same, bit for bit, whatever part of the weights is in memory") {
  if (on_cuda()) return;  // all weights are copied there
  for (const int n_threads : {1, 2}) {
    const std::vector<float> expected = logits_of(tiny_model(n_threads), 1);
    const size_t least = least_resident();
    int32_t n_streamed = 0;
    for (const size_t more : {size_t{0}, size_t{1} << 20, size_t{1} << 30}) {
      const std::shared_ptr<Model> model = with_resident(least + more, n_threads);
      CAPTURE(more);
      n_streamed += model->weights.stream->n_streamed();
      CHECK(logits_of(model, 1) == expected);
      CHECK(logits_of(model, 1) == expected);  // from where the pass before has left off
    }
    CHECK(n_streamed > tiny_model(1)->config.n_layers);  // all of them, and then some
  }
}

TEST_CASE("sessions in several threads share what is brought in") {
  if (on_cuda()) return;
  const std::vector<float> expected[] = {logits_of(tiny_model(1), 1), logits_of(tiny_model(1), 2)};
  const std::shared_ptr<Model> model = with_resident(least_resident(), 1);
  std::vector<float> found[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { found[i] = logits_of(model, i + 1); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) CHECK(found[i] == expected[i]);
}

TEST_CASE("a model is closed while the next layer is brought in") {
  if (on_cuda()) return;
  const size_t least = least_resident();
  for (int i = 0; i < 20; ++i) {
    const std::shared_ptr<Model> model = with_resident(least, 1);
    if (i % 2 == 0) {
      Session session(model, options());
      Random random(i);
      feed(session, 0, random_tokens(random, *model, 3));
    }
  }
}

}  // namespace
}  // namespace h2o

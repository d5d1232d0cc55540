// Which logits are copied when the device is emulated, and that tokens do not depend on it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "control.h"
#include "engine_rig.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

// Requests of 24 sequences with several kinds of sampling; one of each kind also needs all its
// logits.
std::vector<Request> sampled_requests(bool traced) {
  Random random(7);
  std::vector<Request> requests(24);
  for (size_t i = 0; i < requests.size(); ++i) {
    Request& r = requests[i];
    for (int n = 0; n < 5; ++n) r.prompt.push_back(random.integer(3, 60));
    r.max_tokens = 6;
    r.ignore_end = r.eager = true;
    r.sampling.seed = i;
    r.sampling.temperature = i % 6 == 0 ? 0 : 0.9f;
    r.sampling.top_k = i % 4 == 1 ? 3 : 40;
    if (i % 3 == 1) r.sampling.repeat_penalty = 1.2f;
    if (i % 5 == 1) r.sampling.frequency_penalty = 0.5f;
    if (i % 4 == 3) r.sampling.dry_multiplier = 0.8f;
    if (i % 8 == 5) r.sampling.logit_bias = {{5, -2.0f}};
    if (traced) r.trace = std::make_shared<Trace>(TraceOptions{.n_top = 1});
  }
  return requests;
}

// The tokens of each, computed in one batch, and the bytes copied to the host.
std::pair<std::vector<std::vector<int32_t>>, uint64_t> sample_together(
    const std::vector<Request>& requests) {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
  SessionOptions options = engine_options(static_cast<int32_t>(requests.size()));
  options.n_batch = 5 * options.n_sequences;  // all prompts in the first step
  const auto engine = make_engine(model, options);
  std::vector<Engine::Handle> handles;
  for (const Request& request : requests) handles.push_back(engine->submit(request, false));
  take_bytes_read();
  engine->begin(handles);  // all in the first step
  for (const auto& handle : handles) {
    while (engine->next(handle, no_interrupt)) {
    }
  }
  const uint64_t bytes = take_bytes_read();
  std::vector<std::vector<int32_t>> tokens;
  for (const auto& handle : handles) tokens.push_back(handle->generated_tokens());
  return {tokens, bytes};
}

TEST_CASE("sampling copies the largest logits, and all of them only for rows that need them" *
          doctest::skip(!on_cuda())) {
  constexpr uint64_t kSteps = 6, kVocab = 61;
  // At its end, each request reads the positions of what two layers of two KV heads keep, and the
  // slots written next.
  constexpr uint64_t kSlots = 1 + 3 + 4 + 1, kEnd = 2 * 2 * (kSlots + 1) * sizeof(int32_t);
  const auto requests = sampled_requests(false);
  const uint64_t n = requests.size();
  const auto [tokens, bytes] = sample_together(requests);
  CHECK(bytes == n * (kSteps * sizeof(LargestLogits) + kEnd));
  const auto [expected, all_bytes] = sample_together(sampled_requests(true));
  CHECK(all_bytes == n * (kSteps * kVocab * sizeof(float) + kEnd));
  CHECK(tokens == expected);

  auto mixed = sampled_requests(false);
  mixed[3].trace = std::make_shared<Trace>(TraceOptions{.n_top = 1});
  mixed[10].constraint = only_a();
  mixed[17].sampling = {.temperature = 1, .top_k = 0, .top_p = 1, .min_p = 0};
  const auto [mixed_tokens, mixed_bytes] = sample_together(mixed);
  CHECK(mixed_bytes ==
        kSteps * (n * sizeof(LargestLogits) + 3 * kVocab * sizeof(float)) + n * kEnd);
  for (size_t i = 0; i < n; ++i) {
    if (i != 10 && i != 17) CHECK(mixed_tokens[i] == expected[i]);
  }
}

// Captured steps read the temperatures of their own batch, and the selected logits are correct.
TEST_CASE("a step that selects logits gives the same logits as one that does not" *
          doctest::skip(!on_cuda())) {
  const auto model = tiny_model(1);
  const SessionOptions options{.policies = {KvPolicy{.sinks = 0, .heavy = 3, .recent = 2}},
                               .n_sequences = 2};
  Session whole(model, options), selects(model, options);
  Random random(12);
  for (int step = 0; step < 5; ++step) {
    const std::vector<std::vector<int32_t>> tokens = {random_tokens(random, *model, 1),
                                                      random_tokens(random, *model, 1)};
    const std::vector<Input> inputs = {{0, tokens[0]}, {1, tokens[1]}};
    const std::span<const float> logits = whole.step(inputs);
    const std::vector<float> temperatures = {random.real(0.5f, 2), 0};
    const std::span<const LargestLogits> found = selects.select(inputs, temperatures);
    const size_t n_vocab = logits.size() / 2;
    for (size_t i = 0; i < 2; ++i) {
      const std::span<const float> row = logits.subspan(i * n_vocab, n_vocab);
      CHECK(std::ranges::equal(selects.selected_row(i), row));
      REQUIRE(found[i].n > 0);
      double rest = 0;
      std::vector<bool> is_found(n_vocab);
      for (const auto& [token, value] : std::span(found[i].logits).first(found[i].n)) {
        CHECK(row[token] == value);
        is_found[token] = true;
      }
      const auto least = found[i].logits[found[i].n - 1].value;
      for (size_t token = 0; token < n_vocab; ++token) {
        if (is_found[token]) continue;
        CHECK(row[token] <= least);
        if (i == 0)
          rest += std::exp((double{row[token]} - found[i].logits[0].value) / temperatures[0]);
      }
      CHECK(std::abs(found[i].rest - rest) <= rest * 0x1p-13);
    }
  }
}

}  // namespace
}  // namespace h2o

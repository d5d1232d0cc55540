// Captured passes are bit-identical to passes without a graph, whatever the batch.
#include <doctest/doctest.h>

#include "model/forward.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr int32_t kSequences = 5;
constexpr int32_t kRows = 40;

// A simplified Session, with or without a graph.
class Decoder {
 public:
  Decoder(std::shared_ptr<Model> model, const KvPolicy& policy, bool roll, bool records,
          int32_t n_recalled = 0)
      : model_(std::move(model)),
        records_(records),
        cache_(*model_->backend, policy, shape_of(*model_, roll, n_recalled)),
        activations_(
            allocate_activations(*model_->backend, model_->config, kRows, kSequences, storage_)) {
    for (int32_t s = 0; roll && s < kSequences; ++s) cache_.roll(s);
  }

  // The logits [n_inputs, n_vocab].
  std::vector<float> step(const std::vector<std::pair<int32_t, std::vector<int32_t>>>& inputs) {
    Batch batch;  // at another address than the last one
    for (const auto& [sequence, tokens] : inputs) {
      batch.add(sequence, cache_.length(sequence), tokens, cache_.rolling(sequence));
      batch.want_last();
    }
    Backend& b = *model_->backend;
    bool issued = false;
    const auto pass = [&] {
      issued = true;
      forward(b, model_->config, model_->weights, batch, cache_, activations_);
      unembed(b, model_->config, model_->weights, batch, activations_);
    };
    if (records_) {
      b.run(batch, graph_, pass);
    } else {
      b.run(batch, pass);
    }
    n_replayed_ += !issued;
    cache_.advance(batch);
    std::vector<float> logits(inputs.size() * model_->config.n_vocab);
    b.read(logits.data(), activations_.logits.data, logits.size() * sizeof(float));
    return logits;
  }

  void reset(int32_t sequence) {
    const bool rolls = cache_.rolling(sequence);
    cache_.reset(sequence);
    if (rolls) cache_.roll(sequence);
  }

  KvCache& cache() { return cache_; }
  int n_replayed() const { return n_replayed_; }  // steps whose operations were not issued again

 private:
  static KvShape shape_of(const Model& model, bool roll, int32_t n_recalled) {
    return {.n_layers = model.config.n_layers,
            .n_sequences = kSequences,
            .n_heads = model.config.n_heads,
            .n_kv_heads = model.config.n_kv_heads,
            .head_dim = model.config.head_dim,
            .max_tokens = model.config.n_ctx_train,
            .max_rows = kRows,
            .rope = roll ? model.weights.rope : Rope{},
            .archive = {.n_recalled = n_recalled, .k_dtype = DType::f16, .v_dtype = DType::f16}};
  }

  std::shared_ptr<Model> model_;
  const bool records_;
  KvCache cache_;
  Buffer storage_;
  Activations activations_;
  std::unique_ptr<CapturedGraph> graph_;
  int n_replayed_ = 0;
};

bool same_entries(const KvCache& a, const KvCache& b) {
  for (int32_t layer = 0; layer < a.shape().n_layers; ++layer) {
    for (int32_t sequence = 0; sequence < kSequences; ++sequence) {
      for (int32_t kv_head = 0; kv_head < a.shape().n_kv_heads; ++kv_head) {
        const std::vector<KvEntry> x = a.entries(layer, sequence, kv_head);
        const std::vector<KvEntry> y = b.entries(layer, sequence, kv_head);
        if (x.size() != y.size()) return false;
        for (size_t i = 0; i < x.size(); ++i) {
          if (x[i].position != y[i].position || !same_bits(x[i].score, y[i].score)) return false;
        }
      }
    }
  }
  return true;
}

void check_graphs(const std::shared_ptr<Model>& model, const KvPolicy& policy, bool roll,
                  int n_steps) {
  CAPTURE(policy.heavy);
  CAPTURE(roll);
  Decoder recorded(model, policy, roll, true);
  Decoder eager(model, policy, roll, false);
  Random random(1);
  std::vector<int32_t> order = {0, 1, 2, 3, 4};
  for (int step = 0; step < n_steps; ++step) {
    CAPTURE(step);
    // The next token of some sequences, in any order; occasionally a chunk, or one is reset.
    for (int32_t i = kSequences - 1; i > 0; --i) std::swap(order[i], order[random.integer(0, i)]);
    if (step % 11 == 10) {
      for (Decoder* decoder : {&recorded, &eager}) decoder->reset(order[0]);
    }
    std::vector<std::pair<int32_t, std::vector<int32_t>>> inputs;
    const int32_t n = random.integer(1, kSequences);
    for (int32_t i = 0; i < n; ++i) {
      const int32_t n_tokens = step % 7 == 3 && i == 0 ? random.integer(2, 6) : 1;
      if (recorded.cache().room(order[i]) < n_tokens) continue;
      const int32_t end = recorded.cache().length(order[i]) + n_tokens;
      if (!roll && end > model->config.n_ctx_train) continue;  // it may have no more positions
      inputs.emplace_back(order[i], random_tokens(random, *model, n_tokens));
    }
    if (inputs.empty()) continue;
    const std::vector<float> logits = recorded.step(inputs);
    CHECK(same_bits(eager.step(inputs), logits));
    if (step % 10 == 9) CHECK(same_entries(recorded.cache(), eager.cache()));
  }
  if (on_cuda()) CHECK(recorded.n_replayed() > n_steps / 4);
}

TEST_CASE("steps with a graph match those without") {
  const KvPolicy h2o{.sinks = 1, .heavy = 6, .recent = 5};
  const KvPolicy window{.sinks = 2, .heavy = 0, .recent = 9};
  check_graphs(tiny_model(1), h2o, false, 25);
  const auto opt = load(H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf", 1);
  for (const KvPolicy& policy : {KvPolicy{}, h2o, window}) check_graphs(opt, policy, false, 60);
  for (const char* path : {H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf",
                           H2O_SOURCE_DIR "/tests/data/golden/gptneox.gguf",
                           H2O_SOURCE_DIR "/tests/data/golden/qwen3.gguf"}) {
    CAPTURE(path);
    const std::shared_ptr<Model> rotary = load(path, 1);
    check_graphs(rotary, {}, false, 60);
    for (const KvPolicy& policy : {h2o, window}) check_graphs(rotary, policy, true, 60);
  }
}

// The archive grows while one captured step is replayed.
TEST_CASE("captured steps recall tokens archived later" * doctest::skip(!archives())) {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf", 1);
  const KvPolicy policy{.sinks = 1, .heavy = 4, .recent = 3};
  Decoder recorded(model, policy, false, true, 1);
  Decoder eager(model, policy, false, false, 1);
  Decoder evicting(model, policy, false, false);
  Random random(4);
  int n_others = 0;
  for (int step = 0; step < 25; ++step) {
    const std::vector<std::pair<int32_t, std::vector<int32_t>>> inputs = {
        {step == 0 ? 0 : 1, random_tokens(random, *model, step == 1 ? 10 : 1)}};
    const std::vector<float> expected = eager.step(inputs);
    CHECK(same_bits(recorded.step(inputs), expected));
    n_others += !same_bits(evicting.step(inputs), expected);
  }
  CHECK(recorded.cache().archive_bytes() == eager.cache().archive_bytes());
  CHECK(same_entries(recorded.cache(), eager.cache()));
  CHECK(n_others > 15);
  if (on_cuda()) CHECK(recorded.n_replayed() == 25 - 3);  // the first, a chunk, and the capture
}

// Two sessions have a graph each, and their passes alternate.
TEST_CASE("graphs do not affect each other") {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf", 1);
  const KvPolicy policy{.sinks = 0, .heavy = 8, .recent = 4};
  Decoder first(model, policy, false, true);
  Decoder second(model, policy, false, true);
  Decoder eager(model, policy, false, false);
  Random random(2);
  for (int step = 0; step < 30; ++step) {
    const std::vector<std::pair<int32_t, std::vector<int32_t>>> inputs = {
        {step % kSequences, random_tokens(random, *model, 1)},
        {(step + 2) % kSequences, random_tokens(random, *model, 1)}};
    const std::vector<float> expected = eager.step(inputs);
    CHECK(same_bits(first.step(inputs), expected));
    CHECK(same_bits(second.step(inputs), expected));
  }
  if (on_cuda()) CHECK(std::min(first.n_replayed(), second.n_replayed()) == 30 - 2);
}

}  // namespace
}  // namespace h2o

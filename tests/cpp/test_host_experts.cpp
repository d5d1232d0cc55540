// Mixture-of-experts models with only some weights in the back end's memory: the others are read
// from the file on the CPU, and from host memory on CUDA.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "core/error.h"
#include "random_mixture.h"
#include "session_rig.h"

namespace h2o {
namespace {

// A prompt, then single tokens of it batched with another prompt's.
std::vector<float> logits_of(const std::shared_ptr<Model>& model) {
  Session session(model, {.policies = {{.sinks = 0, .heavy = 9, .recent = 9}},
                          .n_ctx = 40,
                          .n_batch = 20,
                          .n_sequences = 2});
  Random random(1);
  std::vector<float> all = feed(session, 0, random_tokens(random, *model, 12));
  for (const int n : {3, 1, 1}) {
    const std::vector<int32_t> one = random_tokens(random, *model, 1);
    const std::vector<int32_t> some = random_tokens(random, *model, n);
    const Input both[] = {{0, one}, {1, some}};
    const std::span<const float> logits = session.step(both);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

std::shared_ptr<Model> open(const MixtureFile& file, size_t max_resident) {
  return std::make_shared<Model>(file.path(), test_backend(), nullptr, max_resident);
}

// Sizes of a layer's experts, and of all other weights.
struct Sizes {
  explicit Sizes(const Model& model) {
    const Weights& w = model.weights;
    const auto size = [&](const Tensor& t) { return t ? model.backend->upload_bytes(t) : 0; };
    const auto both = [&](const Affine& one) { return size(one.weight) + size(one.bias); };
    const Mixture& m = w.layers.back().mixture;
    experts = size(m.gate.weight) + size(m.up.weight) + size(m.down.weight);
    others = size(w.token_embd) + both(w.output_norm) + both(w.output);
    for (const Layer& layer : w.layers) {
      others += both(layer.attn_norm) + both(layer.attn_q) + both(layer.attn_k) +
                both(layer.attn_v) + both(layer.attn_output) + both(layer.ffn_norm) +
                both(layer.mixture.router) + size(layer.mixture.gate.bias) +
                size(layer.mixture.up.bias) + size(layer.mixture.down.bias) +
                size(layer.attn_q_norm) + size(layer.attn_k_norm) + size(layer.attn_sinks) +
                both(layer.ffn_gate) + both(layer.ffn_up) + both(layer.ffn_down) +
                size(layer.mixture.selection_bias) + both(layer.mixture.shared_gate) +
                both(layer.mixture.shared_up) + both(layer.mixture.shared_down);
    }
  }
  size_t experts, others;
};

void check_logits(const MixtureShape& shape) {
  CAPTURE(shape.architecture);
  CAPTURE(info(shape.experts).name);
  const MixtureFile file(shape, 1);
  const std::shared_ptr<Model> whole = open(file, 0);
  CHECK_FALSE(whole->weights.residency);
  const std::vector<float> expected = logits_of(whole);
  CHECK(std::ranges::none_of(expected, [](float x) { return std::isnan(x); }));
  if (!on_gpu()) {
    const std::shared_ptr<Model> part = open(file, std::filesystem::file_size(file.path()) * 3 / 4);
    CHECK(part->weights.residency->n_kept_experts() < static_cast<int32_t>(shape.n_experts));
    CHECK(same_bits(logits_of(part), expected));
    return;
  }
  const Sizes sizes(*whole);
  const int32_t n_dense = whole->config.mixture.n_dense;
  for (int32_t n = n_dense; n <= static_cast<int32_t>(shape.n_layers); ++n) {
    CAPTURE(n);
    const std::shared_ptr<Model> part = open(file, sizes.others + (n - n_dense) * sizes.experts);
    REQUIRE(part->weights.residency->unit() == WeightResidency::Unit::experts);
    CHECK(part->weights.residency->n_kept() == n);
    CHECK(same_bits(logits_of(part), expected));
  }
  CHECK_THROWS_AS(open(file, sizes.others - 1), InvalidArgument);
}

TEST_CASE("logits are bit-identical wherever experts are stored") {
  check_logits({"llama", DType::f16, 2, 8, 2});
  check_logits({"gpt-oss", DType::mxfp4, 2, 9, 2});
  check_logits({"glm4moe", DType::q8_0, 4, 9, 3});
}

TEST_CASE("layers are streamed if that needs less memory than the dense weights" *
          doctest::skip(!on_gpu())) {
  const MixtureFile file({"llama", DType::q8_0, 6, 2, 1}, 1);
  const std::shared_ptr<Model> whole = open(file, 0);
  const Sizes sizes(*whole);
  const std::shared_ptr<Model> part = open(file, sizes.others - 1);
  REQUIRE(part->weights.residency->unit() == WeightResidency::Unit::layers);
  CHECK(part->weights.residency->n_streamed() > 0);
  CHECK(same_bits(logits_of(part), logits_of(whole)));
}

}  // namespace
}  // namespace h2o

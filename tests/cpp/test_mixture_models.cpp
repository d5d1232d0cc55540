// Complete mixture-of-experts models on the test device, compared with the scalar CPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "allocations.h"
#include "device_pair.h"
#include "random_mixture.h"

namespace h2o {
namespace {

// The smallest difference between the last selected expert and the next one, over all rows computed
// during its lifetime, relative to the row's largest logit; of sigmoid routers, of their scores.
class Margin {
 public:
  explicit Margin(const Model& model) : model_(model) {
    model.backend->observe([this](const Tensor& weight, const Tensor& x) {
      for (const Layer& layer : model_.weights.layers) {
        if (layer.mixture.router.weight.data == weight.data) add(layer.mixture, x);
      }
    });
  }
  ~Margin() { model_.backend->observe(nullptr); }

  double least() const { return least_; }

 private:
  void add(const Mixture& mixture, const Tensor& x) {
    const Affine& router = mixture.router;
    const Tensor& w = router.weight;
    const int32_t n_used = model_.config.mixture.n_used;
    if (n_used == w.rows) return;
    REQUIRE_FALSE(w.interleaved);
    for (int64_t row = 0; row < x.rows; ++row) {
      std::vector<double> logits(w.rows);
      double largest = 0;
      for (int64_t e = 0; e < w.rows; ++e) {
        if (router.bias) logits[e] = router.bias.floats()[e];
        for (int64_t i = 0; i < x.cols; ++i) {
          logits[e] += double{w.floats()[e * w.cols + i]} * x.floats()[row * x.cols + i];
        }
        largest = std::max(largest, std::abs(logits[e]));
        if (model_.config.mixture.sigmoid) logits[e] = 1 / (1 + std::exp(-logits[e]));
        if (mixture.selection_bias) logits[e] += mixture.selection_bias.floats()[e];
      }
      std::ranges::sort(logits, std::greater{});
      least_ = std::min(least_, (logits[n_used - 1] - logits[n_used]) / largest);
    }
  }

  const Model& model_;
  double least_ = std::numeric_limits<double>::infinity();
};

// For the steps of check_steps() on the scalar CPU.
double margin_of(const std::filesystem::path& path, const SessionOptions& options) {
  Session session(std::make_shared<Model>(path, make_cpu_backend(1, "scalar")), options);
  const Margin margin(session.model());
  Random random(1);
  for (const int32_t n : kSteps) feed(session, 0, random_tokens(random, session.model(), n));
  return margin.least();
}

// Bounds are those of other models. Routing must not depend on rounding: rows use either all
// experts, or the layers before the last router are in F32 and no two logits are close.
void check_model(const MixtureShape& shape) {
  CAPTURE(shape.architecture);
  CAPTURE(info(shape.experts).name);
  // See relative_error(), with at most 12 matrices per layer; and the difference of two router
  // logits.
  const double error = 2 * 6 * 64 * kUnit * std::sqrt(12 * shape.n_layers);
  const SessionOptions options{.policies = {{.sinks = 1, .heavy = 7, .recent = 5}},
                               .n_ctx = 40,
                               .n_batch = 16,
                               .k_dtype = DType::f32,
                               .v_dtype = DType::f32};
  uint64_t seed = 0;
  std::optional<MixtureFile> file;
  do {
    REQUIRE(++seed < 20);
    file.emplace(shape, seed);
  } while (margin_of(file->path(), options) <= error);
  REQUIRE((shape.n_used == shape.n_experts || shape.experts == DType::f32 || shape.n_layers == 1));
  Pair pair(file->path(), options);
  check_steps(pair, DType::f32);
}

TEST_CASE("steps with mixtures of every family match the CPU") {
  struct Experts {
    const char* architecture;
    uint32_t n_experts, n_used;
  };
  constexpr Experts kExperts[] = {{"llama", 5, 2},  {"qwen2moe", 6, 3},   {"qwen3moe", 40, 4},
                                  {"olmoe", 9, 4},  {"granitemoe", 5, 2}, {"gpt-oss", 5, 2},
                                  {"glm4moe", 9, 3}};
  for (const auto& [architecture, n_experts, n_used] : kExperts) {
    check_model({architecture, DType::f32, 2, n_experts, n_used});
  }
}

TEST_CASE("a step of a mixture allocates nothing, not even the first" * doctest::skip(on_gpu())) {
  for (const DType experts : {DType::f32, DType::q8_0}) {
    const MixtureFile file({"qwen3moe", experts, 2, 40, 4}, 1);
    const auto model = std::make_shared<Model>(file.path(), test_backend(2));
    Session session(model, {.policies = {}, .n_ctx = 40, .n_batch = 32});
    Random random(1);
    for (const int32_t n : {1, 32, 1}) {
      const std::vector<int32_t> tokens = random_tokens(random, *model, n);
      const Input input{0, tokens};
      const int64_t before = allocations();
      session.step({&input, 1});
      CHECK(allocations() == before);
    }
  }
}

TEST_CASE("steps with experts of other types match the CPU") {
  constexpr std::pair<const char*, DType> kExperts[] = {
      {"llama", DType::q8_0},      {"qwen2moe", DType::q8_0}, {"olmoe", DType::f16},
      {"granitemoe", DType::q4_0}, {"glm4moe", DType::q5_0},  {"gpt-oss", DType::mxfp4}};
  for (const auto& [architecture, experts] : kExperts) {
    check_model({architecture, experts, 1, 5, 2});
    check_model({architecture, experts, 2, 3, 3});
  }
}

}  // namespace
}  // namespace h2o

// Compares the test device with the scalar CPU: steps of models of every kind, and their snapshots.
#include <doctest/doctest.h>

#include <algorithm>

#include "device_pair.h"

namespace h2o {
namespace {

constexpr KvPolicy kFull{};
constexpr KvPolicy kH2o{.sinks = 1, .heavy = 7, .recent = 5};
constexpr KvPolicy kSinks{.sinks = 2, .heavy = 0, .recent = 10};

struct File {
  const char* path;
  bool rolls;  // it supports rolling positions
};
constexpr File kTinyOpt{H2O_SOURCE_DIR "/models/tiny-opt.gguf", false};
constexpr File kLlama{H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", true};
constexpr File kGemma{H2O_SOURCE_DIR "/tests/data/golden/gemma2.gguf", true};
constexpr File kModels[] = {
    kTinyOpt,
    {H2O_SOURCE_DIR "/tests/data/golden/opt_odd_heads.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf", false},
    kLlama,
    {H2O_SOURCE_DIR "/tests/data/golden/gptneox.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/qwen3.gguf", true},
    kGemma,
    {H2O_SOURCE_DIR "/tests/data/golden/bloom.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/qwen3moe.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/gemma4.gguf", false},  // layers differ in their heads
    {H2O_SOURCE_DIR "/tests/data/golden/gemma4_shared.gguf", false},  // layers share a cache
};

struct Cache {
  KvPolicy policy;
  DType dtype;
  Positions positions = Positions::original;
  bool archives = false;
};

template <class Body>
void with(const File& model, const Cache& cache, const Body& body) {
  CAPTURE(model.path);
  CAPTURE(cache.policy.heavy);
  CAPTURE(info(cache.dtype).name);
  CAPTURE(cache.positions == Positions::rolling);
  CAPTURE(cache.archives);
  SessionOptions options{.policies = {cache.policy},
                         .n_ctx = 40,
                         .n_batch = 16,
                         .k_dtype = cache.dtype,
                         .v_dtype = cache.dtype,
                         .positions = cache.positions};
  // All pages are recalled, since the selection depends on rounding.
  if (cache.archives) {
    options.archive = {.n_recalled = 1000, .k_dtype = cache.dtype, .v_dtype = cache.dtype};
    if (cache.policy.heavy == 0) options.archive.heads = {0};  // none in the other layers
  }
  Pair pair(model.path, options);
  body(pair, cache.dtype);
}

template <class Body>
void with_all_caches(const File& model, const Body& body) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    with(model, {kFull, dtype}, body);
    for (const KvPolicy& policy : {kH2o, kSinks}) {
      with(model, {policy, dtype}, body);
      if (archives()) with(model, {policy, dtype, Positions::original, true}, body);
      if (model.rolls) with(model, {policy, dtype, Positions::rolling}, body);
    }
  }
}

TEST_CASE("a step of every model matches the CPU") {
  for (const File& model : kModels) {
    if (!brief()) with(model, {kFull, DType::f16}, check_steps);
    with(model, {kH2o, DType::f16}, check_steps);
    const Positions positions = model.rolls ? Positions::rolling : Positions::original;
    with(model, {kSinks, DType::f32, positions}, check_steps);
  }
}

TEST_CASE("a step with every cache matches the CPU") {
  with_all_caches(kLlama, check_steps);
  with_all_caches(kGemma, check_steps);
}

TEST_CASE("all rows of a long chunk match the CPU") {
  for (const char* path : {kTinyOpt.path, kLlama.path}) {
    CAPTURE(path);
    Pair pair(path, {.policies = {kFull},
                     .n_ctx = 40,
                     .n_batch = 40,
                     .k_dtype = DType::f32,
                     .v_dtype = DType::f32});
    Random random(2);
    const std::vector<int32_t> tokens = random_tokens(random, pair.cpu.model(), 39);
    std::vector<float> expected, logits;
    const auto into = [](std::vector<float>& all) {
      return [&all](int32_t, std::span<const float> row) {
        all.insert(all.end(), row.begin(), row.end());
      };
    };
    pair.cpu.score({0, tokens}, into(expected));
    pair.device.score({0, tokens}, into(logits));
    REQUIRE(logits.size() == expected.size());
    double largest = 0, difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max<double>(largest, std::abs(expected[i]));
      difference = std::max<double>(difference, std::abs(double{expected[i]} - logits[i]));
    }
    CHECK(std::ranges::none_of(logits, [](float x) { return std::isnan(x); }));
    CHECK(difference <= relative_error(pair.cpu.model(), DType::f32) * largest);
  }
}

TEST_CASE("a snapshot can be transferred between devices and back") {
  with_all_caches(kLlama, [](Pair& pair, DType) {
    Random random(3);
    for (const int32_t n : {5, 1, 1, 14, 1, 1}) {
      CAPTURE(n);
      feed(pair.device, 0, random_tokens(random, pair.cpu.model(), n));
      const std::vector<std::byte> snapshot = save(pair.device);
      pair.cpu.load(0, snapshot);
      CHECK(save(pair.cpu) == snapshot);
      pair.device.reset(0);
      pair.device.load(0, save(pair.cpu));
      CHECK(save(pair.device) == snapshot);
    }
  });
}

}  // namespace
}  // namespace h2o

// Compares the test device with the scalar CPU: steps of models of every kind, and their snapshots.
#include <doctest/doctest.h>

#include <algorithm>
#include <string_view>

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
constexpr File kModels[] = {
    {H2O_SOURCE_DIR "/models/tiny-opt.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/opt_odd_heads.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/gptneox.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/qwen3.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/gemma2.gguf", true},
    {H2O_SOURCE_DIR "/tests/data/golden/bloom.gguf", false},
    {H2O_SOURCE_DIR "/tests/data/golden/qwen3moe.gguf", true},
};

// All pages are recalled, since the selection depends on rounding.
ArchiveOptions archive_in(DType dtype) {
  return {.n_recalled = 1000, .k_dtype = dtype, .v_dtype = dtype};
}

template <class Body>
void for_all(const Body& body) {
  for (const auto& model : kModels) {
    const auto& [path, rolls] = model;
    for (const KvPolicy& policy : {kFull, kH2o, kSinks}) {
      for (const DType dtype : {DType::f32, DType::f16}) {
        for (const Positions positions : {Positions::original, Positions::rolling}) {
          if (positions == Positions::rolling && (!rolls || policy.budget() > 40)) continue;
          for (const bool archives : {false, true}) {
            const bool may_archive = positions == Positions::original && policy.budget() <= 40 &&
                                     std::string_view(path).find("bloom") == std::string::npos;
            if (archives && !may_archive) continue;
            const bool large = path == kModels[0].path;
            if (large && (policy.heavy == 0 || dtype == DType::f32)) continue;
            CAPTURE(model.path);
            CAPTURE(policy.heavy);
            CAPTURE(info(dtype).name);
            CAPTURE(positions == Positions::rolling);
            CAPTURE(archives);
            Pair pair(path, {.policies = {policy},
                             .n_ctx = 40,
                             .n_batch = 16,
                             .k_dtype = dtype,
                             .v_dtype = dtype,
                             .positions = positions,
                             .archive = archives ? archive_in(dtype) : ArchiveOptions()});
            body(pair, dtype);
          }
        }
      }
    }
  }
}

TEST_CASE("a step matches the CPU") { for_all(check_steps); }

TEST_CASE("all rows of a long chunk match the CPU") {
  for (const char* path : {kModels[0].path, kModels[4].path}) {
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
  for_all([](Pair& pair, DType) {
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

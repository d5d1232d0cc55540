// The test device beside the scalar CPU: the same model, step by step from the same state, which
// travels between them as a snapshot.
#include <doctest/doctest.h>

#include <algorithm>
#include <string_view>

#include "cpu/cpu_backend.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr KvPolicy kFull{};
constexpr KvPolicy kH2o{.sinks = 1, .heavy = 7, .recent = 5};
constexpr KvPolicy kSinks{.sinks = 2, .heavy = 0, .recent = 10};

struct File {
  const char* path;
  bool rolls;  // its positions may
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

// All pages are recalled: which ones are is rounding's to decide.
ArchiveOptions archive_in(DType dtype) {
  return {.n_recalled = 1000, .k_dtype = dtype, .v_dtype = dtype};
}

// A session of the same model on either.
struct Pair {
  Pair(const char* path, const SessionOptions& options)
      : cpu(std::make_shared<Model>(path, make_cpu_backend(1, "scalar")), options),
        device(load(path, 2), options) {}

  Session cpu, device;
};

std::vector<std::byte> save(const Session& session) {
  return session.save(0, {.tokens = std::vector<int32_t>(session.tokens_seen(0)), .note = ""});
}

// What one matrix may add to the relative error of the logits: with quantised weights rows are
// rounded to 8 bits of the largest of 32; the cache may be rounded to f16; and otherwise there are
// some 64 roundings in a sum and what surrounds it.
double matrix_error(const Model& model, DType kv_dtype) {
  if (model.weights.layers[0].attn_q.weight.dtype != DType::f32) return 0x1p-8;
  return kv_dtype != DType::f32 ? 0x1p-11 : 64 * kUnit;
}

// Each of the at most 8 matrices of a layer and the 2 outside adds such an error, of random sign; 6
// are as many times what is to be expected.
double relative_error(const Model& model, DType kv_dtype) {
  const double n_matrices = 8 * model.config.n_layers + 2;
  return 6 * matrix_error(model, kv_dtype) * std::sqrt(n_matrices);
}

// Is b the same survivors as a, with the same scores, up to such an error; or others where the
// error decided?
bool close_entries(const std::vector<KvEntry>& a, const std::vector<KvEntry>& b, double error) {
  if (a.size() != b.size()) return false;
  const auto find = [](const std::vector<KvEntry>& entries, int32_t position) {
    return std::ranges::find(entries, position, &KvEntry::position);
  };
  for (const KvEntry& x : a) {
    const auto y = find(b, x.position);
    if (y != b.end() && !(std::abs(x.score - y->score) <= error)) return false;
    if (y != b.end()) continue;
    for (const KvEntry& instead : b) {
      const bool new_in_b = find(a, instead.position) == a.end();
      if (new_in_b && !(std::abs(x.score - instead.score) <= 2 * error)) return false;
    }
  }
  return true;
}

void check_steps(Pair& pair, DType kv_dtype) {
  const Model& model = pair.cpu.model();
  Random random(1);
  for (const int32_t n : {7, 1, 1, 9, 1, 2, 1, 1}) {
    CAPTURE(n);
    const bool rolls = pair.cpu.rolling(0);
    pair.device.load(0, save(pair.cpu));
    CHECK(pair.device.rolling(0) == rolls);
    const std::vector<int32_t> tokens = random_tokens(random, model, n);
    const std::vector<float> expected = feed(pair.cpu, 0, tokens);
    const std::vector<float> logits = feed(pair.device, 0, tokens);
    double largest = 0, difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max<double>(largest, std::abs(expected[i]));
      const double off = std::abs(double{expected[i]} - logits[i]);
      difference = off <= difference ? difference : off;  // or NaN
    }
    const double error = relative_error(model, kv_dtype);
    CHECK(difference <= error * largest);
    // A probability is off by what two logits of attention are, of up to 8 here; each row and head
    // of the group adds one.
    const int32_t group = model.config.n_heads / model.config.n_kv_heads;
    for (int32_t layer = 0; layer < model.config.n_layers; ++layer) {
      for (int32_t kv_head = 0; kv_head < model.config.n_kv_heads; ++kv_head) {
        CHECK(close_entries(pair.cpu.entries(layer, 0, kv_head),
                            pair.device.entries(layer, 0, kv_head), 16 * error * n * group));
      }
    }
  }
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

TEST_CASE("a step is the CPU's") { for_all(check_steps); }

TEST_CASE("a long chunk is the CPU's, and all its rows") {
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

TEST_CASE("a snapshot is the same on either, and back") {
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

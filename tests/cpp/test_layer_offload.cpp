// Sessions of a model with only a part of the weights in memory at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "model_writer.h"
#include "session_rig.h"

namespace h2o {
namespace {

// Six layers; or three that are small enough for the emulation.
const char* model_file() {
  return on_gpu() ? H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf"
                  : H2O_SOURCE_DIR "/models/tiny-opt.gguf";
}

std::shared_ptr<Model> with_resident(const std::filesystem::path& path, size_t n_bytes,
                                     int n_threads = 1) {
  return std::make_shared<Model>(path, test_backend(n_threads), nullptr, n_bytes);
}

// The minimum, from the error message.
size_t least_resident(const std::filesystem::path& path) {
  size_t n = 0;
  try {
    with_resident(path, 1);
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    const size_t at = message.find_last_of(' ') + 1;
    std::from_chars(message.data() + at, message.data() + message.size(), n);
  }
  REQUIRE(n > 0);
  return n;
}

// A model with Q, K and V in one tensor and alternating quantized types: two layers that share a
// buffer have different sizes.
class QuantizedModel {
 public:
  explicit QuantizedModel(uint32_t n_layers) {
    writer_.key("context_length", uint32_t{64});
    writer_.key("embedding_length", uint32_t{kWidth});
    writer_.key("block_count", n_layers);
    writer_.key("feed_forward_length", uint32_t{kWidth});
    writer_.key("attention.head_count", uint32_t{8});
    writer_.key("attention.layer_norm_epsilon", 1e-5f);
    add("token_embd.weight", DType::q8_0, kWords, kWidth);
    for (uint32_t l = 0; l < n_layers; ++l) {
      const std::string blk = concat("blk.", l, ".");
      const auto types = std::array{DType::q8_0, DType::q4_k, DType::q6_k};
      add_affine(blk + "attn_norm", DType::f32, 1);
      add_affine(blk + "attn_qkv", types[l % 3], 3 * kWidth);
      add_affine(blk + "attn_output", types[(l + 1) % 3], kWidth);
      add_affine(blk + "ffn_norm", DType::f32, 1);
      add_affine(blk + "ffn_up", types[l % 2], kWidth);
      add_affine(blk + "ffn_down", types[(l / 3) % 2], kWidth);
    }
    add_affine("output_norm", DType::f32, 1);
    add("output.weight", DType::q8_0, kWords, kWidth);
    file_.emplace(writer_.file());
  }

  const std::filesystem::path& path() const { return file_->path; }

 private:
  static constexpr uint64_t kWidth = 256;  // a superblock
  static constexpr uint64_t kWords = 32;

  // A norm has one row, with a bias like it.
  void add_affine(const std::string& name, DType dtype, uint64_t rows) {
    add(name + ".weight", dtype, rows, kWidth);
    add(name + ".bias", DType::f32, 1, rows == 1 ? kWidth : rows);
  }

  void add(const std::string& name, DType dtype, uint64_t rows, uint64_t cols) {
    std::vector<uint64_t> dims = {cols};
    if (rows > 1) dims.push_back(rows);
    const auto n = static_cast<int64_t>(rows * cols);
    writer_.add(name, dtype, dims, random_weights(writer_.random, dtype, n, real_scales));
  }

  ModelWriter writer_{"gptneox", 7};
  std::optional<TempFile> file_;
};

constexpr size_t kFirstLayer = 500'000;  // fits it, without the second

SessionOptions options() {
  return {.policies = {KvPolicy{.sinks = 0, .heavy = 9, .recent = 9}},
          .n_ctx = 40,
          .n_batch = 20,
          .n_sequences = 2};
}

// A prompt in one sequence, then a token of it batched with a prompt of another, then single
// tokens. Emulated ones are short, but stream layers as often.
std::vector<float> logits_of(const std::shared_ptr<Model>& model, uint64_t seed) {
  Random random(seed);
  Session session(model, options());
  std::vector<float> all = feed(session, 0, random_tokens(random, *model, on_gpu() ? 3 : 20));
  const std::vector<int32_t> one = random_tokens(random, *model, 1);
  const std::vector<int32_t> prompt = random_tokens(random, *model, on_gpu() ? 2 : 19);
  const Input both[] = {{0, one}, {1, prompt}};
  const std::span<const float> logits = session.step(both);
  all.insert(all.end(), logits.begin(), logits.end());
  for (int step = 0; step < 2; ++step) {
    const std::vector<float> next = feed(session, step % 2, random_tokens(random, *model, 1));
    all.insert(all.end(), next.begin(), next.end());
  }
  return all;
}

// Bit for bit, with some resident layers and with none.
void check_logits(const std::filesystem::path& path, int n_threads, std::vector<size_t> more) {
  const std::vector<float> expected =
      logits_of(std::make_shared<Model>(path, test_backend(n_threads)), 1);
  CHECK(std::ranges::none_of(expected, [](float x) { return std::isnan(x); }));
  const size_t least = least_resident(path);
  for (const size_t bytes : more) {
    const std::shared_ptr<Model> model = with_resident(path, least + bytes, n_threads);
    const WeightResidency& stream = *model->weights.residency;
    CAPTURE(bytes);
    CAPTURE(stream.n_streamed());
    CHECK((stream.n_streamed() > 0) == (stream.streamed_bytes() > 0));
    CHECK((stream.n_streamed() == model->config.n_layers) == (bytes == 0));
    CHECK(same_bits(logits_of(model, 1), expected));
  }
}

TEST_CASE("logits are bit-identical whatever part of the weights is in memory") {
  for (const int n_threads : {1, 2}) {
    if (on_gpu() && n_threads == 2) break;
    check_logits(model_file(), n_threads, {0, size_t{1} << 20, size_t{1} << 30});
  }
}

TEST_CASE("quantized layers of several types are streamed, an even or odd number of them") {
  for (const uint32_t n_layers : {3, 4}) {
    CAPTURE(n_layers);
    check_logits(QuantizedModel(n_layers).path(), 1, {0});
  }
  // The first is resident.
  for (const uint32_t n_layers : {4, 5}) {
    CAPTURE(n_layers);
    const QuantizedModel model(n_layers);
    CHECK(with_resident(model.path(), least_resident(model.path()) + kFirstLayer)
              ->weights.residency->n_streamed() == static_cast<int32_t>(n_layers) - 1);
    check_logits(model.path(), 1, {kFirstLayer});
  }
}

void check_early_ends(const std::filesystem::path& path, size_t more) {
  const auto expected = logits_of(std::make_shared<Model>(path, test_backend()), 3);
  const auto model = with_resident(path, least_resident(path) + more);
  CAPTURE(model->weights.residency->n_streamed());
  for (int32_t last = 0; last < model->config.n_layers; ++last) {
    CAPTURE(last);
    Session session(model, options());
    Random random(4);
    const int32_t n_layers = std::exchange(model->config.n_layers, last + 1);
    feed(session, 0, random_tokens(random, *model, 1));
    model->config.n_layers = n_layers;
    CHECK(same_bits(logits_of(model, 3), expected));
  }
}

TEST_CASE("an interrupted pass does not affect the next one") {
  check_early_ends(model_file(), 0);
  check_early_ends(QuantizedModel(4).path(), kFirstLayer);
}

TEST_CASE("sessions on several threads share streamed layers") {
  const std::vector<float> expected[] = {logits_of(load(model_file(), 1), 1),
                                         logits_of(load(model_file(), 1), 2)};
  const std::shared_ptr<Model> model = with_resident(model_file(), least_resident(model_file()));
  std::vector<float> found[2];
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] { found[i] = logits_of(model, i + 1); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) CHECK(found[i] == expected[i]);
}

TEST_CASE("a model is closed while the next layer is transferred") {
  const QuantizedModel file(
      4);  // of four, the first is being copied after the last has been computed
  const size_t least = least_resident(file.path());
  for (int i = 0; i < (on_gpu() ? 2 : 20); ++i) {
    const std::shared_ptr<Model> model = with_resident(file.path(), least);
    if (i % 2 == 0) {
      Session session(model, options());
      Random random(i);
      feed(session, 0, random_tokens(random, *model, 1));
    } else {
      model->weights.residency->prepare(0);  // nothing that a device waits for is freed before it
    }
  }
}

}  // namespace
}  // namespace h2o

// Models with recurrent layers: their states in a session's steps, snapshots and sequences.
#include <doctest/doctest.h>

#include "device_pair.h"
#include "random_hybrid.h"

namespace h2o {
namespace {

SessionOptions hybrid_options(const KvPolicy& policy = {}, int32_t n_sequences = 1) {
  return {.policies = {policy},
          .n_ctx = 40,
          .n_batch = 16,
          .n_sequences = n_sequences,
          .max_sequences = 3,
          .k_dtype = DType::f32,
          .v_dtype = DType::f32};
}

constexpr KvPolicy kFew = {.sinks = 1, .heavy = 7, .recent = 5};

// Those that the test device supports.
std::vector<std::string> hybrids() {
  std::vector<std::string> all(std::begin(kHybrids), std::end(kHybrids));
  if (!on_cuda()) all.insert(all.end(), std::begin(kStateSpaces), std::end(kStateSpaces));
  return all;
}

std::shared_ptr<Model> model_of(const HybridFile& file, int n_threads) {
  return std::make_shared<Model>(file.path(), test_backend(n_threads));
}

TEST_CASE("steps with recurrent layers match the CPU") {
  for (const std::string& architecture : hybrids()) {
    CAPTURE(architecture);
    const HybridFile file(architecture, 1);
    for (const KvPolicy& policy : {KvPolicy(), kFew}) {
      Pair pair(file.path(), hybrid_options(policy));
      check_steps(pair, DType::f32);
    }
  }
}

TEST_CASE("states do not depend on chunks, threads or other sequences" * doctest::skip(on_gpu())) {
  for (const std::string& architecture : hybrids()) {
    CAPTURE(architecture);
    const HybridFile file(architecture, 2);
    Session whole(model_of(file, 1), hybrid_options());
    Session parts(model_of(file, 3), hybrid_options({}, 2));
    Random random(1);
    const std::vector<int32_t> text = random_tokens(random, whole.model(), 16);
    const std::vector<float> expected = feed(whole, 0, text);
    const auto n_vocab = static_cast<std::ptrdiff_t>(expected.size());
    std::vector<float> logits;
    for (int32_t at = 0, n = 1; at < 16; at += n, n = std::min(n + 1, 16 - at)) {
      const std::vector<int32_t> other = random_tokens(random, whole.model(), 2);
      const Input inputs[] = {{0, std::span(text).subspan(at, n)}, {1, other}};
      const std::span<const float> both = parts.step(inputs);
      logits.assign(both.begin(), both.begin() + n_vocab);
    }
    CHECK(same_bits(logits, expected));
  }
}

TEST_CASE("states belong to their sequence: reset, more sequences, snapshots") {
  for (const std::string& architecture : hybrids()) {
    CAPTURE(architecture);
    const HybridFile file(architecture, 3);
    const std::shared_ptr<Model> model = model_of(file, 2);
    Random random(2);
    const std::vector<int32_t> text = random_tokens(random, *model, 9);
    const std::vector<int32_t> next = random_tokens(random, *model, 1);
    for (const KvPolicy& policy : {KvPolicy(), kFew}) {
      Session session(model, hybrid_options(policy));
      feed(session, 0, text);
      const std::vector<std::byte> saved =
          session.save(0, {.tokens = std::vector<int32_t>(9), .note = ""});
      session.reserve_sequences(3);
      const std::vector<float> expected = feed(session, 0, next);
      CHECK_FALSE(same_bits(feed(session, 1, next), expected));

      session.load(2, saved);
      CHECK(same_bits(feed(session, 2, next), expected));

      session.reset(0);
      feed(session, 0, text);
      CHECK(same_bits(feed(session, 0, next), expected));
      // A prefix of the text has no state.
      CHECK_FALSE(session.is_plain(0));
      CHECK_THROWS_AS(session.load_plain(1, saved, 8), InvalidArgument);

      std::vector<std::byte> cut(saved.begin(), saved.end() - 4);
      CHECK_THROWS_AS(session.load(0, cut), InvalidArgument);
    }
  }
}

TEST_CASE("recurrent layers keep no tokens, and a budget is for the others") {
  for (const std::string& architecture : hybrids()) {
    CAPTURE(architecture);
    const HybridFile file(architecture, 4);
    const std::shared_ptr<Model> model = model_of(file, 1);
    Session full(model, hybrid_options()), few(model, hybrid_options(kFew));
    CHECK(few.cache_bytes() < full.cache_bytes());
    CHECK(few.full_cache_bytes() == full.cache_bytes());
    CHECK(full.room(0) == 40);
    Random random(3);
    feed(few, 0, random_tokens(random, *model, 16));
    feed(few, 0, random_tokens(random, *model, 16));
    std::vector<char> kept(32);
    for (int32_t layer = 0; layer < model->config.n_layers; ++layer) {
      const bool attends = file.attends(layer);
      for (int32_t head = 0; attends && head < model->config.sizes(layer).n_kv_heads; ++head) {
        for (const KvEntry& entry : few.entries(layer, 0, head)) kept[entry.position] = 1;
      }
      CHECK(few.tokens_kept(0, layer) == (attends ? 13 : 0));
      CHECK(few.entries(layer, 0, 0).size() == (attends ? 13 : 0));
    }
    CHECK(few.tokens_kept(0) == 13);
    CHECK(few.kept_anywhere(0) == kept);
  }
}

TEST_CASE("the number and the sizes of states are checked") {
  KvShape shape = {.n_layers = 2, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32, .max_tokens = 8};
  const KvPolicy policy;
  const auto bytes = [&](const std::vector<int64_t>& floats) {
    shape.state_floats = floats;
    return KvCache::bytes({&policy, 1}, shape);
  };
  const size_t both = bytes({100, 0});
  CHECK(both >= bytes({0, 0}) + 400);
  shape.attention_layers = {false, true};
  CHECK(bytes({100, 0}) < both);
  shape.attention_layers = {true};
  CHECK_THROWS_AS(bytes({100, 0}), InvalidArgument);
  shape.attention_layers = {};
  CHECK_THROWS_AS(bytes({100}), InvalidArgument);
  CHECK_THROWS_AS(bytes({-1, 0}), InvalidArgument);
  shape.n_sequences = 1 << 16;
  CHECK_THROWS_AS(bytes({int64_t{1} << 47, int64_t{1} << 47}), OutOfMemory);  // 2^66 bytes
}

TEST_CASE("CUDA refuses state-space models" * doctest::skip(!on_cuda())) {
  for (const std::string architecture : kStateSpaces) {
    const HybridFile file(architecture, 6);
    CHECK_THROWS_WITH_AS(model_of(file, 1), doctest::Contains("use device=cpu"), FormatError);
  }
}

TEST_CASE("an archive is for the layers with a cache" * doctest::skip(on_gpu())) {
  for (const std::string& architecture : hybrids()) {
    CAPTURE(architecture);
    const HybridFile file(architecture, 5);
    const std::shared_ptr<Model> model = model_of(file, 2);
    SessionOptions options = hybrid_options(kFew);
    options.archive.n_recalled = 2;
    Session session(model, options), other(model, options);
    Random random(4);
    for (const int32_t n : {16, 1, 9}) feed(session, 0, random_tokens(random, *model, n));
    other.load(0, session.save(0, {.tokens = std::vector<int32_t>(26), .note = ""}));
    const std::vector<int32_t> next = random_tokens(random, *model, 3);
    CHECK(same_bits(feed(other, 0, next), feed(session, 0, next)));
  }
}

}  // namespace
}  // namespace h2o

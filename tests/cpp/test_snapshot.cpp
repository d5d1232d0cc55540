// Hostile snapshots are rejected, or load as a sequence that can continue. Run under sanitizers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr size_t kHeader = 28;         // magic, version, size, checksum
constexpr size_t kFirstNumbers = 400;  // of the header, shape and policies

SessionOptions options(Positions positions, int32_t n_recalled = 0) {
  return {.policies = {{.sinks = 1, .heavy = 2, .recent = 2, .value_norm = ValueNorm::l1}},
          .n_ctx = 40,
          .n_batch = 8,
          .positions = positions,
          .archive = {.n_recalled = n_recalled}};
}

std::vector<std::byte> snapshot_of(Session& session, int n_tokens) {
  Random random(1);
  for (int i = 0; i < n_tokens; ++i) feed(session, 0, random_tokens(random, session.model(), 1));
  return session.save(0, {.tokens = std::vector<int32_t>(n_tokens + 1), .note = "note"});
}

// Sets the correct size and checksum.
void reseal(std::vector<std::byte>& bytes) {
  const std::span<const std::byte> rest = std::span(bytes).subspan(kHeader);
  const uint64_t numbers[] = {rest.size(), checksum(rest)};
  std::memcpy(bytes.data() + 12, numbers, sizeof(numbers));
}

void check_hostile(const std::shared_ptr<Model>& model, Positions positions,
                   int32_t n_recalled = 0) {
  for (const int n_tokens : {0, 3, 20}) {
    Session source(model, options(positions, n_recalled));
    const std::vector<std::byte> good = snapshot_of(source, n_tokens);
    Random random(2);
    int n_refused = 0;
    for (int i = 0; i < 600; ++i) {
      std::vector<std::byte> bytes = good;
      const auto last = static_cast<int32_t>(i % 2 ? bytes.size() : kHeader + kFirstNumbers);
      const int32_t at = random.integer(kHeader, std::min<int32_t>(last, bytes.size()) - 1);
      switch (i % 3) {
        case 0:
          bytes[at] = static_cast<std::byte>(random.integer(0, 255));
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          std::fill_n(bytes.begin() + at, std::min<size_t>(4, bytes.size() - at), std::byte{0xff});
          break;
      }
      reseal(bytes);
      Session session(model, options(positions, n_recalled));
      feed(session, 0, {5, 6, 7});
      try {
        session.load(0, bytes);
      } catch (const InvalidArgument&) {
        ++n_refused;
        CHECK(session.tokens_seen(0) == 3);
      }
      for (int32_t layer = 0; layer < model->config.n_layers; ++layer) {
        session.entries(layer, 0, 0);
      }
      if (session.room(0) >= 3) feed(session, 0, {5, 6, 7});  // more than fit in free slots
      for (int32_t token = 1; token < 9 && session.room(0) > 0; ++token) feed(session, 0, {token});
    }
    CHECK(n_refused > 100);
    CHECK(n_refused < 600);
  }
}

TEST_CASE("the content of hostile snapshots is validated") {
  check_hostile(tiny_model(1), Positions::automatic);
  check_hostile(load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1),
                Positions::rolling);
}

TEST_CASE("hostile snapshots: the archive is validated") {
  check_hostile(tiny_model(1), Positions::automatic, 2);
}

TEST_CASE("the rank of the free slot is unused") {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
  Session source(model, options(Positions::rolling));
  const std::vector<std::byte> good = snapshot_of(source, 20);
  // Whichever four bytes are replaced by a large number: the snapshot is rejected, or the number is
  // not used.
  for (size_t at = kHeader; at + 4 <= good.size(); at += 4) {
    std::vector<std::byte> bytes = good;
    bytes[at + 3] = std::byte{0x7f};
    reseal(bytes);
    Session session(model, options(Positions::rolling));
    try {
      session.load(0, bytes);
      feed(session, 0, {5, 6, 7});
    } catch (const InvalidArgument&) {
    }
  }
}

TEST_CASE("a snapshot contains nothing of the slot's previous sequence") {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
  for (const Positions positions : {Positions::original, Positions::rolling}) {
    for (const int n_tokens : {3, 6, 7, 8, 20}) {
      Session used(model, options(positions)), fresh(model, options(positions));
      Random random(3);
      feed(used, 0, random_tokens(random, *model, 8));
      for (int i = 0; i < 30; ++i) feed(used, 0, random_tokens(random, *model, 1));
      used.reset(0);
      for (int left = n_tokens; left > 0; left -= 8) {
        const std::vector<int32_t> tokens = random_tokens(random, *model, std::min(left, 8));
        feed(used, 0, tokens);
        feed(fresh, 0, tokens);
      }
      const SnapshotText text = {.tokens = std::vector<int32_t>(n_tokens), .note = ""};
      const std::vector<std::byte> bytes = used.save(0, text);
      CHECK(bytes == fresh.save(0, text));
      Session other(model, options(positions));
      CHECK(other.load(0, bytes).n_read == n_tokens);
      CHECK(other.save(0, text) == bytes);
      CHECK(same_bits(feed(other, 0, {5, 6}), feed(fresh, 0, {5, 6})));
    }
  }
}

TEST_CASE("a snapshot contains held-back text and the random state") {
  const auto model = tiny_model(1);
  Session session(model, options(Positions::automatic));
  feed(session, 0, {5, 6, 7});
  const SnapshotText text = {.tokens = {5, 6, 7, 8},
                             .note = "{\"a\": [1]}",
                             .logits = std::vector<float>(model->config.n_vocab, 0.5f),
                             .random_state = "1 2 3",
                             .held_text = "held",
                             .held_bytes = "\xf0\x9f"};
  const SnapshotText loaded = session.load(0, session.save(0, text));
  CHECK(loaded.tokens == text.tokens);
  CHECK(loaded.note == text.note);
  CHECK(loaded.n_read == 3);
  CHECK(loaded.logits == text.logits);
  CHECK(loaded.random_state == text.random_state);
  CHECK(loaded.held_text == text.held_text);
  CHECK(loaded.held_bytes == text.held_bytes);
}

// Converts a snapshot to version 2, with this note.
std::vector<std::byte> version_2(const std::vector<std::byte>& now, std::string_view note) {
  OpenSnapshot open = open_snapshot(now);
  constexpr std::string_view kBegin("h2o snap\2\0\0\0", 12);  // followed by size and checksum
  ByteWriter writer;
  std::memcpy(writer.extend(kHeader), kBegin.data(), kBegin.size());
  writer.put(open.model);
  writer.put(uint64_t{open.text.tokens.size()});
  writer.put(std::span<const int32_t>(open.text.tokens));
  writer.put(uint64_t{note.size()});
  writer.put(std::span(note));
  writer.put(open.text.n_read);
  writer.put(uint64_t{0});
  writer.put(open.positions);
  writer.put(open.cache.take(open.cache.left()));
  std::vector<std::byte> bytes = std::move(writer.bytes());
  reseal(bytes);
  return bytes;
}

TEST_CASE("version 2 is accepted, other versions are rejected") {
  const auto model = tiny_model(1);
  Session source(model, options(Positions::automatic));
  const std::vector<std::byte> now = snapshot_of(source, 20);
  const std::vector<float> expected = feed(source, 0, {9});

  const auto load_note = [&](std::string_view note) {
    Session session(model, options(Positions::automatic));
    const SnapshotText text = session.load(0, version_2(now, note));
    CHECK(text.n_read == 20);
    CHECK(text.tokens.size() == 21);
    CHECK(text.held_text.empty());
    CHECK(text.held_bytes.empty());
    CHECK(same_bits(feed(session, 0, {9}), expected));
    return std::pair(text.random_state, text.note);
  };
  using Pair = std::pair<std::string, std::string>;
  CHECK(load_note(R"({"random_state": "17 4 2", "note": null})") == Pair("17 4 2", "null"));
  CHECK(load_note(R"({"random_state": null, "note": {"note": "}"}})") ==
        Pair("", R"({"note": "}"})"));
  for (const char* const note : {"", "{}", "null", R"({"random_state": "17"})"}) {
    CHECK_THROWS_AS(source.load(0, version_2(now, note)), FormatError);
  }
  for (const uint32_t version : {0u, 1u, 4u}) {
    std::vector<std::byte> bytes = now;
    std::memcpy(bytes.data() + 8, &version, sizeof(version));
    CHECK_THROWS_AS(source.load(0, bytes), FormatError);
  }
}

TEST_CASE("fingerprints distinguish models by their tensors") {
  const GgufShards tiny(H2O_SOURCE_DIR "/models/tiny-opt.gguf");
  const GgufShards other(H2O_SOURCE_DIR "/tests/data/golden/opt_untied.gguf");
  CHECK(fingerprint(tiny) == fingerprint(GgufShards(H2O_SOURCE_DIR "/models/tiny-opt.gguf")));
  CHECK(fingerprint(tiny) != fingerprint(other));
}

}  // namespace
}  // namespace h2o

// Hostile snapshots are rejected, or load as a sequence that can continue. Run under sanitizers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/bytes.h"
#include "core/error.h"
#include "kv/serialized_sequence.h"
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
    const int n_changed = brief() ? 150 : 600;
    for (int i = 0; i < n_changed; ++i) {
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
    CHECK(n_refused > n_changed / 6);
    CHECK(n_refused < n_changed);
  }
}

TEST_CASE("the content of hostile snapshots is validated") {
  check_hostile(tiny_model(1), Positions::automatic);
  check_hostile(load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1),
                Positions::rolling);
}

std::vector<std::byte> bytes_of(const KvPolicy& policy) {
  ByteWriter writer;
  write_policy(policy, writer);
  return writer.bytes();
}

TEST_CASE("another policy is refused, whatever its numbers") {
  const KvPolicy policy{.sinks = 1, .heavy = 2, .recent = 4, .tail_begin = 3, .tail_end = 5};
  Session session(tiny_model(1), {.policies = {policy}, .n_ctx = 40, .n_batch = 8});
  std::vector<std::byte> snapshot = snapshot_of(session, 20);
  const std::vector<std::byte> good = bytes_of(policy);
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  const std::vector<std::byte> other = bytes_of(
      {.recent = kLeast, .tail_begin = kLeast, .tail_end = std::numeric_limits<int32_t>::max()});
  const auto at = std::search(snapshot.begin(), snapshot.end(), good.begin(), good.end());
  REQUIRE(at != snapshot.end());
  REQUIRE(other.size() == good.size());
  std::copy(other.begin(), other.end(), at);
  reseal(snapshot);
  CHECK_THROWS_AS(session.load(0, snapshot), FormatError);
}

TEST_CASE("hostile snapshots: the archive is validated" * doctest::skip(!archives())) {
  check_hostile(tiny_model(1), Positions::automatic, 2);
}

// The snapshot of a sequence of two pages whose kv_heads 1 and 2, of 4, have an archive; and where
// its parts begin.
class ArchivedHeads {
 public:
  static constexpr int32_t kSlots = 6, kTokens = 20, kPageTokens = 16;

  ArchivedHeads() : good_(snapshot_of(source_, kTokens)) {
    constexpr int64_t kPolicy = 5 * sizeof(int32_t) + 1;
    at_ = std::ssize(good_) - static_cast<int64_t>(open_snapshot(good_).cache.left());
    at_ += 4 * sizeof(int32_t) + 2 * sizeof(DType) + model_->config.n_layers * kPolicy;
  }

  static SessionOptions with_heads(std::vector<int32_t> heads) {
    SessionOptions made = options(Positions::original, 2);
    made.archive.k_dtype = made.archive.v_dtype = DType::f16;
    made.archive.heads = std::move(heads);
    return made;
  }

  const std::shared_ptr<Model>& model() const { return model_; }
  const std::vector<std::byte>& good() const { return good_; }
  size_t kind() const { return at_; }
  size_t n_recalled() const { return at_ + 1; }
  size_t indices() const { return n_recalled() + sizeof(int32_t) + 2 * sizeof(DType); }
  // Head 1's, whose archive follows the slots of kv_heads 0 and 1.
  size_t counts() const {
    const size_t slots = kSlots * (3 * sizeof(int32_t) + 2 * row_bytes());
    return indices() + 4 * sizeof(int32_t) + 2 * (sizeof(int32_t) + slots);
  }
  size_t pages() const { return counts() + 2 * sizeof(int32_t); }
  size_t page_bytes(int32_t n) const {
    return n == 0 ? 0 : 2 * model_->config.head_dim * sizeof(BF16) + n * 2 * row_bytes();
  }
  int32_t count(int page) const {
    int32_t n;
    std::memcpy(&n, &good_[counts() + page * sizeof(n)], sizeof(n));
    return n;
  }

  // With numbers from this byte on.
  std::vector<std::byte> with(size_t at, const std::vector<int32_t>& numbers) const {
    std::vector<std::byte> bytes = good_;
    std::memcpy(&bytes[at], numbers.data(), numbers.size() * sizeof(int32_t));
    return bytes;
  }

  void check_rejected(std::vector<std::byte> bytes, const char* why) {
    CAPTURE(why);
    reseal(bytes);
    CHECK_THROWS_WITH_AS(target_.load(0, bytes), doctest::Contains(why), FormatError);
    CHECK(target_.tokens_seen(0) == 0);
  }

 private:
  size_t row_bytes() const { return model_->config.head_dim * sizeof(F16); }

  std::shared_ptr<Model> model_ = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
  Session source_{model_, with_heads({1, 2})};
  Session target_{model_, with_heads({2, 1})};  // the order does not matter
  std::vector<std::byte> good_;
  size_t at_ = 0;
};

TEST_CASE("hostile snapshots: archived heads and their pages are validated" *
          doctest::skip(!archives())) {
  ArchivedHeads rig;
  REQUIRE(rig.count(0) > 0);
  REQUIRE(rig.count(0) + rig.count(1) == rig.kTokens - (rig.kSlots - 1));
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  for (const std::vector<int32_t>& indices :
       std::initializer_list<std::vector<int32_t>>{{-1, 0, 0, -1},
                                                   {-1, 1, 0, -1},
                                                   {0, 1, -1, -1},
                                                   {-1, 0, 1, 2},
                                                   {-1, 0, 4, -1},
                                                   {-1, -2, 1, -1},
                                                   {-1, kLargest, 1, -1},
                                                   {-1, -1, -1, -1}}) {
    rig.check_rejected(rig.with(rig.indices(), indices), "archive of other types, heads");
  }
  for (const int32_t n : {-1, 0, 1, kLargest}) {
    rig.check_rejected(rig.with(rig.n_recalled(), {n}), "number of recalled pages");
  }
  for (const int kind : {2, 4, 255}) {
    std::vector<std::byte> bytes = rig.good();
    bytes[rig.kind()] = static_cast<std::byte>(kind);
    rig.check_rejected(bytes, kind == 2 ? "archive of other heads" : "invalid");
  }
  for (const int page : {0, 1}) {
    for (const int32_t n : {-1, -kLargest - 1, kLargest, rig.count(page) + 1, rig.kPageTokens + 1,
                            rig.count(page) - 1, 1 << 30}) {
      rig.check_rejected(rig.with(rig.counts() + page * sizeof(n), {n}), "of its archive has");
    }
  }
  std::vector<std::byte> longer = rig.good();
  longer.push_back({});
  rig.check_rejected(longer, "trailing");
  for (size_t n = rig.kind() + 1; n < rig.good().size(); ++n) {
    std::vector<std::byte> shorter = rig.good();
    shorter.resize(n);
    rig.check_rejected(shorter, "ends too early");
  }
}

TEST_CASE("hostile snapshots: a page without tokens that were evicted is rejected" *
          doctest::skip(!archives())) {
  ArchivedHeads rig;
  for (const int page : {0, 1}) {
    std::vector<std::byte> bytes = rig.with(rig.counts() + page * sizeof(int32_t), {0});
    const auto begin =
        bytes.begin() + static_cast<int64_t>(rig.pages() + page * rig.page_bytes(rig.count(0)));
    bytes.erase(begin, begin + static_cast<int64_t>(rig.page_bytes(rig.count(page))));
    rig.check_rejected(bytes, "of its archive has 0 tokens");
  }
}

TEST_CASE("a snapshot loads into a session with the same archived heads only" *
          doctest::skip(!archives())) {
  ArchivedHeads rig;
  for (const std::vector<int32_t>& heads :
       std::initializer_list<std::vector<int32_t>>{{}, {1}, {1, 3}, {0, 1, 2}, {0, 1, 2, 3}}) {
    Session other(rig.model(), rig.with_heads(heads));
    CHECK_THROWS_WITH_AS(other.load(0, rig.good()), doctest::Contains("heads"), FormatError);
    CHECK(other.tokens_seen(0) == 0);
  }
  Session same(rig.model(), rig.with_heads({1, 2, 2}));
  CHECK(same.load(0, rig.good()).n_read == rig.kTokens);
  CHECK(same.save(0, {.tokens = std::vector<int32_t>(rig.kTokens + 1), .note = "note"}) ==
        rig.good());
}

TEST_CASE("layers with a window archive nothing, and their snapshots load" *
          doctest::skip(!archives())) {
  const auto model = load(H2O_SOURCE_DIR "/tests/data/golden/gemma2.gguf", 1);
  const SessionOptions archiving = ArchivedHeads::with_heads({});
  Session source(model, archiving), copy(model, archiving);
  const std::vector<std::byte> bytes = snapshot_of(source, 20);
  CHECK(source.archive_bytes() > 0);
  CHECK(copy.load(0, bytes).n_read == 20);
  CHECK(copy.archive_bytes() == source.archive_bytes());
  CHECK(same_bits(feed(copy, 0, {5, 6, 7}), feed(source, 0, {5, 6, 7})));
}

// Makes the state of a layer with a window.
TEST_CASE("a head whose pages are all empty recalls nothing" * doctest::skip(!archives())) {
  ArchivedHeads rig;
  std::vector<std::byte> bytes = rig.with(rig.counts(), {0, 0});
  const auto begin = bytes.begin() + static_cast<int64_t>(rig.pages());
  bytes.erase(begin, begin + static_cast<int64_t>(rig.page_bytes(rig.count(0)) +
                                                  rig.page_bytes(rig.count(1))));
  reseal(bytes);
  std::vector<float> logits[2];
  for (std::vector<float>& out : logits) {
    Session session(rig.model(), rig.with_heads({1, 2}));
    const int32_t before = &out == logits ? 9 : 30;
    for (int32_t i = 0; i < before; ++i) feed(session, 0, {i});  // what it recalls is not used
    session.load(0, bytes);
    out = feed(session, 0, {7});
    const std::vector<float> chunk = feed(session, 0, {5, 6, 7});
    out.insert(out.end(), chunk.begin(), chunk.end());
  }
  CHECK(same_bits(logits[0], logits[1]));
  CHECK(std::ranges::all_of(logits[0], [](float x) { return std::isfinite(x); }));
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

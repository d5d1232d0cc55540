// The snapshot reader: valid snapshots with bytes changed, removed or inserted, and a corrected
// size and checksum, are rejected with a FormatError, or load as a sequence that can continue, as
// determined by the snapshot alone.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "backend/make_backend.h"
#include "core/error.h"
#include "model/session.h"
#include "target.h"

namespace {

using namespace h2o;

constexpr size_t kHeader = 28;  // magic, version, size, checksum

struct Given {
  std::unique_ptr<Session> session;
  std::vector<std::vector<std::byte>> snapshots;  // of no, few and many tokens
};

Given give(const std::shared_ptr<Model>& model, KvPolicy policy, Positions positions,
           const ArchiveOptions& archive = {}) {
  const SessionOptions options = {
      .policies = {policy}, .n_ctx = 24, .n_batch = 8, .positions = positions, .archive = archive};
  Given given{std::make_unique<Session>(model, options), {}};
  std::vector<int32_t> tokens;
  for (int n : {0, 3, 20}) {
    while (std::ssize(tokens) < n) {
      tokens.push_back(static_cast<int32_t>(tokens.size()) % 7 + 3);
      const Input input{0, std::span(tokens).last(1)};
      given.session->step({&input, 1});
    }
    std::vector<int32_t> text = tokens;
    text.push_back(5);
    given.snapshots.push_back(given.session->save(0, {.tokens = text, .note = "note"}));
  }
  return given;
}

Given& given(size_t which, bool archived) {
  static std::array<Given, 8> all = [] {
    const auto load = [](const char* path) {
      return std::make_shared<Model>(path, make_backend("cpu", 1));
    };
    const auto learned = load(H2O_SOURCE_DIR "/tests/data/golden/opt_head_dim_one.gguf");
    const auto rotary = load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf");
    const auto windows = load(H2O_SOURCE_DIR "/tests/data/golden/gemma2.gguf");
    const auto wide = load(H2O_SOURCE_DIR "/models/tiny-opt.gguf");
    const KvPolicy h2o = {.sinks = 1, .heavy = 2, .recent = 2, .value_norm = ValueNorm::l1};
    const KvPolicy window = {.sinks = 1, .recent = 4};
    const auto original = Positions::original;
    const auto archive = [](DType dtype, std::vector<int32_t> heads) {
      return ArchiveOptions{
          .n_recalled = 1, .k_dtype = dtype, .v_dtype = dtype, .heads = std::move(heads)};
    };
    return std::array<Given, 8>{
        give(learned, h2o, original),
        give(learned, {}, original),
        give(rotary, h2o, Positions::rolling),
        give(rotary, window, Positions::automatic),
        give(rotary, h2o, original, archive(DType::f16, {})),
        give(rotary, h2o, original, archive(DType::f32, {1, 2})),
        give(windows, h2o, original, archive(DType::bf16, {})),
        give(wide, window, original, {.n_recalled = 1, .k_dtype = DType::q3, .heads = {3, 30}})};
  }();
  return all[which % 4 + (archived ? 4 : 0)];
}

void reseal(std::vector<std::byte>& bytes) {
  if (bytes.size() < kHeader) return;
  const std::span<const std::byte> rest = std::span(bytes).subspan(kHeader);
  const uint64_t numbers[] = {rest.size(), checksum(rest)};
  std::memcpy(bytes.data() + 12, numbers, sizeof(numbers));
}

// Edits: kind, position and bytes.
void edit(std::vector<std::byte>& bytes, Taker& from) {
  while (from.left() > 0) {
    const size_t at = from.take<uint16_t>() % (bytes.size() + 1);
    const uint8_t how = from.byte();
    const std::span<const std::byte> with = from.take_bytes(how >> 2);
    switch (how & 3) {
      case 0:
      case 1:  // change
        std::memcpy(bytes.data() + at, with.data(), std::min(with.size(), bytes.size() - at));
        break;
      case 2:
        bytes.insert(bytes.begin() + at, with.begin(), with.end());
        break;
      case 3:
        bytes.resize(at);
        break;
    }
  }
}

// The logits after a few more tokens, a chunk first.
std::vector<float> continued(Session& session) {
  std::vector<float> all;
  const int32_t tokens[] = {5, 6, 7, 8, 9, 10};
  std::span<const int32_t> left(tokens);
  while (!left.empty() && session.room(0) > 0) {
    const Input input{0, left.first(all.empty() ? std::min(session.chunk(0), 3) : 1)};
    const std::span<const float> logits = session.step({&input, 1});
    all.insert(all.end(), logits.begin(), logits.end());
    session.entries(0, 0, 0);
    left = left.subspan(input.tokens.size());
  }
  return all;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  Taker from(bytes);
  const uint8_t which = from.byte();
  const bool archived = which & 0x20;
  Given& of = given(which, archived);
  Session& session = *of.session;
  std::vector<std::byte> snapshot;
  if (which & 0x80) {
    const std::span<const std::byte> all = from.take_bytes(from.left());
    snapshot.assign(all.begin(), all.end());
  } else {
    const size_t n = which >> 2 & 7;
    const bool foreign = n > 5;  // of another session, but with this model's fingerprint
    snapshot = (foreign ? given(which + 1, archived == (n == 6)) : of).snapshots[n % 3];
    std::copy_n(&of.snapshots[0][kHeader], sizeof(uint64_t), &snapshot[kHeader]);
    edit(snapshot, from);
  }
  if (!(which & 0x40)) reseal(snapshot);

  session.reset(0);
  const int32_t tokens[] = {5, 6, 7};
  const Input three{0, tokens};
  session.step({&three, 1});
  const std::vector<std::byte> before = session.save(0, {.tokens = {5, 6, 7}});
  SnapshotText text;
  try {
    text = session.load(0, snapshot);
  } catch (const FormatError&) {
    check(session.save(0, {.tokens = {5, 6, 7}}) == before, "a rejected snapshot changes nothing");
    return 0;
  }
  check(session.tokens_seen(0) == text.n_read, "the number of processed tokens is the snapshot's");
  // Unused bytes, such as the row that the next token overwrites, are saved as zeros.
  const std::vector<std::byte> saved = session.save(0, text);
  const bool unchanged = std::ranges::find(of.snapshots, snapshot) != of.snapshots.end();
  check(!unchanged || saved == snapshot, "it is saved as it was loaded");
  check(session.save(0, session.load(0, saved)) == saved, "a saved snapshot round-trips");
  const std::vector<float> logits = continued(session);
  session.reset(0);
  session.step({&three, 1});
  session.load(0, saved);
  const std::vector<float> again = continued(session);
  check(same_bits(logits, again), "nothing else determines how it continues");
  return 0;
}

// Session: saving and loading sequences.
#include <algorithm>
#include <iterator>
#include <vector>

#include "core/error.h"
#include "kv/budget.h"
#include "kv/serialized_sequence.h"
#include "model/session.h"

namespace h2o {
namespace {

const char* positions_name(uint8_t positions) {
  static constexpr const char* kNames[] = {"original", "rolling", "auto"};
  return positions < std::size(kNames) ? kNames[positions] : "unknown";
}

std::vector<KvPolicy> sequence_policies(const KvCache& cache, int32_t sequence) {
  std::vector<KvPolicy> policies;
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) {
    policies.push_back(cache.policy(l, sequence));
  }
  return policies;
}

}  // namespace

// Sequences that cannot roll have original positions.
Positions Session::positions_of(int32_t sequence) const {
  return cache_.can_roll(sequence) ? options_.positions : Positions::original;
}

std::vector<std::byte> Session::save(int32_t sequence, SnapshotText text) const {
  const std::lock_guard lock(model_->mutex);
  text.n_read = cache_.length(sequence);
  require(std::ssize(text.tokens) >= text.n_read, text.tokens.size(), " tokens for sequence ",
          sequence, ", which has read ", text.n_read);
  const auto positions = static_cast<uint8_t>(positions_of(sequence));
  ByteWriter writer = begin_snapshot(model_->fingerprint, text, positions);
  writer.reserve(sequence_bytes(cache_, sequence));
  write_sequence(cache_, sequence, writer);
  return end_snapshot(std::move(writer));
}

SnapshotText Session::load(int32_t sequence, std::span<const std::byte> snapshot) {
  return load(sequence, open_snapshot(snapshot), std::nullopt);
}

bool Session::is_plain(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return is_plain_unlocked(sequence);
}

bool Session::is_plain_unlocked(int32_t sequence) const {
  if (!model_->backend->capabilities().independent_rows || cache_.archive() != nullptr)
    return false;
  if (!model_->config.recurrent_layers.empty()) return false;  // a state has no prefixes
  for (int32_t l = 0; l < model_->config.n_layers; ++l) {
    const KvPolicy& policy = cache_.policy(l, sequence);
    if (policy.keeps_scores() || policy.budget() < options_.n_ctx) return false;
  }
  return true;
}

void Session::load_plain(int32_t sequence, std::span<const std::byte> snapshot, int32_t n_tokens) {
  load(sequence, open_snapshot(snapshot, Damage::none), n_tokens);
}

SnapshotText Session::load(int32_t sequence, OpenSnapshot open, std::optional<int32_t> n_tokens) {
  const std::lock_guard lock(model_->mutex);
  if (open.model != model_->fingerprint) throw FormatError("the snapshot is of another model");
  if (const auto here = static_cast<uint8_t>(positions_of(sequence)); open.positions != here) {
    check_shape(cache_, sequence, open.cache);  // positions also differ with the policy
    throw FormatError(concat("the snapshot has ", positions_name(open.positions),
                             " positions, this session ", positions_name(here)));
  }
  for (int32_t token : open.text.tokens) {
    if (token < 0 || token >= model_->config.n_vocab) {
      throw FormatError(concat("the snapshot has token ", token, ", the vocabulary has ",
                               model_->config.n_vocab));
    }
  }
  const size_t n_logits = open.text.logits.size();
  if (n_logits != 0 && n_logits != static_cast<size_t>(model_->config.n_vocab)) {
    throw FormatError(concat("the snapshot has ", n_logits, " logits, the vocabulary has ",
                             model_->config.n_vocab));
  }
  const int32_t n_read = open.text.n_read;
  if (n_read > options_.n_ctx && !cache_.can_roll(sequence)) {
    throw FormatError(concat("the snapshot has ", n_read, " tokens, n_ctx is ", options_.n_ctx));
  }
  // A prompt that was protected stays so.
  const std::vector<KvPolicy> own = sequence_policies(cache_, sequence);
  const std::vector<KvPolicy> saved = read_policies(cache_, open.cache);
  const auto are_protected = [&](const std::vector<KvPolicy>& policies) {
    for (size_t l = 0; l < policies.size(); ++l) {
      if (!is_protected(policies[l], options_.policies[options_.policies.size() == 1 ? 0 : l]))
        return false;
    }
    return true;
  };
  const bool is_adopted = are_protected(own) && are_protected(saved);
  if (is_adopted) cache_.set_policies(sequence, saved);
  try {
    read_sequence(cache_, sequence, n_read, open.cache, n_tokens);
  } catch (...) {
    if (is_adopted) cache_.set_policies(sequence, own);
    throw;
  }
  return std::move(open.text);
}

}  // namespace h2o

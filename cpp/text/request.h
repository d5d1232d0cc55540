// Request: what to continue, how tokens are chosen, and when to end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "kv/policy.h"
#include "text/sampler.h"
#include "text/trace.h"

namespace h2o {

class Generation;

// Fills `allowed`, a bit for each token of the vocabulary, given all tokens so far. Called by the
// thread that computes, before the token is chosen; what it throws ends the generation.
using Constraint =
    std::function<void(std::span<const int32_t> tokens, std::span<uint32_t> allowed)>;

// Given the logits after each token of the prompt as they are computed.
using LogitsSink = std::function<void(int32_t i, std::span<const float> logits)>;

// The bytes of a snapshot, which `owner` keeps.
struct SnapshotBytes {
  std::span<const std::byte> bytes = {};
  std::shared_ptr<const void> owner = nullptr;
};

constexpr int32_t kEndless = -1;  // of Request::max_tokens

// What Generation::embedding() is: of the hidden states of the prompt's tokens, after the last
// norm, none, their mean or the last one.
enum class Pooling : uint8_t { none, mean, last };

struct Request {
  std::vector<int32_t> prompt = {};

  // Goes on from this snapshot; the prompt follows its tokens. Its random numbers go on unless
  // `seeded`, and the text that it held back comes first.
  SnapshotBytes after = {};

  // Goes on in the cache that this generation has left, if nothing else has used it since and
  // `prompt` begins with all its tokens; otherwise all of the prompt is read. If nothing is left to
  // read, the first token is chosen from the logits that it has kept.
  std::shared_ptr<Generation> follows = nullptr;

  SamplerOptions sampling = {};
  bool seeded = true;

  // Chooses instead of one made from `sampling`, and goes on from where it is: it has accepted all
  // tokens so far. Nobody else may use it until the generation has ended.
  std::shared_ptr<Sampler> sampler = nullptr;

  std::string held = {};  // bytes of text that come first, as those that a snapshot held back

  // none: up to n_ctx, or n_ctx more where the tokens before it are past that; 0: only reads the
  // prompt; kEndless: until the model ends it, or the context where positions cannot roll.
  std::optional<int32_t> max_tokens = {};
  std::vector<std::string> stop = {};
  bool ignore_end = false;            // goes on after tokens that end a turn
  std::vector<int32_t> spelled = {};  // special tokens whose spelling is part of the text

  std::vector<KvPolicy> policies = {};  // of its sequence, instead of the engine's
  std::shared_ptr<Trace> trace = nullptr;
  LogitsSink prompt_logits = nullptr;
  Pooling pooling = Pooling::none;  // instead of logits: max_tokens must be 0
  Constraint constraint = nullptr;
  bool keeps_logits = false;  // for Generation::logits()
  bool keeps_cache = false;   // a copy, for Engine::save() after its end, whatever comes then

  // Computed while there is an engine, whether anybody waits for it or not. Otherwise computed when
  // somebody waits for its next piece, at most one piece ahead.
  bool eager = false;

  int32_t group = 0;  // of those that Engine::cancel_group() ends together
};

}  // namespace h2o

// Request: what to generate: prompt, sampling and stopping conditions.
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
#include "kv/budget.h"
#include "kv/policy.h"
#include "text/drafter.h"
#include "text/prefix_entry.h"
#include "text/sampler.h"
#include "text/trace.h"

namespace h2o {

class Generation;

// Fills `allowed`, one bit per token of the vocabulary, given all tokens so far. Called on the
// computing thread before each token is sampled; an exception ends the generation.
using Constraint =
    std::function<void(std::span<const int32_t> tokens, std::span<uint32_t> allowed)>;

// Starts to compute what a constraint allows after `tokens`, and returns whether it is known.
// Called before the last of these tokens are processed, so that both are computed at once, and
// again before a token is sampled. While it returns false the generation waits and others go on.
// The call before processing ignores exceptions; the later one ends the generation.
using ConstraintReady = std::function<bool(std::span<const int32_t> tokens)>;

// Receives the logits after each prompt token as they are computed, while the model is locked: must
// not call its sessions.
using LogitsSink = std::function<void(int32_t i, std::span<const float> logits)>;

// The bytes of a snapshot, owned by `owner`.
struct SnapshotBytes {
  std::span<const std::byte> bytes = {};
  std::shared_ptr<const void> owner = nullptr;
};

constexpr int32_t kEndless = -1;  // for Request::max_tokens

// How Generation::embedding() combines the final hidden states of the prompt's tokens. rank: the
// scores of the model's labels by the last one.
enum class Pooling : uint8_t { none, mean, last, first, rank };

struct Request {
  std::vector<int32_t> prompt = {};

  // Continues from this snapshot: the prompt is appended to its tokens. Restores its random state
  // unless `seeded`; its held-back text comes first.
  SnapshotBytes after = {};

  // Continues in the cache of this generation, if it has not been reused and `prompt` starts with
  // all its tokens; otherwise the whole prompt is processed. If no token is unprocessed, the first
  // token is sampled from its saved logits.
  std::shared_ptr<Generation> follows = nullptr;

  SamplerOptions sampling = {};
  bool seeded = true;

  // Used instead of a sampler created from `sampling`; must have accepted all tokens so far. Not
  // shared until the generation has ended.
  std::shared_ptr<Sampler> sampler = nullptr;

  std::string held = {};  // bytes of text to emit first, e.g. text held back by a snapshot

  // nullopt: n_ctx tokens; 0: only process the prompt; kEndless: until the model ends. A sequence
  // whose positions cannot roll ends at n_ctx.
  std::optional<int32_t> max_tokens = {};
  std::vector<std::string> stop = {};
  bool ignore_end = false;            // continue after end-of-generation tokens
  std::vector<int32_t> spelled = {};  // special tokens whose text is part of the output

  std::vector<KvPolicy> policies = {};  // for its sequence, instead of the engine's
  // The parts of all tokens that earlier outputs generated, ascending and apart. They are read one
  // by one where the session replays(), and chunks begin again after them.
  std::vector<TokenSpan> replies = {};
  Protection protect = {};  // of `prompt`, after the tokens of a snapshot; changes the policies
  std::shared_ptr<Trace> trace = nullptr;
  LogitsSink prompt_logits = nullptr;
  // compute an embedding instead of logits; requires max_tokens = 0
  Pooling pooling = Pooling::none;
  Constraint constraint = nullptr;
  ConstraintReady constraint_ready = nullptr;  // default: always
  bool allow_logits = false;                   // enables Generation::logits()

  // Proposes tokens, as many as SessionOptions::max_drafts allows. The output does not depend on
  // it, bit for bit. Not shared until the generation has ended.
  std::shared_ptr<Drafter> drafter = nullptr;
  bool drafts = false;  // use the engine's own drafter, if it has one and none is given
  // save a copy of the cache at the end, so that Engine::save() always works
  bool keeps_cache = false;

  // Compute in the background, even if no thread waits. Otherwise it is computed on demand, at most
  // one piece ahead.
  bool eager = false;

  int32_t group = 0;  // for Engine::cancel_group()
};

}  // namespace h2o

// Trace: log-probabilities and cache contents recorded during generation.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "model/session.h"

namespace h2o {

struct TraceOptions {
  int32_t n_top = -1;      // record log-probabilities, with this many top tokens; -1: none
  bool prompt = false;     // also for prompt tokens, from the second on
  int32_t kept_every = 0;  // record kept positions after this many tokens; 0: never
};

// The log-probability of a token given the tokens before it: natural logarithm, from the model's
// logits without any sampling options.
struct TokenLogprob {
  int32_t token;
  double logprob;
  std::vector<std::pair<int32_t, double>> top;  // most likely tokens, most likely first
};

// The tokens that a sequence keeps at one point.
struct Kept {
  int32_t tokens_kept;  // in the layer that keeps most
  // [tokens seen]: the fraction of the kv_heads, of all layers with a cache, that keep the token
  std::vector<float> shares;
  // [tokens seen], empty without an archive: how many of the archived kv_heads recalled the token's
  // page, as a fraction; the mean of the tokens read since the last observation
  std::vector<float> recalls;
};

// Can be read while another thread writes.
class Trace {
 public:
  // Throws InvalidArgument for options out of range.
  explicit Trace(const TraceOptions& options);

  const TraceOptions& options() const { return options_; }
  bool wants_logits() const { return options_.n_top >= 0; }

  // Records a token with the logits before it [n_vocab], which need not be finite; see Sampler.
  void add(std::span<const float> logits, int32_t token);

  // A sequence begins or goes on here, from now on with these counts of its archive.
  void begin(const Session& session, int32_t sequence);

  // Records what a sequence keeps now.
  void observe(const Session& session, int32_t sequence);

  size_t n_logprobs() const;
  std::vector<TokenLogprob> logprobs(size_t begin, size_t end) const;
  std::optional<Kept> kept() const;

 private:
  const TraceOptions options_;
  mutable std::mutex mutex_;
  std::vector<TokenLogprob> logprobs_;
  std::optional<Kept> kept_;
  // At the last observation, or the beginning:
  std::vector<int64_t> n_recalls_;  // by page, of all heads
  int32_t n_seen_ = 0;              // tokens
};

}  // namespace h2o

// Trace: what is written down of a sequence while it is computed, beside its text.
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
  int32_t n_top = -1;      // log-probabilities, with so many of the likeliest; -1: none
  bool prompt = false;     // of the prompt's tokens too, from its second on
  int32_t kept_every = 0;  // look at what is kept after so many tokens; 0: never
};

// How likely the model finds a token after those before it. Natural logarithms of the model's own
// distribution: the options of sampling have no part in it.
struct TokenLogprob {
  int32_t token;
  double logprob;
  std::vector<std::pair<int32_t, double>> top;  // the likeliest tokens with theirs, likeliest first
};

// What a sequence keeps at one moment.
struct Kept {
  int32_t tokens_kept;        // in the layer that keeps most
  std::vector<float> shares;  // [tokens seen]: of all layers' KV heads, those that keep the token
};

// May be read by any thread while another one writes.
class Trace {
 public:
  // Throws InvalidArgument for numbers out of range.
  explicit Trace(const TraceOptions& options);

  const TraceOptions& options() const { return options_; }
  bool wants_logits() const { return options_.n_top >= 0; }

  // Writes down a token with the logits before it [n_vocab].
  void add(std::span<const float> logits, int32_t token);

  // Writes down what a sequence keeps now.
  void observe(const Session& session, int32_t sequence);

  size_t n_logprobs() const;
  std::vector<TokenLogprob> logprobs(size_t begin, size_t end) const;
  std::optional<Kept> kept() const;

 private:
  const TraceOptions options_;
  mutable std::mutex mutex_;
  std::vector<TokenLogprob> logprobs_;
  std::optional<Kept> kept_;
};

}  // namespace h2o

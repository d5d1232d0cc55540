// Penalties: changes logits by biases and by the tokens so far: penalties of recent tokens, and
// DRY.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "text/candidates.h"
#include "text/repetitions.h"
#include "text/sampler_options.h"

namespace h2o {

class LogitRow;

class Penalties {
 public:
  Penalties(SamplerOptions options, int32_t n_vocab);

  // Flags tokens that repetitions (DRY) do not extend across [n_vocab].
  void set_dry_breakers(std::vector<uint8_t> breakers) { breakers_ = std::move(breakers); }

  // Appends tokens. Throws InvalidArgument, std::bad_alloc without changing anything.
  void accept(std::span<const int32_t> tokens);

  size_t n_vocab() const { return counts_.size(); }

  // Do the options never change a logit? May they make one larger?
  bool are_off() const;
  bool may_raise() const;

  // The number that is added to the logit of a token.
  float bias(size_t token) const;

  // Changes a row that was read from `logits` and `allowed`.
  void apply(LogitRow& row, std::span<const float> logits, std::span<const uint32_t> allowed);

  // Changes the logits of some tokens, which are numbers; returns an upper bound of how many tokens
  // of the vocabulary have another logit.
  size_t apply(std::span<Candidate> some);

 private:
  void remember(int32_t token);
  float penalized(size_t token, float logit) const;
  float dry_penalty(int32_t length) const;

  SamplerOptions options_;
  // ring buffer of the last repeat_last_n tokens, or the set of tokens seen
  std::vector<int32_t> recent_;
  size_t next_recent_ = 0;       // write position in the ring
  std::vector<int32_t> counts_;  // [n_vocab] occurrences among the recent tokens
  Repetitions repetitions_;      // for DRY
  std::vector<uint8_t> breakers_;
};

}  // namespace h2o

// Sampler: selects the next token from logits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/largest_logits.h"
#include "text/candidates.h"
#include "text/mersenne_twister.h"
#include "text/penalties.h"
#include "text/sampler_options.h"

namespace h2o {

// The order is bias, penalties, temperature, top-k, top-p, min-p, as in Hugging Face transformers,
// or options.samplers. Mirostat replaces the truncating steps. The same seed, options and logits
// give the same tokens, up to the rounding of exp().
//
// There are three ways to draw, because none of them is fast for all: few candidates are sorted,
// many are put into buckets, and options that need more go step by step.
class Sampler {
 public:
  // Throws InvalidArgument for an option out of range.
  Sampler(const SamplerOptions& options, int32_t n_vocab);

  // The options, with steps missing from `samplers` disabled.
  const SamplerOptions& options() const { return options_; }

  // Does it always select the largest unmodified logit?
  bool is_argmax() const { return is_greedy() && penalties_.are_off(); }

  // Flags tokens that repetitions (DRY) do not extend across [n_vocab].
  void set_dry_breakers(std::vector<uint8_t> breakers) {
    penalties_.set_dry_breakers(std::move(breakers));
  }

  // Appends tokens, from the prompt or generated. Strong exception guarantee.
  void accept(std::span<const int32_t> tokens) { penalties_.accept(tokens); }
  void accept(int32_t token) { accept({&token, 1}); }

  // The state of the random number generator (and mirostat) as text. The setter throws
  // InvalidArgument for an invalid state.
  std::string random_state() const;
  void set_random_state(const std::string& state);

  // The next token from logits [n_vocab]; does not call accept(). Greedy ties go to the lower id.
  // A NaN counts as -infinity. `allowed` is a bit mask of (n_vocab + 31) / 32 words: bit t % 32 of
  // word t / 32 is set if token t may be chosen; an empty mask allows every token.
  // Throws InvalidArgument for a wrong size, or if no token is allowed: none in `allowed` has a
  // bias above -infinity.
  int32_t sample(std::span<const float> logits, std::span<const uint32_t> allowed = {});

  // Samples this token from the largest logits alone, with the same random numbers. Returns
  // nullopt, without changing anything, if other logits may matter.
  std::optional<int32_t> sample(const LargestLogits& largest);

  // Can that succeed with these options, and for which temperature must LargestLogits::rest be
  // computed (0: none)?
  bool may_draw_from_largest() const;
  float rest_temperature() const;

 private:
  struct Scratch;

  void choose_steps();
  Scratch& scratch() const;
  void make_finite(LogitRow& row, std::span<const uint32_t> allowed) const;
  double random_number();
  bool is_greedy() const { return options_.temperature == 0 && options_.dynatemp_range == 0; }
  bool cuts_first() const;
  bool draws_nucleus() const;
  int32_t draw_sorted(std::span<Candidate> candidates);
  int32_t draw_nucleus(std::span<const Candidate> candidates);
  int32_t draw_by_steps(Candidates candidates, bool has_cut);
  int32_t draw_mirostat(Candidates& candidates);

  SamplerOptions options_;
  MersenneTwister random_;
  Penalties penalties_;
  std::vector<SamplerStep> steps_;  // steps after the penalties that have an effect
  bool by_steps_;                   // the options are not supported by the fast paths
  float surprise_;                  // mirostat's current limit, in bits
};

}  // namespace h2o

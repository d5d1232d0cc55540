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
#include "text/repetitions.h"
#include "text/sampler_options.h"

namespace h2o {

// The order is bias, penalties, temperature, top-k, top-p, min-p, as in Hugging Face transformers,
// or options.samplers. Mirostat replaces the truncating steps. The same seed, options and logits
// give the same tokens, up to the rounding of exp().
class Sampler {
 public:
  // Throws InvalidArgument for an option out of range.
  Sampler(const SamplerOptions& options, int32_t n_vocab);

  // With steps missing from options.samplers disabled.
  const SamplerOptions& options() const { return options_; }

  // Does it always select the largest unmodified logit?
  bool is_argmax() const;

  // For DRY: flags of tokens that repetitions do not extend across [n_vocab].
  void set_dry_breakers(std::vector<uint8_t> breakers) { breakers_ = std::move(breakers); }

  // Appends tokens, from the prompt or generated. Strong exception guarantee.
  void accept(std::span<const int32_t> tokens);
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

  // The same token, from the largest logits alone and with the same random numbers. Returns
  // nullopt, without changing anything, if other logits may matter.
  std::optional<int32_t> sample(const LargestLogits& largest);

  // Can that succeed with these options, and for which temperature must LargestLogits::rest be
  // computed (0: none)?
  bool may_draw_from_largest() const;
  float rest_temperature() const;

 private:
  struct Amount {  // of candidates
    double mass = 0;
    int32_t count = 0;
  };
  // The least likely candidate kept: the last one in sorted order.
  struct Limit {
    float logit;
    int32_t token;
  };
  // What is known from the largest logits.
  struct Known {
    size_t n = 0;          // candidates at the front of candidates_
    size_t n_certain = 0;  // the first n_certain are more likely than all other tokens
    size_t n_lowered = 0;  // upper bound of tokens lowered by penalties
    bool all = false;      // no other token has a finite logit
  };

  // Shared by all samplers of a thread, so that it stays in the processor's cache.
  struct Scratch {
    std::vector<float> logits;  // padded to whole blocks with -infinity
    std::vector<float> peaks;   // the largest logit of each block
    std::vector<float> largest_peaks;
    std::vector<int16_t> bucket_of;     // by token
    std::vector<Amount> buckets;        // most likely candidates first
    std::vector<Candidate> candidates;  // all, and room for a block
  };

  void choose_steps();
  void take_scratch();
  void remember(int32_t token);
  void read(std::span<const float> logits, std::span<const uint32_t> allowed);
  void penalize(std::span<const float> logits, std::span<const uint32_t> allowed);
  void penalize_repetitions();
  float bias_of(size_t token) const;
  float penalized(size_t token, float logit) const;
  float dry_penalty(int32_t length) const;
  void find_peaks();
  void make_finite(std::span<const uint32_t> allowed);

  double random_below(double total);
  // Relative to the most likely token.
  float weight_of(float logit) const;
  float weight_if_kept(size_t token, const Limit& limit, float min_weight) const;

  bool is_greedy() const { return options_.temperature == 0 && options_.dynatemp_range == 0; }

  bool draws_nucleus() const;
  Known gather_known(const LargestLogits& largest);
  std::optional<int32_t> draw_nucleus(const Known& known, const LargestLogits& largest);

  bool cuts_first() const;
  Candidates gather_candidates();
  int32_t draw_by_steps(Candidates candidates, bool has_cut);
  int32_t draw_mirostat(Candidates& candidates);

  int32_t draw_first(size_t n);
  size_t gather_largest(size_t k);
  float bar_below(size_t k);

  int32_t draw_bucketed(size_t k);
  float smallest_finite() const;
  bool has_masses() const;
  void fill_buckets(size_t k);
  int32_t bucket_below(float distance) const;
  int32_t min_p_bucket(float margin) const;
  Limit find_limit(size_t k, int32_t& last_bucket);
  template <typename Wanted, typename Visit>
  void for_tokens(Wanted wanted, Visit visit) const;
  void weigh(int32_t last_bucket, const Limit& limit);
  size_t gather_bucket(int32_t bucket, const Limit& limit, float min_weight);
  template <typename Reached>
  Limit narrow(size_t n, Amount& before, Reached reached);

  SamplerOptions options_;
  MersenneTwister random_;
  // ring buffer of the last repeat_last_n tokens, or the set of tokens seen
  std::vector<int32_t> recent_;
  size_t next_recent_ = 0;       // write position in the ring
  std::vector<int32_t> counts_;  // [n_vocab] occurrences among the recent tokens
  Repetitions repetitions_;      // for DRY
  std::vector<uint8_t> breakers_;
  std::vector<SamplerStep> steps_;  // steps after the penalties that have an effect
  bool by_steps_;                   // the options are not supported by the fast paths
  float surprise_;                  // mirostat's current limit, in bits

  // Used by one call: parts of the thread's Scratch.
  std::span<float> logits_;
  std::span<float> peaks_;
  std::span<float> largest_peaks_;
  std::span<int16_t> bucket_of_;
  std::span<Amount> buckets_;
  std::span<Candidate> candidates_;
  float largest_ = 0;
  float bucket_scale_ = 0;
};

}  // namespace h2o

// SamplerOptions: how the next token is sampled.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace h2o {

// In the default order. Those of Hugging Face transformers are in its order, except typical_p,
// which is where llama.cpp has it.
enum class SamplerStep : uint8_t {
  penalties,
  dry,
  top_n_sigma,
  temperature,
  top_k,
  typical_p,
  top_p,
  min_p,
  xtc
};

// By llama.cpp's names, e.g. "typ_p". Throws InvalidArgument for unknown names.
SamplerStep sampler_step(std::string_view name);

// llama.cpp's order: temperature comes last.
std::span<const SamplerStep> llama_cpp_steps();

struct LogitBias {
  int32_t token;
  float bias;  // added to its logit; -infinity: never sampled
};

struct SamplerOptions {
  float temperature = 0.8f;  // 0 = greedy
  int32_t top_k = 40;        // keep the k most probable; 0 = all
  float top_p = 0.95f;       // keep the smallest set with this probability; 1 = all
  float min_p = 0.05f;  // keep tokens at least this times as probable as the most probable; 0 = all
  float repeat_penalty = 1.0f;  // divides positive, multiplies negative logits of recent tokens
  int32_t repeat_last_n = 64;   // window of recent tokens; -1 = all, 0 = none
  uint64_t seed = 0;

  float frequency_penalty = 0;  // subtracted for each occurrence among the recent tokens
  float presence_penalty = 0;   // subtracted once for a recent token
  std::vector<LogitBias> logit_bias = {};

  // DRY ("Don't repeat yourself"): a token that would extend a repetition of n >=
  // dry_allowed_length tokens loses dry_multiplier * dry_base^(n - dry_allowed_length).
  float dry_multiplier = 0;  // 0 = off
  float dry_base = 1.75f;
  int32_t dry_allowed_length = 2;
  int32_t dry_penalty_last_n = -1;  // window; -1 = the context, 0 = off
  // no repetition goes past a token that has one; none: dry_breaker_strings
  std::optional<std::vector<std::string>> dry_breakers = {};

  float typical_p = 1;  // keep the most typical tokens with this total probability; 1 = all
  // keep logits within this many standard deviations of the largest; 0 = all
  float top_n_sigma = 0;
  // probability of dropping all but the least likely of the likely tokens
  float xtc_probability = 0;
  float xtc_threshold = 0.1f;   // likely: at least this probability
  float dynatemp_range = 0;     // temperature +- this, depending on the entropy; 0 = off
  float dynatemp_exponent = 1;  // of the normalized entropy
  int32_t mirostat = 0;         // version 1 or 2, replaces all truncating samplers; 0 = off
  float mirostat_tau = 5;       // target surprise, in bits
  float mirostat_eta = 0.1f;    // learning rate
  std::optional<std::vector<SamplerStep>> samplers = {};  // only these, in this order; none: all

  // Throws InvalidArgument for an option out of range.
  void check(int32_t n_vocab) const;

  // A copy in which steps missing from `samplers` are disabled.
  SamplerOptions with_samplers() const;

  // Does this step have any effect with these options?
  bool does(SamplerStep step) const;

  bool penalizes() const;  // for recent tokens
  bool uses_dry() const { return dry_multiplier > 0 && dry_penalty_last_n != 0; }
};

// The default: line breaks, colons, quotes and asterisks.
std::span<const std::string_view> dry_breaker_strings();

}  // namespace h2o

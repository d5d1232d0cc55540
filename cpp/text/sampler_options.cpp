#include "text/sampler_options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"

namespace h2o {
namespace {

using enum SamplerStep;

constexpr std::array<SamplerStep, 9> kLlamaCpp = {
    penalties, dry, top_n_sigma, top_k, typical_p, top_p, min_p, xtc, temperature};
constexpr std::array<std::string_view, 4> kBreakers = {"\n", ":", "\"", "*"};

constexpr std::array<std::pair<std::string_view, SamplerStep>, 10> kNames = {
    {{"penalties", penalties},
     {"dry", dry},
     {"top_n_sigma", top_n_sigma},
     {"temperature", temperature},
     {"top_k", top_k},
     {"typ_p", typical_p},
     {"typical_p", typical_p},
     {"top_p", top_p},
     {"min_p", min_p},
     {"xtc", xtc}}};

std::string_view name_of(SamplerStep step) {
  return std::ranges::find(kNames, step, &std::pair<std::string_view, SamplerStep>::second)->first;
}

// These modify logits; the other steps select among candidates.
bool changes_logits(SamplerStep step) { return step == penalties || step == dry; }

void check_steps(std::span<const SamplerStep> steps) {
  for (size_t i = 0; i < steps.size(); ++i) {
    require(std::ranges::find(steps.first(i), steps[i]) == steps.begin() + i, "samplers has ",
            name_of(steps[i]), " twice");
    require(i == 0 || !changes_logits(steps[i]) || changes_logits(steps[i - 1]), "samplers has ",
            name_of(steps[i]), " after ", i == 0 ? "" : name_of(steps[i - 1]),
            ", expected penalties and dry before all others");
  }
}

}  // namespace

SamplerStep sampler_step(std::string_view name) {
  const auto found =
      std::ranges::find(kNames, name, &std::pair<std::string_view, SamplerStep>::first);
  require(found != kNames.end(), "there is no sampler \"", name,
          "\", expected penalties, dry, top_n_sigma, temperature, top_k, typ_p, top_p, min_p or "
          "xtc");
  return found->second;
}

std::span<const SamplerStep> llama_cpp_steps() { return kLlamaCpp; }
std::span<const std::string_view> dry_breaker_strings() { return kBreakers; }

bool SamplerOptions::penalizes() const {
  return (repeat_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0) &&
         repeat_last_n != 0;
}

bool SamplerOptions::does(SamplerStep step) const {
  switch (step) {
    case SamplerStep::penalties:
      return penalizes();
    case SamplerStep::dry:
      return uses_dry();
    case SamplerStep::top_n_sigma:
      return top_n_sigma > 0;
    case SamplerStep::temperature:
      return temperature != 1 || dynatemp_range > 0;
    case SamplerStep::top_k:
      return top_k > 0;
    case SamplerStep::typical_p:
      return typical_p < 1;
    case SamplerStep::top_p:
      return top_p < 1;
    case SamplerStep::min_p:
      return min_p > 0;
    default:
      return xtc_probability > 0 && xtc_threshold <= 0.5f;
  }
}

SamplerOptions SamplerOptions::with_samplers() const {
  SamplerOptions o = *this;
  if (!o.samplers) return o;
  const auto left_out = [&](SamplerStep step) {
    return std::ranges::find(*samplers, step) == samplers->end();
  };
  if (left_out(SamplerStep::penalties)) {
    o.repeat_penalty = 1;
    o.frequency_penalty = o.presence_penalty = 0;
  }
  if (left_out(SamplerStep::dry)) o.dry_multiplier = 0;
  if (left_out(SamplerStep::top_n_sigma)) o.top_n_sigma = 0;
  if (left_out(SamplerStep::temperature)) {
    o.temperature = 1;
    o.dynatemp_range = 0;
  }
  if (left_out(SamplerStep::top_k)) o.top_k = 0;
  if (left_out(SamplerStep::typical_p)) o.typical_p = 1;
  if (left_out(SamplerStep::top_p)) o.top_p = 1;
  if (left_out(SamplerStep::min_p)) o.min_p = 0;
  if (left_out(SamplerStep::xtc)) o.xtc_probability = 0;
  return o;
}

void SamplerOptions::check(int32_t n_vocab) const {
  // Comparisons are written so that they fail for NaN.
  const auto finite = [](float x) { return std::isfinite(x); };
  require(n_vocab > 0, "n_vocab is ", n_vocab, ", expected 1 or more");
  require(temperature >= 0 && finite(temperature), "temperature is ", temperature,
          ", expected 0 (greedy) or more");
  require(top_k >= 0, "top_k is ", top_k, ", expected 0 (all) or more");
  require(top_p > 0 && top_p <= 1, "top_p is ", top_p, ", expected above 0, up to 1 (all)");
  require(min_p >= 0 && min_p <= 1, "min_p is ", min_p, ", expected 0 (all) to 1");
  require(repeat_penalty > 0 && finite(repeat_penalty), "repeat_penalty is ", repeat_penalty,
          ", expected above 0, 1 (none) or more to avoid repeats");
  require(repeat_last_n >= -1, "repeat_last_n is ", repeat_last_n, ", expected -1 (all) or more");
  require(finite(frequency_penalty), "frequency_penalty is ", frequency_penalty,
          ", expected a number, 0 (none) or more to avoid repeats");
  require(finite(presence_penalty), "presence_penalty is ", presence_penalty,
          ", expected a number, 0 (none) or more to avoid repeats");
  require(dry_multiplier >= 0 && finite(dry_multiplier), "dry_multiplier is ", dry_multiplier,
          ", expected 0 (off) or more");
  require(dry_base >= 1 && finite(dry_base), "dry_base is ", dry_base, ", expected 1 or more");
  require(dry_allowed_length >= 1, "dry_allowed_length is ", dry_allowed_length,
          ", expected 1 or more");
  require(dry_penalty_last_n >= -1, "dry_penalty_last_n is ", dry_penalty_last_n,
          ", expected -1 (the context) or more");
  require(typical_p > 0 && typical_p <= 1, "typical_p is ", typical_p,
          ", expected above 0, up to 1 (all)");
  require(top_n_sigma >= 0 && finite(top_n_sigma), "top_n_sigma is ", top_n_sigma,
          ", expected 0 (all) or more");
  require(xtc_probability >= 0 && xtc_probability <= 1, "xtc_probability is ", xtc_probability,
          ", expected 0 (never) to 1");
  require(xtc_threshold >= 0 && xtc_threshold <= 1, "xtc_threshold is ", xtc_threshold,
          ", expected 0 to 1");
  require(dynatemp_range >= 0 && finite(dynatemp_range), "dynatemp_range is ", dynatemp_range,
          ", expected 0 (off) or more");
  require(dynatemp_exponent >= 0 && finite(dynatemp_exponent), "dynatemp_exponent is ",
          dynatemp_exponent, ", expected 0 or more");
  require(mirostat >= 0 && mirostat <= 2, "mirostat is ", mirostat, ", expected 0 (off), 1 or 2");
  require(mirostat_tau >= 0 && finite(mirostat_tau), "mirostat_tau is ", mirostat_tau,
          ", expected 0 or more");
  require(mirostat_eta >= 0 && finite(mirostat_eta), "mirostat_eta is ", mirostat_eta,
          ", expected 0 or more");
  if (samplers) check_steps(*samplers);
  for (const auto& [token, bias] : logit_bias) {
    require(token >= 0 && token < n_vocab, "logit_bias: token ", token,
            " is not in the vocabulary of ", n_vocab);
    require(finite(bias) || bias == -std::numeric_limits<float>::infinity(), "logit_bias: ", bias,
            " for token ", token, ", expected a number, or -infinity");
  }
  std::vector<LogitBias> sorted = logit_bias;
  std::ranges::sort(sorted, {}, &LogitBias::token);
  const auto same = std::ranges::adjacent_find(sorted, {}, &LogitBias::token);
  require(same == sorted.end(), "a token appears twice in logit_bias");
}

}  // namespace h2o

// Sampler: drawing with options or step orders that the fast paths do not support.
#include <algorithm>
#include <cmath>

#include "text/sampler.h"
#include "text/sampler_blocks.h"

namespace h2o {

void Sampler::choose_steps() {
  static constexpr SamplerStep kDefault[] = {SamplerStep::top_n_sigma, SamplerStep::temperature,
                                             SamplerStep::top_k,       SamplerStep::typical_p,
                                             SamplerStep::top_p,       SamplerStep::min_p,
                                             SamplerStep::xtc};
  const auto add = [this](SamplerStep step) {
    if (step == SamplerStep::penalties || step == SamplerStep::dry) return;  // already applied
    if (options_.mirostat != 0 && step != SamplerStep::temperature) return;
    if (options_.does(step)) steps_.push_back(step);
  };
  if (options_.samplers) {
    std::ranges::for_each(*options_.samplers, add);
  } else {
    std::ranges::for_each(kDefault, add);
  }
  // The fast paths support these steps in this order, with a single temperature.
  const auto is_fast = [](SamplerStep step) {
    return step == SamplerStep::temperature || step == SamplerStep::top_k ||
           step == SamplerStep::top_p || step == SamplerStep::min_p;
  };
  by_steps_ = options_.mirostat != 0 || options_.dynatemp_range > 0 ||
              !std::ranges::is_sorted(steps_) || !std::ranges::all_of(steps_, is_fast);
}

bool Sampler::is_argmax() const {
  return options_.temperature == 0 && options_.dynatemp_range == 0 && !options_.penalizes() &&
         !options_.uses_dry() && options_.logit_bias.empty();
}

// has_cut: top-k has already been applied.
int32_t Sampler::draw_by_steps(Candidates candidates, bool has_cut) {
  const SamplerOptions& o = options_;
  for (const SamplerStep step : steps_) {
    switch (step) {
      case SamplerStep::top_n_sigma:
        candidates.keep_sigma(o.top_n_sigma);
        break;
      case SamplerStep::temperature:
        if (o.dynatemp_range > 0) {
          candidates.scale_by_entropy(std::max(0.0f, o.temperature - o.dynatemp_range),
                                      o.temperature + o.dynatemp_range, o.dynatemp_exponent);
        } else {
          candidates.scale(o.temperature);
        }
        break;
      case SamplerStep::top_k:
        if (!has_cut) candidates.keep_largest(o.top_k);
        break;
      case SamplerStep::typical_p:
        candidates.keep_typical(o.typical_p);
        break;
      case SamplerStep::top_p:
        candidates.keep_probable(o.top_p);
        break;
      case SamplerStep::min_p:
        candidates.keep_relative(o.min_p);
        break;
      default:
        if (candidates.size() > 1 && random_below(1) < o.xtc_probability) {
          candidates.drop_top(o.xtc_threshold);
        }
    }
  }
  if (o.mirostat != 0) return draw_mirostat(candidates);
  return candidates.draw(random_below(1));
}

// Is top-k first, or preceded only by one temperature, which does not change the ranking?
bool Sampler::cuts_first() const {
  for (const SamplerStep step : steps_) {
    if (step == SamplerStep::temperature && options_.dynatemp_range == 0) continue;
    return step == SamplerStep::top_k && options_.top_k <= kMaxSorted;
  }
  return false;
}

// All candidates with finite logits; or only those of top-k, sorted, because sums depend on the
// order.
Candidates Sampler::gather_candidates() {
  if (cuts_first()) {
    const size_t n = gather_largest(std::min<size_t>(options_.top_k, counts_.size()));
    std::sort(candidates_.begin(), candidates_.begin() + n, likelier);
    return {candidates_, n};
  }
  size_t n = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    candidates_[n] = {static_cast<int32_t>(i), logits_[i], 0};
    n += std::isfinite(logits_[i]) ? 1 : 0;
  }
  return {candidates_, n};
}

// Basu et al., arXiv 2007.14966: the number of candidates follows the surprise of earlier choices.
int32_t Sampler::draw_mirostat(Candidates& candidates) {
  if (options_.mirostat == 1) {
    candidates.keep_largest(candidates.zipf_count(surprise_, counts_.size()));
  } else {
    candidates.keep_surprise(surprise_);
  }
  double surprise = 0;
  const int32_t token = candidates.draw(random_below(1), &surprise);
  surprise_ -= options_.mirostat_eta * static_cast<float>(surprise - options_.mirostat_tau);
  return token;
}

}  // namespace h2o

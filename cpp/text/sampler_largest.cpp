// Sampler: drawing from the largest logits alone. Gives the same token as drawing from all logits,
// or nothing.
//
// Penalties only lower logits here. So known tokens that are more likely than the last known one
// remain more likely than every unknown token.
#include <algorithm>
#include <cmath>

#include "text/sampler.h"
#include "text/sampler_blocks.h"

namespace h2o {
namespace {

// Sums of weights of at least this size are exact in any order: in double, multiples of 2^-45, the
// last place of the smallest, are exact below 2^8.
constexpr float kMinWeight = 0x1p-22f;
static_assert(LargestLogits::kMax <= 1 << 8);

// The error bounds of LargestLogits::rest and of the approximate masses of draw_bucketed().
constexpr double kRestError = 0x1p-12;
constexpr double kMassError = 0x1p-18;

}  // namespace

bool Sampler::may_draw_from_largest() const {
  const SamplerOptions& o = options_;
  const bool raises =
      o.repeat_penalty < 1 || o.frequency_penalty < 0 || o.presence_penalty < 0 ||
      std::ranges::any_of(o.logit_bias, [](const LogitBias& b) { return b.bias > 0; });
  if (raises) return false;
  if (is_greedy()) return true;
  const bool cuts = o.top_k > 0 && o.top_k <= LargestLogits::kMax;
  return by_steps_ ? cuts && cuts_first() : cuts || draws_nucleus();
}

// Does draw_bucketed() draw from the tokens that top-p or min-p keep?
bool Sampler::draws_nucleus() const {
  const SamplerOptions& o = options_;
  return !by_steps_ && o.top_k == 0 && std::ssize(counts_) > kMaxSorted &&
         (o.top_p < 1 || o.min_p > 0);
}

float Sampler::rest_temperature() const {
  return !is_greedy() && draws_nucleus() && options_.top_p < 1 ? options_.temperature : 0;
}

std::optional<int32_t> Sampler::sample(const LargestLogits& largest) {
  if (!may_draw_from_largest() || largest.n <= 0 || std::isinf(largest.logits[0].value)) return {};
  take_scratch();
  const Known known = gather_known(largest);
  if (known.n_certain == 0) return {};
  largest_ = candidates_[0].logit;
  if (is_greedy()) return candidates_[0].token;
  if (options_.top_k == 0) return draw_nucleus(known, largest);
  const auto k = static_cast<size_t>(options_.top_k);
  if (known.n_certain < k && !known.all) return {};
  const size_t n = std::min(known.n_certain, k);
  return by_steps_ ? draw_by_steps({candidates_, n}, true) : draw_first(n);
}

// Moves tokens with finite logits, after penalties, to the front of candidates_ in sorted order.
Sampler::Known Sampler::gather_known(const LargestLogits& largest) {
  const auto begin = candidates_.begin();
  auto end = begin;
  for (const auto& [token, value] : std::span(largest.logits).first(largest.n)) {
    float logit = value;
    if (!options_.logit_bias.empty()) logit += bias_of(token);
    if (counts_[token] != 0) logit = penalized(token, logit);
    *end++ = {token, logit, 0};
  }
  Known known;
  known.n_lowered = recent_.size() + options_.logit_bias.size();
  if (options_.uses_dry()) {
    const auto repetitions = repetitions_.find(options_.dry_allowed_length, breakers_);
    for (const auto& repetition : repetitions) {
      const auto is_it = [&](const Candidate& c) { return c.token == repetition.token; };
      const auto found = std::find_if(begin, end, is_it);
      if (found != end) found->logit -= dry_penalty(repetition.length);
    }
    known.n_lowered += repetitions.size();
  }
  end = std::remove_if(begin, end, [](const Candidate& c) { return !(c.logit > -kInfinity); });
  std::sort(begin, end, likelier);
  known.n = known.n_certain = static_cast<size_t>(end - begin);
  known.all = largest.n < LargestLogits::kMax || largest.n == std::ssize(counts_);
  if (!known.all) {
    const auto& [token, value] = largest.logits[largest.n - 1];
    const Candidate last{token, value, 0};
    const auto is_certain = [&](const Candidate& c) { return !likelier(last, c); };
    known.n_certain = static_cast<size_t>(std::partition_point(begin, end, is_certain) - begin);
  }
  return known;
}

// Draws the token that draw_bucketed() would draw, if top-k is disabled.
std::optional<int32_t> Sampler::draw_nucleus(const Known& known, const LargestLogits& largest) {
  double mass = 0;  // of the known tokens
  for (size_t i = 0; i < known.n; ++i) {
    candidates_[i].weight = weight_of(candidates_[i].logit);
    mass += candidates_[i].weight;
  }
  size_t n = 0;
  while (n < known.n_certain && candidates_[n].weight >= options_.min_p) ++n;
  const bool ends = known.all || n < known.n_certain;  // min-p keeps no others
  if (options_.top_p < 1) {
    // `rest` is relative to the unpenalized largest logit, which may have been lowered since.
    const auto relative = [this](float logit) {
      return std::exp((static_cast<double>(logit) - largest_) / options_.temperature);
    };
    const double rest = known.all ? 0 : largest.rest * relative(largest.logits[0].value);
    const double lowered =
        static_cast<double>(known.n_lowered) * relative(largest.logits[largest.n - 1].value);
    const double least = mass + std::max(0.0, rest * (1 - kRestError) - lowered);
    const double most = mass + rest * (1 + kRestError);
    const double enough = options_.top_p * least * (1 - kMassError);
    const double surely_enough = options_.top_p * most * (1 + kMassError);
    double kept = 0;
    size_t i = 0;
    while (i < n && kept < enough) kept += candidates_[i++].weight;
    const bool is_last = i == n && ends;
    if (!is_last && !(kept >= surely_enough)) return {};
    n = std::max<size_t>(1, i);
  } else if (!ends) {
    return {};
  }
  if (candidates_[n - 1].weight < kMinWeight) return {};

  double total = 0;
  for (size_t i = 0; i < n; ++i) total += candidates_[i].weight;
  const double drawn = random_below(total);
  double before = 0;
  size_t i = 0;
  while (i + 1 < n && (before += candidates_[i].weight) <= drawn) ++i;
  return candidates_[i].token;
}

}  // namespace h2o

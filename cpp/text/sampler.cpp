#include "text/sampler.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

#include "core/error.h"
#include "text/bucketed_draw.h"
#include "text/known_candidates.h"
#include "text/logit_row.h"
#include "text/token_weights.h"

namespace h2o {
namespace {

// Up to this many candidates are selected by a threshold and sorted; more are distributed to
// buckets.
constexpr int32_t kMaxSorted = 1024;

constexpr const char* kNoneAllowed = "no token is allowed";

bool allows_any(std::span<const uint32_t> allowed, size_t n_vocab) {
  if (allowed.empty()) return true;
  const bool any =
      std::any_of(allowed.begin(), allowed.end() - 1, [](uint32_t w) { return w != 0; });
  const uint32_t last = n_vocab % 32 == 0 ? ~0u : (1u << (n_vocab % 32)) - 1;
  return any || (allowed.back() & last) != 0;
}

// Returns the options with steps missing from `samplers` disabled.
SamplerOptions checked(const SamplerOptions& options, int32_t n_vocab) {
  options.check(n_vocab);
  return options.with_samplers();
}

}  // namespace

// All samplers of a thread share this memory, so that it stays in the processor's cache.
struct Sampler::Scratch {
  LogitRow row;
  BucketedDraw::Scratch buckets;

  std::span<Candidate> room() { return buckets.candidates; }
};

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab)
    : options_(checked(options, n_vocab)),
      random_(options.seed),
      penalties_(options_, n_vocab),
      surprise_(2 * options.mirostat_tau) {
  choose_steps();
  scratch();  // sample() allocates on other threads only, once
}

Sampler::Scratch& Sampler::scratch() const {
  static thread_local Scratch scratch;
  scratch.row.resize(penalties_.n_vocab());
  scratch.buckets.resize(scratch.row);
  return scratch;
}

void Sampler::choose_steps() {
  static constexpr SamplerStep kDefault[] = {SamplerStep::top_n_sigma, SamplerStep::temperature,
                                             SamplerStep::top_k,       SamplerStep::typical_p,
                                             SamplerStep::top_p,       SamplerStep::min_p,
                                             SamplerStep::xtc};
  const auto add = [this](SamplerStep step) {
    if (step == SamplerStep::penalties || step == SamplerStep::dry) return;  // come before
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

// The text does not depend on the application's locale.
std::string Sampler::random_state() const {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << random_;
  if (options_.mirostat != 0) out << ' ' << std::setprecision(9) << surprise_;
  if (!out) throw std::bad_alloc();  // the stream swallows the exception
  return out.str();
}

void Sampler::set_random_state(const std::string& state) {
  std::istringstream in(state);
  in.imbue(std::locale::classic());
  MersenneTwister random;
  in >> random;
  require(!in.fail(), "the random state is invalid");
  float surprise = 0;  // only used by mirostat
  if (in >> surprise) surprise_ = surprise;
  random_ = random;
}

// Returns 53 random bits as a number from 0 to below 1; portable, unlike
// std::uniform_real_distribution.
double Sampler::random_number() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

int32_t Sampler::sample(std::span<const float> logits, std::span<const uint32_t> allowed) {
  const size_t n_vocab = penalties_.n_vocab();
  require(logits.size() == n_vocab, logits.size(), " logits for a vocabulary of ", n_vocab);
  require(allowed.empty() || allowed.size() == (n_vocab + 31) / 32, allowed.size(),
          " words of allowed tokens for a vocabulary of ", n_vocab);
  require(allows_any(allowed, n_vocab), kNoneAllowed);
  Scratch& scratch = this->scratch();
  LogitRow& row = scratch.row;
  row.read(logits, allowed);
  penalties_.apply(row, logits, allowed);
  row.find_peaks();
  if (std::isinf(row.largest())) make_finite(row, allowed);
  if (is_greedy()) return row.argmax();

  const DrawCuts cuts{options_.top_k, options_.top_p, options_.min_p};
  const std::span<Candidate> room = scratch.room();
  const size_t k = cuts.top_k > 0 ? std::min<size_t>(cuts.top_k, n_vocab) : n_vocab;
  if (!by_steps_) {
    if (k > size_t{kMaxSorted}) {
      return BucketedDraw(row, options_.temperature, cuts, scratch.buckets).draw(random_number());
    }
    return draw_sorted(room.first(row.gather_largest(k, room)));
  }
  if (!cuts_first()) return draw_by_steps({room, row.gather_finite(room)}, false);
  const size_t n = row.gather_largest(k, room);
  std::ranges::sort(room.first(n), likelier);  // sums depend on the order
  return draw_by_steps({room, n}, true);
}

// If the largest logit is infinite, the allowed tokens that have it become equally likely, and the
// others are never sampled.
void Sampler::make_finite(LogitRow& row, std::span<const uint32_t> allowed) const {
  bool any = false;
  for (size_t i = 0; i < row.size(); ++i) {
    const bool drawn =
        row[i] == row.largest() && is_allowed(allowed, i) && penalties_.bias(i) != -kInfinity;
    row[i] = drawn ? 0 : -kInfinity;
    any = any || drawn;
  }
  require(any, kNoneAllowed);
  row.find_peaks();
}

std::optional<int32_t> Sampler::sample(const LargestLogits& largest) {
  if (!may_draw_from_largest() || largest.n <= 0 || std::isinf(largest.logits[0].value)) return {};
  const std::span<Candidate> room = scratch().room();
  KnownCandidates known(largest, penalties_, room);
  if (known.is_empty()) return {};
  if (is_greedy()) return known.first().token;
  if (options_.top_k == 0) {
    const std::optional<size_t> n =
        known.count_nucleus(options_.temperature, options_.top_p, options_.min_p);
    return n ? std::optional(draw_nucleus(room.first(*n))) : std::nullopt;
  }
  const std::optional<size_t> n = known.count_largest(static_cast<size_t>(options_.top_k));
  if (!n) return {};
  return by_steps_ ? draw_by_steps({room, *n}, true) : draw_sorted(room.first(*n));
}

bool Sampler::may_draw_from_largest() const {
  if (penalties_.may_raise()) return false;
  if (is_greedy()) return true;
  const bool cuts = options_.top_k > 0 && options_.top_k <= LargestLogits::kMax;
  return by_steps_ ? cuts && cuts_first() : cuts || draws_nucleus();
}

// Does BucketedDraw draw from the tokens that top-p or min-p keep?
bool Sampler::draws_nucleus() const {
  return !by_steps_ && options_.top_k == 0 && penalties_.n_vocab() > size_t{kMaxSorted} &&
         (options_.top_p < 1 || options_.min_p > 0);
}

float Sampler::rest_temperature() const {
  return !is_greedy() && draws_nucleus() && options_.top_p < 1 ? options_.temperature : 0;
}

// Is top-k first, or preceded only by one temperature, which does not change the ranking?
bool Sampler::cuts_first() const {
  for (const SamplerStep step : steps_) {
    if (step == SamplerStep::temperature && options_.dynatemp_range == 0) continue;
    return step == SamplerStep::top_k && options_.top_k <= kMaxSorted;
  }
  return false;
}

// Draws from the candidates that top-k keeps.
int32_t Sampler::draw_sorted(std::span<Candidate> candidates) {
  std::ranges::sort(candidates, likelier);
  const TokenWeights weight_of{candidates[0].logit, options_.temperature};
  double total = 0;
  for (Candidate& c : candidates) {
    c.weight = weight_of(c.logit);
    total += c.weight;
  }
  size_t n = candidates.size();
  if (options_.top_p < 1) {
    const double enough = options_.top_p * static_cast<float>(total);
    double mass = 0;
    size_t kept = 0;
    while (kept < n && mass < enough) mass += candidates[kept++].weight;
    n = kept;
  }
  while (n > 1 && candidates[n - 1].weight < options_.min_p) --n;

  total = 0;
  for (const Candidate& c : candidates.first(n)) total += c.weight;
  double left = random_number() * total;
  size_t last = 0;  // the last one with a weight, in case of a rounding remainder
  for (size_t i = 0; i < n; ++i) {
    if (candidates[i].weight > 0) last = i;
    left -= candidates[i].weight;
    if (left < 0) break;
  }
  return candidates[last].token;
}

// Draws from sorted candidates with weights, as BucketedDraw does.
int32_t Sampler::draw_nucleus(std::span<const Candidate> candidates) {
  double total = 0;
  for (const Candidate& c : candidates) total += c.weight;
  const double drawn = random_number() * total;
  double before = 0;
  size_t i = 0;
  while (i + 1 < candidates.size() && (before += candidates[i].weight) <= drawn) ++i;
  return candidates[i].token;
}

// Draws with any options and order of steps. has_cut: top-k has already been applied.
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
        if (candidates.size() > 1 && random_number() < o.xtc_probability) {
          candidates.drop_top(o.xtc_threshold);
        }
    }
  }
  if (o.mirostat != 0) return draw_mirostat(candidates);
  return candidates.draw(random_number());
}

// Basu et al., arXiv 2007.14966: the number of candidates follows the surprise of earlier choices.
int32_t Sampler::draw_mirostat(Candidates& candidates) {
  if (options_.mirostat == 1) {
    candidates.keep_largest(candidates.zipf_count(surprise_, penalties_.n_vocab()));
  } else {
    candidates.keep_surprise(surprise_);
  }
  double surprise = 0;
  const int32_t token = candidates.draw(random_number(), &surprise);
  surprise_ -= options_.mirostat_eta * static_cast<float>(surprise - options_.mirostat_tau);
  return token;
}

}  // namespace h2o

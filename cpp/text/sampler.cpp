#include "text/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <iomanip>
#include <limits>
#include <locale>
#include <sstream>

#include "core/error.h"
#include "text/sampler_blocks.h"

namespace h2o {
namespace {

constexpr const char* kNoneAllowed = "no token is allowed";

bool allows(std::span<const uint32_t> allowed, size_t token) {
  return allowed.empty() || (allowed[token / 32] >> (token % 32) & 1) != 0;
}

bool allows_any(std::span<const uint32_t> allowed, size_t n_vocab) {
  if (allowed.empty()) return true;
  const bool any =
      std::any_of(allowed.begin(), allowed.end() - 1, [](uint32_t w) { return w != 0; });
  const uint32_t last = n_vocab % 32 == 0 ? ~0u : (1u << (n_vocab % 32)) - 1;
  return any || (allowed.back() & last) != 0;
}

// NaN becomes -infinity.
float number(float logit) { return logit == logit ? logit : -kInfinity; }

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab)
    : options_(options.with_samplers()),
      random_(options.seed),
      repetitions_(options.dry_penalty_last_n),
      surprise_(2 * options.mirostat_tau) {
  options.check(n_vocab);
  std::ranges::sort(options_.logit_bias, {}, &LogitBias::token);
  choose_steps();
  counts_.resize(n_vocab);
  take_scratch();  // sample() allocates on other threads only, once
}

void Sampler::take_scratch() {
  static thread_local Scratch scratch;
  const size_t n_blocks = (counts_.size() + kBlock - 1) / kBlock;
  const size_t padded = n_blocks * kBlock;
  if (scratch.logits.size() < padded) {
    scratch.peaks.resize(n_blocks);
    scratch.largest_peaks.resize(n_blocks);
    scratch.bucket_of.resize(padded);
    scratch.buckets.resize(kBuckets);
    scratch.candidates.resize(padded + kBlock);
    scratch.logits.resize(padded);  // last: with it the others have their sizes too
  }
  logits_ = std::span(scratch.logits).first(padded);
  peaks_ = std::span(scratch.peaks).first(n_blocks);
  largest_peaks_ = std::span(scratch.largest_peaks).first(n_blocks);
  bucket_of_ = std::span(scratch.bucket_of).first(padded);
  buckets_ = scratch.buckets;
  candidates_ = std::span(scratch.candidates).first(padded + kBlock);
}

// Independent of the application's locale.
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

void Sampler::accept(std::span<const int32_t> tokens) {
  const bool penalizes = options_.penalizes();
  if (!penalizes && !options_.uses_dry()) return;
  for (const int32_t token : tokens) {
    require(token >= 0 && token < std::ssize(counts_), "token ", token,
            " is not in the vocabulary of ", counts_.size());
  }
  // Allocate everything first, for the strong exception guarantee.
  if (options_.uses_dry()) repetitions_.reserve(tokens.size());
  const size_t most = options_.repeat_last_n < 0 ? counts_.size() : options_.repeat_last_n;
  const size_t n = penalizes ? std::min(recent_.size() + tokens.size(), most) : 0;
  if (n > recent_.capacity()) recent_.reserve(std::max(n, 2 * recent_.capacity()));
  if (penalizes) {
    for (const int32_t token : tokens) remember(token);
  }
  if (options_.uses_dry()) repetitions_.accept(tokens);
}

void Sampler::remember(int32_t token) {
  if (options_.repeat_last_n < 0) {
    if (counts_[token] == 0) recent_.push_back(token);
    if (counts_[token] == std::numeric_limits<int32_t>::max()) return;
  } else if (std::ssize(recent_) < options_.repeat_last_n) {
    recent_.push_back(token);
  } else {
    --counts_[recent_[next_recent_]];
    recent_[next_recent_] = token;
    next_recent_ = (next_recent_ + 1) % recent_.size();
  }
  ++counts_[token];
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const uint32_t> allowed) {
  const size_t n_vocab = counts_.size();
  require(logits.size() == n_vocab, logits.size(), " logits for a vocabulary of ", n_vocab);
  require(allowed.empty() || allowed.size() == (n_vocab + 31) / 32, allowed.size(),
          " words of allowed tokens for a vocabulary of ", n_vocab);
  require(allows_any(allowed, n_vocab), kNoneAllowed);
  take_scratch();
  read(logits, allowed);
  penalize(logits, allowed);
  if (options_.uses_dry()) penalize_repetitions();
  find_peaks();
  if (std::isinf(largest_)) make_finite(allowed);
  if (is_greedy()) {
    size_t at = (std::ranges::find(peaks_, largest_) - peaks_.begin()) * kBlock;
    while (logits_[at] != largest_) ++at;
    return static_cast<int32_t>(at);
  }
  if (by_steps_) return draw_by_steps(gather_candidates(), cuts_first());
  const size_t k = options_.top_k > 0 ? std::min<size_t>(options_.top_k, n_vocab) : n_vocab;
  return k <= size_t{kMaxSorted} ? draw_first(gather_largest(k)) : draw_bucketed(k);
}

void Sampler::read(std::span<const float> logits, std::span<const uint32_t> allowed) {
  const size_t whole = logits.size() / kBlock * kBlock;
  const float* const __restrict in = logits.data();
  for (size_t at = 0; at < whole; at += kBlock) {
    const uint32_t mask = allowed.empty() ? ~0u : allowed[at / kBlock];
    float* const __restrict out = &logits_[at];
    if (mask == ~0u) {
      for (size_t i = 0; i < kBlock; ++i) out[i] = number(in[at + i]);
    } else {
      std::fill_n(out, kBlock, -kInfinity);
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int i = std::countr_zero(left);
        out[i] = number(in[at + i]);
      }
    }
  }
  for (size_t i = whole; i < logits.size(); ++i) {
    logits_[i] = allows(allowed, i) ? number(in[i]) : -kInfinity;
  }
  std::fill(logits_.begin() + logits.size(), logits_.end(), -kInfinity);
  for (const auto& [token, bias] : options_.logit_bias) {
    logits_[token] = number(logits_[token] + bias);  // infinity - infinity is NaN
  }
}

float Sampler::bias_of(size_t token) const {
  const auto id = static_cast<int32_t>(token);
  const auto found = std::ranges::lower_bound(options_.logit_bias, id, {}, &LogitBias::token);
  return found != options_.logit_bias.end() && found->token == id ? found->bias : 0;
}

// Keskar et al., arXiv 1909.05858, section 4.1; and OpenAI's penalties, as in llama.cpp.
float Sampler::penalized(size_t token, float logit) const {
  logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
  if (options_.frequency_penalty != 0 || options_.presence_penalty != 0) {
    logit -= static_cast<float>(counts_[token]) * options_.frequency_penalty;
    logit -= options_.presence_penalty;
  }
  return number(logit);  // penalties of many occurrences may be infinite
}

// Repeated tokens are recomputed from the original logit, so each is penalized once.
void Sampler::penalize(std::span<const float> logits, std::span<const uint32_t> allowed) {
  const auto penalize_one = [&](size_t token) {
    if (!allows(allowed, token)) return;
    float logit = number(logits[token]);
    if (!options_.logit_bias.empty()) logit = number(logit + bias_of(token));
    logits_[token] = penalized(token, logit);
  };
  if (recent_.size() <= counts_.size()) {
    for (const int32_t token : recent_) penalize_one(token);
  } else {
    for (size_t token = 0; token < counts_.size(); ++token) {
      if (counts_[token] != 0) penalize_one(token);
    }
  }
}

void Sampler::penalize_repetitions() {
  for (const auto& [token, length] : repetitions_.find(options_.dry_allowed_length, breakers_)) {
    logits_[token] -= dry_penalty(length);
  }
}

float Sampler::dry_penalty(int32_t length) const {
  const float growth =
      std::pow(options_.dry_base, static_cast<float>(length - options_.dry_allowed_length));
  return std::min(options_.dry_multiplier * growth, std::numeric_limits<float>::max());
}

// The largest logit of each block, and of all.
void Sampler::find_peaks() {
  for (size_t block = 0; block < peaks_.size(); ++block) {
    const float* const logits = &logits_[block * kBlock];
    float lanes[kBlock / 2];
    for (size_t i = 0; i < kBlock / 2; ++i) {
      lanes[i] = std::max(logits[i], logits[i + kBlock / 2]);
    }
    for (size_t i = 0; i < 8; ++i) lanes[i] = std::max(lanes[i], lanes[i + 8]);
    for (size_t i = 0; i < 4; ++i) lanes[i] = std::max(lanes[i], lanes[i + 4]);
    peaks_[block] = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
  }
  largest_ = std::ranges::max(peaks_);
}

// If the largest logit is infinite, the allowed tokens that have it become equally likely, and the
// others are never sampled.
void Sampler::make_finite(std::span<const uint32_t> allowed) {
  bool any = false;
  for (size_t i = 0; i < counts_.size(); ++i) {
    const bool drawn = logits_[i] == largest_ && allows(allowed, i) && bias_of(i) != -kInfinity;
    logits_[i] = drawn ? 0 : -kInfinity;
    any = any || drawn;
  }
  require(any, kNoneAllowed);
  find_peaks();
}

// 53 random bits; portable, unlike std::uniform_real_distribution.
double Sampler::random_below(double total) {
  return static_cast<double>(random_() >> 11) * 0x1p-53 * total;
}

// Draws from the first n candidates, after top-k.
int32_t Sampler::draw_first(size_t n) {
  const auto begin = candidates_.begin();
  std::sort(begin, begin + n, likelier);
  double total = 0;
  for (size_t i = 0; i < n; ++i) {
    candidates_[i].weight = weight_of(candidates_[i].logit);
    total += candidates_[i].weight;
  }
  if (options_.top_p < 1) {
    const double enough = options_.top_p * static_cast<float>(total);
    double mass = 0;
    size_t kept = 0;
    while (kept < n && mass < enough) mass += candidates_[kept++].weight;
    n = kept;
  }
  while (n > 1 && candidates_[n - 1].weight < options_.min_p) --n;

  total = 0;
  for (size_t i = 0; i < n; ++i) total += candidates_[i].weight;
  double left = random_below(total);
  size_t last = 0;  // the last one with a weight, in case of a rounding remainder
  for (size_t i = 0; i < n; ++i) {
    if (candidates_[i].weight > 0) last = i;
    left -= candidates_[i].weight;
    if (left < 0) break;
  }
  return candidates_[last].token;
}

// A lower bound of the k largest logits: the k-th largest of a subset of block maxima.
float Sampler::bar_below(size_t k) {
  const size_t n = std::min(peaks_.size(), 8 * k);
  if (k > n) return -kInfinity;
  const auto end = std::copy_n(peaks_.begin(), n, largest_peaks_.begin());
  const auto kth = largest_peaks_.begin() + (k - 1);
  std::nth_element(largest_peaks_.begin(), kth, end, std::greater());
  return std::nextafter(*kth, -kInfinity);
}

// Moves the k largest finite logits, unsorted, to the front of candidates_; returns their number.
size_t Sampler::gather_largest(size_t k) {
  // The candidates of one more block always fit.
  const size_t room = std::min(std::max<size_t>(4 * k, 256), candidates_.size() - kBlock);
  const auto begin = candidates_.begin();
  size_t n = 0;
  size_t n_read = 0;
  const auto read_logits = [&] {
    for (; n_read < n; ++n_read) candidates_[n_read].logit = logits_[candidates_[n_read].token];
  };
  const auto keep_largest = [&] {
    read_logits();
    std::nth_element(begin, begin + (k - 1), begin + n, likelier);
    n = n_read = k;
  };
  float bar = bar_below(k);
  for (size_t block = 0; block < peaks_.size(); ++block) {
    if (!(peaks_[block] > bar)) continue;
    const size_t at = block * kBlock;
    for (size_t i = at; i < at + kBlock; ++i) {
      candidates_[n].token = static_cast<int32_t>(i);
      n += logits_[i] > bar ? 1 : 0;  // a branch would often be mispredicted
    }
    if (n < room || n <= k) continue;
    keep_largest();
    bar = candidates_[k - 1].logit;  // of equal logits the first are kept
  }
  if (n > k) keep_largest();
  read_logits();
  return n;
}

}  // namespace h2o

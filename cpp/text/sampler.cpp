#include "text/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>

#include "core/error.h"

namespace h2o {

Sampler::Sampler(const SamplerOptions& options, int32_t n_vocab)
    : options_(options), random_(options.seed) {
  const SamplerOptions& o = options;
  // Written so that NaN fails too.
  require(o.temperature >= 0 && std::isfinite(o.temperature), "[sampler] temperature is ",
          o.temperature, ", it must be 0 or more");
  require(o.top_k >= 0, "[sampler] top_k is ", o.top_k, ", it must be 0 (all) or more");
  require(o.top_p > 0 && o.top_p <= 1, "[sampler] top_p is ", o.top_p,
          ", it must be above 0 and at most 1");
  require(o.min_p >= 0 && o.min_p <= 1, "[sampler] min_p is ", o.min_p, ", it must be 0 to 1");
  require(o.repeat_penalty > 0 && std::isfinite(o.repeat_penalty), "[sampler] repeat_penalty is ",
          o.repeat_penalty, ", it must be above 0");
  require(o.repeat_last_n >= -1, "[sampler] repeat_last_n is ", o.repeat_last_n,
          ", it must be -1 (all) or more");
  require(n_vocab > 0, "[sampler] n_vocab is ", n_vocab, ", it must be positive");
  counts_.assign(n_vocab, 0);
  candidates_.reserve(n_vocab);
  weights_.reserve(n_vocab);
}

// In the same characters whatever the application's locale is.
std::string Sampler::random_state() const {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << random_;
  if (!out) throw std::bad_alloc();  // which a stream keeps to itself
  return out.str();
}

void Sampler::set_random_state(const std::string& state) {
  std::istringstream in(state);
  in.imbue(std::locale::classic());
  std::mt19937_64 random;
  in >> random;
  require(!in.fail(), "[sampler] the random state makes no sense");
  random_ = random;
}

void Sampler::accept(std::span<const int32_t> tokens) {
  if (options_.repeat_penalty == 1.0f || options_.repeat_last_n == 0) return;
  for (const int32_t token : tokens) {
    require(token >= 0 && token < std::ssize(counts_), "[sampler] token ", token,
            " is not in the vocabulary of ", counts_.size());
  }
  // All the memory at first, so that nothing can fail halfway.
  size_t n = recent_.size() + tokens.size();
  if (options_.repeat_last_n > 0) n = std::min<size_t>(n, options_.repeat_last_n);
  if (n > recent_.capacity()) recent_.reserve(std::max(n, 2 * recent_.capacity()));
  for (const int32_t token : tokens) remember(token);
}

void Sampler::remember(int32_t token) {
  ++counts_[token];
  if (options_.repeat_last_n < 0 || std::ssize(recent_) < options_.repeat_last_n) {
    recent_.push_back(token);
  } else {
    --counts_[recent_[next_recent_]];
    recent_[next_recent_] = token;
    next_recent_ = (next_recent_ + 1) % recent_.size();
  }
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const uint32_t> allowed) {
  require(logits.size() == counts_.size(), "[sampler] ", logits.size(),
          " logits for a vocabulary of ", counts_.size());
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!allowed.empty() && (allowed[i / 32] >> (i % 32) & 1) == 0) continue;
    const float logit = std::isnan(logits[i]) ? -std::numeric_limits<float>::infinity() : logits[i];
    candidates_.push_back({static_cast<int32_t>(i), logit});
  }
  require(!candidates_.empty(), "[sampler] no token is allowed");
  penalise();
  if (options_.temperature == 0) {
    return std::max_element(
               candidates_.begin(), candidates_.end(),
               [](const Candidate& a, const Candidate& b) { return a.logit < b.logit; })
        ->token;
  }
  keep_likely();
  return draw();
}

// Keskar et al., arXiv 1909.05858, section 4.1.
void Sampler::penalise() {
  if (recent_.empty()) return;
  for (auto& [token, logit] : candidates_) {
    if (counts_[token] == 0) continue;
    logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
  }
}

// Temperature, then top-k, top-p and min-p; leaves the survivors in order, most likely first, and
// their weights.
void Sampler::keep_likely() {
  const auto likelier = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
  };
  const size_t k = options_.top_k > 0 ? std::min<size_t>(options_.top_k, candidates_.size())
                                      : candidates_.size();
  std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), likelier);
  candidates_.resize(k);

  weights_.clear();
  const float largest = candidates_.front().logit;
  float total = 0;
  for (const Candidate& c : candidates_) {
    // The largest may be infinite, and infinity less itself is not a number.
    const float below = c.logit == largest ? 0 : c.logit - largest;
    weights_.push_back(std::exp(below / options_.temperature));
    total += weights_.back();
  }

  size_t n = k;
  if (options_.top_p < 1) {
    float mass = 0;
    for (n = 0; n < k && mass < options_.top_p * total; ++n) mass += weights_[n];
  }
  while (n > 1 && weights_[n - 1] < options_.min_p) --n;
  candidates_.resize(std::max<size_t>(n, 1));
  weights_.resize(candidates_.size());
}

int32_t Sampler::draw() {
  double total = 0;
  for (float w : weights_) total += w;
  // 53 random bits: the same everywhere, unlike std::uniform_real_distribution.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  size_t last = 0;  // with a chance, should rounding leave something over
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] > 0) last = i;
    left -= weights_[i];
    if (left < 0) break;
  }
  return candidates_[last].token;
}

}  // namespace h2o

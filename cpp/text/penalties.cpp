#include "text/penalties.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "text/logit_row.h"

namespace h2o {

Penalties::Penalties(SamplerOptions options, int32_t n_vocab)
    : options_(std::move(options)), counts_(n_vocab), repetitions_(options_.dry_penalty_last_n) {
  std::ranges::sort(options_.logit_bias, {}, &LogitBias::token);
}

void Penalties::accept(std::span<const int32_t> tokens) {
  const bool penalizes = options_.penalizes();
  if (!penalizes && !options_.uses_dry()) return;
  for (const int32_t token : tokens) {
    require(token >= 0 && token < std::ssize(counts_), "token ", token,
            " is not in the vocabulary of ", counts_.size());
  }
  // Allocates everything first, for the strong exception guarantee.
  if (options_.uses_dry()) repetitions_.reserve(tokens.size());
  const size_t most = options_.repeat_last_n < 0 ? counts_.size() : options_.repeat_last_n;
  const size_t n = penalizes ? std::min(recent_.size() + tokens.size(), most) : 0;
  if (n > recent_.capacity()) recent_.reserve(std::max(n, 2 * recent_.capacity()));
  if (penalizes) {
    for (const int32_t token : tokens) remember(token);
  }
  if (options_.uses_dry()) repetitions_.accept(tokens);
}

void Penalties::remember(int32_t token) {
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

bool Penalties::are_off() const {
  return !options_.penalizes() && !options_.uses_dry() && options_.logit_bias.empty();
}

bool Penalties::may_raise() const {
  const auto raises = [](const LogitBias& b) { return b.bias > 0; };
  return options_.repeat_penalty < 1 || options_.frequency_penalty < 0 ||
         options_.presence_penalty < 0 || std::ranges::any_of(options_.logit_bias, raises);
}

float Penalties::bias(size_t token) const {
  const auto id = static_cast<int32_t>(token);
  const auto found = std::ranges::lower_bound(options_.logit_bias, id, {}, &LogitBias::token);
  return found != options_.logit_bias.end() && found->token == id ? found->bias : 0;
}

// Keskar et al., arXiv 1909.05858, section 4.1, and OpenAI's penalties, as in llama.cpp.
float Penalties::penalized(size_t token, float logit) const {
  logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
  if (options_.frequency_penalty != 0 || options_.presence_penalty != 0) {
    logit -= static_cast<float>(counts_[token]) * options_.frequency_penalty;
    logit -= options_.presence_penalty;
  }
  return number(logit);  // penalties of many occurrences may be infinite
}

float Penalties::dry_penalty(int32_t length) const {
  const float growth =
      std::pow(options_.dry_base, static_cast<float>(length - options_.dry_allowed_length));
  return std::min(options_.dry_multiplier * growth, std::numeric_limits<float>::max());
}

void Penalties::apply(LogitRow& row, std::span<const float> logits,
                      std::span<const uint32_t> allowed) {
  for (const auto& [token, bias] : options_.logit_bias) {
    row[token] = number(row[token] + bias);  // infinity - infinity is NaN
  }
  // A token may be here several times: computed from the original logit, it is penalized once.
  const auto penalize = [&](size_t token) {
    if (!is_allowed(allowed, token)) return;
    float logit = number(logits[token]);
    if (!options_.logit_bias.empty()) logit = number(logit + bias(token));
    row[token] = penalized(token, logit);
  };
  if (recent_.size() <= counts_.size()) {
    for (const int32_t token : recent_) penalize(token);
  } else {
    for (size_t token = 0; token < counts_.size(); ++token) {
      if (counts_[token] != 0) penalize(token);
    }
  }
  if (!options_.uses_dry()) return;
  for (const auto& [token, length] : repetitions_.find(options_.dry_allowed_length, breakers_)) {
    row[token] -= dry_penalty(length);
  }
}

size_t Penalties::apply(std::span<Candidate> some) {
  for (Candidate& c : some) {
    if (!options_.logit_bias.empty()) c.logit += bias(c.token);
    if (counts_[c.token] != 0) c.logit = penalized(c.token, c.logit);
  }
  const size_t n = recent_.size() + options_.logit_bias.size();
  if (!options_.uses_dry()) return n;
  const auto repetitions = repetitions_.find(options_.dry_allowed_length, breakers_);
  for (const auto& [token, length] : repetitions) {
    const auto found = std::ranges::find(some, token, &Candidate::token);
    if (found != some.end()) found->logit -= dry_penalty(length);
  }
  return n + repetitions.size();
}

}  // namespace h2o

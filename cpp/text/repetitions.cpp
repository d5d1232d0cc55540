#include "text/repetitions.h"

#include <algorithm>

namespace h2o {

void Repetitions::reserve(size_t n_tokens) {
  size_t n = tokens_.size() + n_tokens;
  if (max_tokens_ >= 0) n = std::min(n, 2 * static_cast<size_t>(max_tokens_) + 1);
  if (n > tokens_.capacity()) tokens_.reserve(std::max(n, 2 * tokens_.capacity()));
}

// Drops the old tokens once they are as many as the recent ones.
void Repetitions::accept(std::span<const int32_t> tokens) noexcept {
  const size_t max_tokens = max_tokens_ < 0 ? SIZE_MAX / 2 : static_cast<size_t>(max_tokens_);
  if (tokens.size() > max_tokens) tokens = tokens.last(max_tokens);
  if (tokens_.size() + tokens.size() > 2 * max_tokens) {
    const size_t kept = max_tokens - tokens.size();
    tokens_.erase(tokens_.begin(),
                  tokens_.end() - static_cast<std::ptrdiff_t>(std::min(kept, tokens_.size())));
  }
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

std::span<const Repetitions::Found> Repetitions::find(int32_t min_length,
                                                      std::span<const uint8_t> breakers) {
  found_.clear();
  const auto n = static_cast<int32_t>(
      max_tokens_ < 0 ? tokens_.size()
                      : std::min(tokens_.size(), static_cast<size_t>(max_tokens_)));
  const auto back = [end = tokens_.end()](int32_t i) { return end[-1 - i]; };  // i tokens ago
  int32_t longest = n;
  for (int32_t i = 0; i < n && !breakers.empty(); ++i) {
    if (breakers[back(i)] == 0) continue;
    longest = i;
    break;
  }
  if (longest < min_length) return found_;
  // lengths_[k]: how many tokens before the one k tokens ago match those before the next token.
  // This is the Z function of the reversed tokens; inside a match [begin, end) with the last tokens
  // it can be reused.
  lengths_.assign(static_cast<size_t>(n), 0);
  int32_t begin = 0;
  int32_t end = 0;
  for (int32_t k = 1; k < n; ++k) {
    int32_t length = k < end ? std::min(end - k, lengths_[k - begin]) : 0;
    while (k + length < n && back(length) == back(k + length)) ++length;
    lengths_[k] = length;
    if (k + length > end) {
      begin = k;
      end = k + length;
    }
  }
  for (int32_t k = 1; k < n; ++k) {
    const int32_t length = std::min(lengths_[k], longest);
    if (length >= min_length) found_.push_back({back(k - 1), length});
  }
  std::ranges::sort(found_, [](const Found& a, const Found& b) {
    return a.token < b.token || (a.token == b.token && a.length > b.length);
  });
  const auto same = [](const Found& a, const Found& b) { return a.token == b.token; };
  found_.erase(std::unique(found_.begin(), found_.end(), same), found_.end());
  return found_;
}

}  // namespace h2o

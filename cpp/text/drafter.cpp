#include "text/drafter.h"

#include <algorithm>
#include <bit>

namespace h2o {
namespace {

// Older observations count less: this much per observation.
constexpr double kForget = 0.98;

// The promised gain from which tokens are proposed: estimates have errors.
constexpr double kLeastGain = 1.05;

}  // namespace

std::span<const int32_t> LookupDrafter::propose(std::span<const int32_t> tokens,
                                                const DraftStep& step) {
  learn(tokens);
  look_up(tokens, step.most);
  return std::span(draft_).first(best_length(step));
}

LookupDrafter::Rate& LookupDrafter::rate(int64_t match) {
  const auto i = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(match)) - 1);
  return rates_[std::min(i, rates_.size() - 1)];
}

// Compares the last draft with what followed.
void LookupDrafter::learn(std::span<const int32_t> tokens) {
  const int64_t n = std::min(std::ssize(draft_), std::ssize(tokens) - n_seen_);
  for (int64_t i = 0; i < n; ++i) {
    const bool is_right = draft_[i] == tokens[n_seen_ + i];
    Rate& rate = this->rate(match_ + i);
    rate = {rate.right * kForget + is_right, rate.all * kForget + 1};
    if (!is_right) break;
  }
}

void LookupDrafter::look_up(std::span<const int32_t> tokens, int32_t most) {
  const int64_t n = std::ssize(tokens);
  const int64_t begin = std::max<int64_t>(0, n - kSearched);
  int64_t after = -1;  // the occurrence
  match_ = 0;
  n_seen_ = n;
  draft_.clear();
  for (int64_t end = n - 1; end > begin && match_ < kLongest; --end) {
    int64_t length = 0;
    while (length < kLongest && end - length > begin &&
           tokens[end - 1 - length] == tokens[n - 1 - length]) {
      ++length;
    }
    if (length > match_) {
      match_ = length;
      after = end;
    }
  }
  for (int64_t i = after; after >= 0 && i < after + most; ++i) {  // may repeat the draft itself
    draft_.push_back(i < n ? tokens[i] : draft_[i - n]);
  }
}

int32_t LookupDrafter::best_length(const DraftStep& step) {
  int32_t best = 0;
  double best_gain = kLeastGain;
  const double without = 1 + step.n_others;  // tokens of the step
  double expected = without;
  double all_right = 1;
  for (int32_t i = 0; i < std::ssize(draft_); ++i) {
    const Rate& rate = this->rate(match_ + i);
    all_right *= rate.right / rate.all;
    expected += all_right;
    const double gain = expected / without * step.times[0] / step.times[i + 1];
    if (gain > best_gain) {
      best_gain = gain;
      best = i + 1;
    }
  }
  return best;
}

}  // namespace h2o

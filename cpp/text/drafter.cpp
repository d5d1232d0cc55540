#include "text/drafter.h"

#include <algorithm>
#include <bit>

namespace h2o {
namespace {

// The promised gain from which tokens are proposed: estimates have errors.
constexpr double kLeastGain = 1.05;

}  // namespace

int32_t best_draft_length(const DraftStep& step, std::span<const double> right,
                          const ProposalCost& cost) {
  int32_t best = 0;
  double best_gain = kLeastGain;
  const double without = 1 + step.n_others;  // tokens of the step
  double expected = without;
  double all_right = 1;
  for (int32_t n = 1; n <= std::ssize(right); ++n) {
    all_right *= right[n - 1];
    expected += all_right;
    const double proposed = n * cost.draft + (expected - step.n_others) * cost.token;
    const double gain = expected / without * step.times[0] / (step.times[n] + proposed);
    if (gain > best_gain) {
      best_gain = gain;
      best = n;
    }
  }
  return best;
}

std::span<const int32_t> LookupDrafter::propose(std::span<const int32_t> tokens,
                                                const DraftStep& step) {
  count_guesses(
      draft_, tokens.subspan(std::min(n_seen_, tokens.size())),
      [this](size_t i, bool is_right) { rate(match_ + static_cast<int64_t>(i)).add(is_right); });
  look_up(tokens, step.most);
  std::vector<double> right;
  for (int32_t i = 0; i < std::ssize(draft_); ++i) right.push_back(rate(match_ + i).share());
  return std::span(draft_).first(best_draft_length(step, right));
}

GuessRate& LookupDrafter::rate(int64_t match) {
  const auto i = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(match)) - 1);
  return rates_[std::min(i, rates_.size() - 1)];
}

void LookupDrafter::look_up(std::span<const int32_t> tokens, int32_t most) {
  const int64_t n = std::ssize(tokens);
  const int64_t begin = std::max<int64_t>(0, n - kSearched);
  int64_t after = -1;  // the occurrence
  match_ = 0;
  n_seen_ = tokens.size();
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

}  // namespace h2o

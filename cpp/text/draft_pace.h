// DraftPace: how many tokens a drafter proposes for a text, and when it pauses because proposals do
// not pay.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "text/drafter.h"

namespace h2o {

// There are proposals as long as they promise a gain. After a pause some are tried anyway, while
// their guesses are right, because the text may have become easier.
class DraftPace {
 public:
  // usual: how often guesses are right in other texts.
  explicit DraftPace(GuessRate usual) : rate_(usual.lightened()) {}

  void count(bool is_right) {
    rate_.add(is_right);
    if (!is_right) n_tries_ = 0;
  }

  // Is called once per step. False: a pause.
  bool is_due() { return --pause_ < 0; }

  // The number of tokens to propose; 0 begins a pause.
  int32_t choose(const DraftStep& step, int32_t most, const ProposalCost& cost) {
    const std::vector<double> right(most, rate_.share());
    int32_t n = best_draft_length(step, right, cost);
    if (n == 0 && n_tries_ > 0) n = std::min(kTriedDrafts, most);
    if (n == 0) {
      rest();
      return 0;
    }
    verification_ = step.times[n] / step.times[0] - 1;
    return n;
  }

  // Notes the time, in durations of a step without drafts, of what a proposal needed first, or of a
  // proposal.
  void note_preparation(double steps) {
    if (n_proposals_ == 0) preparation_ += steps;
  }
  void note_proposal(double steps) {
    proposal_ = steps;
    --n_tries_;
    if (++n_proposals_ == kPayingProposals) pause_length_ = kFirstPause;
  }

 private:
  // Steps without proposals after proposals did not pay; each time twice as many.
  static constexpr int32_t kFirstPause = 32;
  static constexpr int32_t kLongestPause = 1024;

  // A try takes this share of the time between tries, or more if it is longer than 51 steps.
  static constexpr double kTriedShare = 0.05;

  static constexpr int32_t kMostTries = 4;    // proposals
  static constexpr int32_t kTriedDrafts = 4;  // in each

  // Proposals in succession that show that they pay again.
  static constexpr int32_t kPayingProposals = 16;

  void rest() {
    const double tried = preparation_ + proposal_ + verification_;
    const auto least = std::min<double>(tried / kTriedShare, kLongestPause);
    pause_ = std::max(pause_length_, static_cast<int32_t>(least));
    pause_length_ = std::min(2 * pause_length_, kLongestPause);
    rate_ = rate_.lightened();
    n_tries_ = kMostTries;
    n_proposals_ = 0;
    preparation_ = 0;
  }

  GuessRate rate_;
  int32_t pause_ = 0;
  int32_t pause_length_ = kFirstPause;
  int32_t n_tries_ = 0;      // that are left
  int32_t n_proposals_ = 0;  // since the last pause
  // Times of a try, in durations of a step without drafts.
  double preparation_ = 0, proposal_ = 0, verification_ = 0;
};

}  // namespace h2o

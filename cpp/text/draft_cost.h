// DraftCost: the measured times of steps with drafts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

// Approaches the median of some times, because those of a busy machine have no useful mean.
class TypicalTime {
 public:
  explicit TypicalTime(int32_t n_ignored = 0) : n_ignored_(n_ignored) {}  // of the first times

  double median() const { return median_; }  // 0: none yet
  void add(double seconds) {
    if (n_ignored_-- > 0) return;
    n_ignored_ = 0;
    median_ = median_ == 0 ? seconds : toward(seconds, median_);
  }

  static double toward(double now, double median, double stride = 1.05) {
    return now > median ? median * stride : median / stride;
  }

 private:
  double median_ = 0;
  int32_t n_ignored_;
};

// Times decide only how many drafts there are, so texts do not depend on them.
class DraftCost {
 public:
  explicit DraftCost(int32_t max_drafts) : shares_(max_drafts + 1) { scale(1); }

  // [max_drafts + 1]: the time of a step with n drafts, divided by that of one without.
  std::span<const double> shares() const { return shares_; }

  // The time of a step without drafts; 0: not known.
  double seconds() const { return step_.median(); }

  // Adds a step that took `seconds` and had this many drafts, or none.
  void add(int32_t n_drafts, double seconds) {
    if (n_drafts == 0) {
      const double before = step_.median();
      step_.add(seconds);
      // Drafts take as long as they took, though steps without them do not.
      if (stride_ < kFirstStride) scale_ *= before / step_.median();
      scale(std::min(scale_, scale_ + (1 - scale_) * kReturn));  // tries again after a while
    } else if (step_.median() > 0) {
      const double factor = (seconds / step_.median() - 1) / typical(n_drafts);
      scale(std::max(kLeast, TypicalTime::toward(factor, scale_, stride_)));
      stride_ = std::max(kLeastStride, 1 + (stride_ - 1) * kSettle);
    }
  }

 private:
  static constexpr double kLeast = 0.01;
  static constexpr double kReturn = 0.002;  // per step without drafts
  static constexpr double kFirstStride = 2, kLeastStride = 1.05, kSettle = 0.8;

  // The share that n drafts add to a step of a small model on Zen 4: the first costs most.
  static double typical(int32_t n) { return n == 0 ? 0 : 0.4 + 0.22 * n; }

  void scale(double factor) {
    scale_ = factor;
    for (int32_t n = 0; n < std::ssize(shares_); ++n) shares_[n] = 1 + scale_ * typical(n);
  }

  TypicalTime step_;
  double scale_ = 1;
  double stride_ = kFirstStride;  // large at first, when little is known
  std::vector<double> shares_;
};

}  // namespace h2o

// DraftCost: the measured times of steps with drafts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace h2o {

// Times decide only how many drafts there are, so texts do not depend on them.
class DraftCost {
 public:
  explicit DraftCost(int32_t max_drafts) : shares_(max_drafts + 1) { scale(1); }

  // [max_drafts + 1]: the time of a step with n drafts, divided by that of one without.
  std::span<const double> shares() const { return shares_; }

  // Adds a step that took `seconds` and had this many drafts, or none.
  void add(int32_t n_drafts, double seconds) {
    if (n_drafts == 0) {
      step_ = step_ == 0 ? seconds : toward(seconds, step_);
      scale(scale_ + (1 - scale_) * kReturn);  // tries again after a while
    } else if (step_ > 0) {
      scale(std::max(kLeast, toward((seconds / step_ - 1) / typical(n_drafts), scale_)));
    }
  }

 private:
  static constexpr double kStride = 1.05;
  static constexpr double kLeast = 0.01;
  static constexpr double kReturn = 0.002;  // per step without drafts

  // The share that n drafts add to a step of a small model on Zen 4: the first costs most.
  static double typical(int32_t n) { return n == 0 ? 0 : 0.4 + 0.22 * n; }

  // Approaches the median, because the times of a busy machine have no useful mean.
  static double toward(double now, double median) {
    return now > median ? median * kStride : median / kStride;
  }

  void scale(double factor) {
    scale_ = factor;
    for (int32_t n = 0; n < std::ssize(shares_); ++n) shares_[n] = 1 + scale_ * typical(n);
  }

  double step_ = 0;
  double scale_ = 1;
  std::vector<double> shares_;
};

}  // namespace h2o

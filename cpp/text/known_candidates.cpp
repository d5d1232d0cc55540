#include "text/known_candidates.h"

#include <algorithm>
#include <cmath>

#include "text/token_weights.h"

namespace h2o {
namespace {

// Sums of weights of at least this size are exact in any order: in double, multiples of 2^-45, the
// last place of the smallest, are exact below 2^8.
constexpr float kMinWeight = 0x1p-22f;
static_assert(LargestLogits::kMax <= 1 << 8);

// The error bounds of LargestLogits::rest and of the approximate masses of BucketedDraw.
constexpr double kRestError = 0x1p-12;
constexpr double kMassError = 0x1p-18;

}  // namespace

KnownCandidates::KnownCandidates(const LargestLogits& largest, Penalties& penalties,
                                 std::span<Candidate> room)
    : largest_(largest), room_(room) {
  const auto begin = room_.begin();
  const std::span known = std::span(largest.logits).first(largest.n);
  std::ranges::transform(known, begin, [](const LargestLogits::Logit& logit) {
    return Candidate{logit.token, logit.value, 0};
  });
  n_changed_ = penalties.apply(room_.first(known.size()));
  const auto is_impossible = [](const Candidate& c) { return !(c.logit > -kInfinity); };
  const auto end = std::remove_if(begin, begin + largest.n, is_impossible);
  std::sort(begin, end, likelier);
  n_ = n_certain_ = static_cast<size_t>(end - begin);
  are_all_ = largest.n < LargestLogits::kMax || size_t(largest.n) == penalties.n_vocab();
  if (are_all_) return;
  const Candidate last{known.back().token, known.back().value, 0};
  const auto is_certain = [&](const Candidate& c) { return !likelier(last, c); };
  n_certain_ = static_cast<size_t>(std::partition_point(begin, end, is_certain) - begin);
}

std::optional<size_t> KnownCandidates::count_largest(size_t k) const {
  if (n_certain_ < k && !are_all_) return {};
  return std::min(n_certain_, k);
}

std::optional<size_t> KnownCandidates::count_nucleus(float temperature, float top_p, float min_p) {
  const TokenWeights weight_of{first().logit, temperature};
  double mass = 0;  // of the known tokens
  for (Candidate& c : room_.first(n_)) {
    c.weight = weight_of(c.logit);
    mass += c.weight;
  }
  size_t n = 0;
  while (n < n_certain_ && room_[n].weight >= min_p) ++n;
  const bool ends = are_all_ || n < n_certain_;  // min-p keeps no others
  if (top_p < 1) {
    // `rest` is relative to the unpenalized largest logit, which may have been lowered since.
    const auto relative = [&](float logit) {
      return std::exp((static_cast<double>(logit) - weight_of.largest) / temperature);
    };
    const double rest = are_all_ ? 0 : largest_.rest * relative(largest_.logits[0].value);
    const double lowered =
        static_cast<double>(n_changed_) * relative(largest_.logits[largest_.n - 1].value);
    const double least = mass + std::max(0.0, rest * (1 - kRestError) - lowered);
    const double most = mass + rest * (1 + kRestError);
    const double enough = top_p * least * (1 - kMassError);
    const double surely_enough = top_p * most * (1 + kMassError);
    double kept = 0;
    size_t i = 0;
    while (i < n && kept < enough) kept += room_[i++].weight;
    const bool is_last = i == n && ends;
    if (!is_last && !(kept >= surely_enough)) return {};
    n = std::max<size_t>(1, i);
  } else if (!ends) {
    return {};
  }
  if (room_[n - 1].weight < kMinWeight) return {};
  return n;
}

}  // namespace h2o

#include "text/candidates.h"

#include <algorithm>
#include <cmath>

namespace h2o {
namespace {

constexpr size_t kFew = 64;     // sort at most this many directly
constexpr size_t kMany = 1024;  // enough for most limits

// The number of candidates, in the order of `before`, whose masses reach a limit (all if they do
// not). They are moved to the front; only a few are sorted.
template <typename Before, typename Mass, typename Reached>
size_t select(std::span<Candidate> all, Before before, Mass mass_of, Reached reached) {
  double mass = 0;
  size_t from = 0;
  size_t to = all.size();
  while (to - from > kFew) {
    const size_t half = (to - from) / 2;
    const size_t middle = from == 0 ? std::min(half, kMany) : from + half;
    std::nth_element(all.begin() + static_cast<std::ptrdiff_t>(from),
                     all.begin() + static_cast<std::ptrdiff_t>(middle),
                     all.begin() + static_cast<std::ptrdiff_t>(to), before);
    double with = mass;
    for (size_t i = from; i < middle; ++i) with += mass_of(all[i]);
    if (reached(with)) {
      to = middle;
    } else {
      mass = with;
      from = middle;
    }
  }
  std::sort(all.begin() + static_cast<std::ptrdiff_t>(from),
            all.begin() + static_cast<std::ptrdiff_t>(to), before);
  for (size_t i = from; i < to; ++i) {
    mass += mass_of(all[i]);
    if (reached(mass)) return i;
  }
  return to - 1;
}

double weight_of(const Candidate& c) { return c.weight; }

}  // namespace

void Candidates::weigh() {
  if (weighed_) return;
  float largest = all_[0].logit;
  for (size_t i = 1; i < n_; ++i) largest = std::max(largest, all_[i].logit);
  for (size_t i = 0; i < n_; ++i) all_[i].weight = std::exp(all_[i].logit - largest);
  weighed_ = true;
}

double Candidates::total() {
  weigh();
  double sum = 0;
  for (size_t i = 0; i < n_; ++i) sum += all_[i].weight;
  return sum;
}

// The result is in nats.
double Candidates::entropy() {
  const double sum = total();
  double mean = 0;  // of the log weights
  for (size_t i = 0; i < n_; ++i) {
    const double weight = all_[i].weight;
    if (weight > 0) mean += weight * std::log(weight);
  }
  return std::log(sum) - mean / sum;
}

void Candidates::sort_first(size_t n) {
  n = std::min(n, n_);
  if (n <= n_sorted_) return;
  const auto begin = all_.begin();
  const auto sorted = begin + static_cast<std::ptrdiff_t>(n_sorted_);
  const auto limit = begin + static_cast<std::ptrdiff_t>(n);
  const auto end = begin + static_cast<std::ptrdiff_t>(n_);
  if (limit != end) std::nth_element(sorted, limit, end, likelier);
  std::sort(sorted, limit, likelier);
  n_sorted_ = n;
}

void Candidates::keep_first(size_t n) {
  n_ = n;
  n_sorted_ = std::min(n_sorted_, n);
}

// If candidates are sorted, `drop` must not drop one before one that it keeps.
template <typename Drop>
void Candidates::drop_if(Drop drop) {
  const auto begin = all_.begin();
  const auto end = std::remove_if(begin, begin + static_cast<std::ptrdiff_t>(n_), drop);
  keep_first(static_cast<size_t>(end - begin));
}

void Candidates::scale(float temperature) {
  const float largest = std::ranges::max(all_.first(n_), {}, &Candidate::logit).logit;
  for (size_t i = 0; i < n_; ++i) all_[i].logit = (all_[i].logit - largest) / temperature;
  weighed_ = false;
}

void Candidates::scale_by_entropy(float min, float max, float exponent) {
  if (n_ == 1) return;
  const double normal = entropy() / std::log(static_cast<double>(n_));
  const double share = std::pow(std::clamp(normal, 0.0, 1.0), static_cast<double>(exponent));
  const auto temperature = static_cast<float>(min + (max - min) * share);
  if (temperature > 0) {
    scale(temperature);
  } else {
    keep_largest(1);
  }
}

void Candidates::keep_largest(size_t k) {
  if (k >= n_) return;
  if (k > n_sorted_) {
    const auto begin = all_.begin();
    std::nth_element(begin + static_cast<std::ptrdiff_t>(n_sorted_),
                     begin + static_cast<std::ptrdiff_t>(k - 1),
                     begin + static_cast<std::ptrdiff_t>(n_), likelier);
  }
  keep_first(k);
}

void Candidates::keep_probable(float p) {
  const double enough = p * total();
  const auto reached = [enough](double mass) { return mass >= enough; };
  n_ = 1 + select(all_.first(n_), likelier, weight_of, reached);
  n_sorted_ = 0;
}

void Candidates::keep_relative(float ratio) {
  weigh();
  drop_if([ratio](const Candidate& c) { return c.weight < ratio; });
}

void Candidates::keep_sigma(float n) {
  double mean = 0;
  float largest = all_[0].logit;
  for (size_t i = 0; i < n_; ++i) {
    mean += all_[i].logit;
    largest = std::max(largest, all_[i].logit);
  }
  mean /= static_cast<double>(n_);
  double variance = 0;
  for (size_t i = 0; i < n_; ++i) variance += (all_[i].logit - mean) * (all_[i].logit - mean);
  const double limit = largest - n * std::sqrt(variance / static_cast<double>(n_));
  drop_if([limit](const Candidate& c) { return c.logit < limit; });
}

// Meister et al., arXiv 2202.00666.
void Candidates::keep_typical(float p) {
  const double sum = total();
  const double mean = entropy();
  const double enough = p * sum;
  // The weight temporarily holds the distance from the mean; it is recomputed for those kept.
  for (size_t i = 0; i < n_; ++i) {
    const double surprise = std::log(sum) - std::log(static_cast<double>(all_[i].weight));
    all_[i].weight = static_cast<float>(std::abs(surprise - mean));
  }
  const float largest = std::ranges::max(all_.first(n_), {}, &Candidate::logit).logit;
  const auto more_typical = [](const Candidate& a, const Candidate& b) {
    return a.weight < b.weight || (a.weight == b.weight && likelier(a, b));
  };
  const auto mass_of = [largest](const Candidate& c) { return std::exp(c.logit - largest); };
  const auto reached = [enough](double mass) { return mass > enough; };
  n_ = 1 + select(all_.first(n_), more_typical, mass_of, reached);
  n_sorted_ = 0;
  weighed_ = false;
}

void Candidates::drop_top(float threshold) {
  const double min_weight = threshold * total();
  const auto is_top = [min_weight](const Candidate& c) { return c.weight >= min_weight; };
  const Candidate* last = nullptr;
  size_t n_top = 0;
  for (const Candidate& c : all_.first(n_)) {
    if (!is_top(c)) continue;
    if (n_top++ == 0 || likelier(*last, c)) last = &c;
  }
  if (n_top < 2) return;
  const int32_t kept = last->token;
  n_sorted_ = 0;
  drop_if([&](const Candidate& c) { return is_top(c) && c.token != kept; });
  weighed_ = false;
}

void Candidates::keep_surprise(double max_bits) {
  const double min_weight = std::exp2(-max_bits) * total();
  sort_first(1);
  const int32_t first = all_[0].token;
  drop_if([=](const Candidate& c) { return c.weight < min_weight && c.token != first; });
}

size_t Candidates::zipf_count(double bits, size_t n_vocab) {
  constexpr size_t kRanks = 100;  // used to estimate the exponent
  sort_first(kRanks);
  weigh();
  double products = 0;
  double squares = 0;
  for (size_t i = 0; i + 1 < std::min(n_, kRanks); ++i) {
    if (all_[i + 1].weight == 0) break;
    const double t = std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
    products += t * std::log(static_cast<double>(all_[i].weight) / all_[i + 1].weight);
    squares += t * t;
  }
  if (products == 0) return n_;  // all are equally likely
  const double exponent = products / squares;
  const double epsilon = exponent - 1;
  const double k =
      std::pow(epsilon * std::exp2(bits) / (1 - std::pow(static_cast<double>(n_vocab), -epsilon)),
               1 / exponent);
  if (!(k < static_cast<double>(n_))) return n_;  // also handles an exponent of 1
  return std::max<size_t>(1, static_cast<size_t>(k));
}

int32_t Candidates::draw(double u, double* surprise) {
  const double sum = total();
  const double limit = u * sum;
  const auto reached = [limit](double mass) { return mass > limit; };
  size_t last = select(all_.first(n_), likelier, weight_of, reached);
  n_sorted_ = 0;
  while (last > 0 && all_[last].weight == 0) --last;  // rounding may leave a remainder
  if (surprise != nullptr) *surprise = std::log2(sum / all_[last].weight);
  return all_[last].token;
}

}  // namespace h2o

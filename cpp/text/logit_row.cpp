#include "text/logit_row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace h2o {

void LogitRow::resize(size_t n) {
  const size_t n_peaks = (n + kBlock - 1) / kBlock;
  if (logits_.size() < n_peaks * kBlock) {
    peaks_.resize(n_peaks);
    largest_peaks_.resize(n_peaks);
    logits_.resize(n_peaks * kBlock);  // last, because the test above looks only at its size
  }
  n_ = n;
  n_peaks_ = n_peaks;
}

void LogitRow::read(std::span<const float> logits, std::span<const uint32_t> allowed) {
  const size_t whole = n_ / kBlock * kBlock;
  const float* const __restrict in = logits.data();
  for (size_t at = 0; at < whole; at += kBlock) {
    const uint32_t mask = allowed.empty() ? ~0u : allowed[at / kBlock];
    float* const __restrict out = &logits_[at];
    if (mask == ~0u) {
      for (size_t i = 0; i < kBlock; ++i) out[i] = number(in[at + i]);
    } else {
      std::fill_n(out, kBlock, -kInfinity);
      for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int i = std::countr_zero(left);
        out[i] = number(in[at + i]);
      }
    }
  }
  for (size_t i = whole; i < n_; ++i) {
    logits_[i] = is_allowed(allowed, i) ? number(in[i]) : -kInfinity;
  }
  std::fill_n(logits_.begin() + n_, n_peaks_ * kBlock - n_, -kInfinity);
}

void LogitRow::find_peaks() {
  for (size_t block = 0; block < n_peaks_; ++block) {
    const float* const logits = &logits_[block * kBlock];
    float lanes[kBlock / 2];
    for (size_t i = 0; i < kBlock / 2; ++i) {
      lanes[i] = std::max(logits[i], logits[i + kBlock / 2]);
    }
    for (size_t i = 0; i < 8; ++i) lanes[i] = std::max(lanes[i], lanes[i + 8]);
    for (size_t i = 0; i < 4; ++i) lanes[i] = std::max(lanes[i], lanes[i + 4]);
    peaks_[block] = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
  }
  largest_ = std::ranges::max(std::span(peaks_).first(n_peaks_));
}

float LogitRow::smallest_finite() const {
  constexpr size_t kLanes = 16;  // independent, for vectorization
  float smallest[kLanes];
  std::fill_n(smallest, kLanes, kInfinity);
  const std::span<const float> logits = blocks();
  for (size_t at = 0; at < logits.size(); at += kLanes) {
    for (size_t i = 0; i < kLanes; ++i) {
      const float finite = logits[at + i] > -kInfinity ? logits[at + i] : kInfinity;
      smallest[i] = finite < smallest[i] ? finite : smallest[i];
    }
  }
  return *std::min_element(smallest, smallest + kLanes);
}

int32_t LogitRow::argmax() const {
  size_t at = (std::ranges::find(peaks_, largest_) - peaks_.begin()) * kBlock;
  while (logits_[at] != largest_) ++at;
  return static_cast<int32_t>(at);
}

// A lower bound of the k largest logits: the k-th largest of a subset of block maxima.
float LogitRow::bar_below(size_t k) {
  const size_t n = std::min(n_peaks_, 8 * k);
  if (k > n) return -kInfinity;
  const auto end = std::copy_n(peaks_.begin(), n, largest_peaks_.begin());
  const auto kth = largest_peaks_.begin() + (k - 1);
  std::nth_element(largest_peaks_.begin(), kth, end, std::greater());
  return std::nextafter(*kth, -kInfinity);
}

size_t LogitRow::gather_largest(size_t k, std::span<Candidate> room) {
  // The candidates of one more block always fit.
  const size_t full = std::min(std::max<size_t>(4 * k, 256), n_peaks_ * kBlock);
  const auto begin = room.begin();
  size_t n = 0;
  size_t n_read = 0;
  const auto read_logits = [&] {
    for (; n_read < n; ++n_read) room[n_read].logit = logits_[room[n_read].token];
  };
  const auto keep_largest = [&] {
    read_logits();
    std::nth_element(begin, begin + (k - 1), begin + n, likelier);
    n = n_read = k;
  };
  float bar = bar_below(k);
  for (size_t block = 0; block < n_peaks_; ++block) {
    if (!(peaks_[block] > bar)) continue;
    const size_t at = block * kBlock;
    for (size_t i = at; i < at + kBlock; ++i) {
      room[n].token = static_cast<int32_t>(i);
      n += logits_[i] > bar ? 1 : 0;  // a branch would often be mispredicted
    }
    if (n < full || n <= k) continue;
    keep_largest();
    bar = room[k - 1].logit;  // of equal logits the first are kept
  }
  if (n > k) keep_largest();
  read_logits();
  return n;
}

size_t LogitRow::gather_finite(std::span<Candidate> room) const {
  size_t n = 0;
  for (size_t i = 0; i < n_; ++i) {
    room[n] = {static_cast<int32_t>(i), logits_[i], 0};
    n += std::isfinite(logits_[i]) ? 1 : 0;
  }
  return n;
}

}  // namespace h2o

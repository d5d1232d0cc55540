// LogitRow: the logits of one row, which a sampler may change, with the largest logit of each
// block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "text/candidates.h"

namespace h2o {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// NaN becomes -infinity.
inline float number(float logit) { return logit == logit ? logit : -kInfinity; }

// Is the bit of a token set in a mask? Every token is in an empty one.
inline bool is_allowed(std::span<const uint32_t> allowed, size_t token) {
  return allowed.empty() || (allowed[token / 32] >> (token % 32) & 1) != 0;
}

class LogitRow {
 public:
  // Loops over the vocabulary use fixed-size blocks, which compilers vectorize even at -O2. A block
  // corresponds to one word of the mask of allowed tokens.
  static constexpr size_t kBlock = 32;

  // Sets the number of logits, whose values are undefined then. Allocates only for more logits than
  // ever before.
  void resize(size_t n);

  size_t size() const { return n_; }

  // Copies logits [size()], with -infinity for NaN and for tokens that are not in the mask.
  void read(std::span<const float> logits, std::span<const uint32_t> allowed);

  // Writing requires find_peaks() afterwards.
  float& operator[](size_t token) { return logits_[token]; }
  float operator[](size_t token) const { return logits_[token]; }

  // All logits, padded to whole blocks with -infinity.
  std::span<const float> blocks() const { return {logits_.data(), n_peaks_ * kBlock}; }

  // Finds the largest logit of each block, which the following functions need.
  void find_peaks();

  float largest() const { return largest_; }
  float smallest_finite() const;

  // The first token with the largest logit.
  int32_t argmax() const;

  // Copies the k largest finite logits, unsorted, to the front of `room`, which needs a block more
  // than there are logits; returns their number.
  size_t gather_largest(size_t k, std::span<Candidate> room);

  // Copies all finite logits to the front of `room`, which needs one more; returns their number.
  size_t gather_finite(std::span<Candidate> room) const;

 private:
  float bar_below(size_t k);

  size_t n_ = 0;
  size_t n_peaks_ = 0;
  float largest_ = 0;
  std::vector<float> logits_;
  std::vector<float> peaks_;  // the largest logit of each block
  std::vector<float> largest_peaks_;
};

}  // namespace h2o

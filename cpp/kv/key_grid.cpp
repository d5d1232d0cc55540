#include "kv/key_grid.h"

#include <bit>

#include "core/e5m3.h"

namespace h2o {
namespace {

constexpr float kLargestCode = 7;

float to_float(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// The largest BF16 that is not above x.
BF16 rounded_down(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t away = x < 0 ? 0xffff : 0;
  return {static_cast<uint16_t>((bits + away) >> 16)};
}

}  // namespace

void KeyGrid::fit(const float* smallest, const float* largest) const {
  for (int64_t i = 0; i < head_dim_; ++i) {
    lowest_[i] = rounded_down(smallest[i]);
    steps_[i] = rounded_up((largest[i] - to_float(lowest_[i])) / kLargestCode);
  }
}

void KeyGrid::to_codes(const float* key, float* codes) const {
  for (int64_t i = 0; i < head_dim_; ++i) {
    codes[i] = (key[i] - to_float(lowest_[i])) / to_float(steps_[i]);
  }
}

void KeyGrid::scale(const float* queries, int64_t n_queries, float* scaled, float* shifts) const {
  constexpr int64_t kSums = 16;  // that are independent; head_dim is a multiple of a block
  for (int64_t q = 0; q < n_queries; ++q, queries += head_dim_, scaled += head_dim_) {
    float sums[kSums] = {};
    for (int64_t first = 0; first < head_dim_; first += kSums) {
      for (int64_t j = 0; j < kSums; ++j) {
        const int64_t i = first + j;
        scaled[i] = queries[i] * to_float(steps_[i]);
        sums[j] += queries[i] * to_float(lowest_[i]);
      }
    }
    shifts[q] = 0;
    for (const float sum : sums) shifts[q] += sum;
  }
}

void KeyGrid::bounds(float* bounds) const {
  for (int64_t i = 0; i < head_dim_; ++i) {
    const float lowest = to_float(lowest_[i]);
    bounds[i] = lowest + kLargestCode * to_float(steps_[i]);
    bounds[head_dim_ + i] = lowest;
  }
}

}  // namespace h2o

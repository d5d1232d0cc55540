#include "kv/key_grid.h"

namespace h2o {

void KeyGrid::fit(const float* smallest, const float* largest) const {
  for (int64_t i = 0; i < head_dim_; ++i) fit(i, smallest[i], largest[i]);
}

void KeyGrid::to_codes(const float* key, float* codes) const {
  for (int64_t i = 0; i < head_dim_; ++i) codes[i] = code(i, key[i]);
}

void KeyGrid::scale(const float* queries, int64_t n_queries, float* scaled, float* shifts) const {
  constexpr int64_t kSums = 16;  // that are independent; head_dim is a multiple of a block
  for (int64_t q = 0; q < n_queries; ++q, queries += head_dim_, scaled += head_dim_) {
    float sums[kSums] = {};
    for (int64_t first = 0; first < head_dim_; first += kSums) {
      for (int64_t j = 0; j < kSums; ++j) {
        const int64_t i = first + j;
        scaled[i] = queries[i] * step(i);
        sums[j] += queries[i] * lowest(i);
      }
    }
    shifts[q] = 0;
    for (const float sum : sums) shifts[q] += sum;
  }
}

void KeyGrid::bounds(float* bounds) const {
  for (int64_t i = 0; i < head_dim_; ++i) {
    bounds[i] = highest(i);
    bounds[head_dim_ + i] = lowest(i);
  }
}

}  // namespace h2o

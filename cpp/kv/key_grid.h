// KeyGrid: what the codes of a page's keys in q3 mean.
//
// Keys vary between dimensions more than between tokens, so that each dimension of a page has a
// range of its own (KIVI, arXiv 2402.02750): key = lowest + step * code, with codes 0 to 7.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"

namespace h2o {

class KeyGrid {
 public:
  // `memory`: bytes(head_dim)
  KeyGrid(std::byte* memory, int64_t head_dim)
      : lowest_(reinterpret_cast<BF16*>(memory)),
        steps_(reinterpret_cast<E5M3*>(memory + 2 * head_dim)),
        head_dim_(head_dim) {}

  static int64_t bytes(int64_t head_dim) { return 3 * head_dim; }

  // For keys from smallest [head_dim] to largest [head_dim].
  void fit(const float* smallest, const float* largest) const;

  // codes[i] = (key[i] - lowest) / step, not rounded.
  void to_codes(const float* key, float* codes) const;

  // scaled[q, i] = queries[q, i] * step, and shifts[q], so that q.k = scaled.codes + shifts[q].
  void scale(const float* queries, int64_t n_queries, float* scaled, float* shifts) const;

  // bounds [2, head_dim]: the largest, then the smallest key that it has.
  void bounds(float* bounds) const;

 private:
  BF16* lowest_;  // [head_dim]
  E5M3* steps_;   // [head_dim]
  int64_t head_dim_;
};

}  // namespace h2o

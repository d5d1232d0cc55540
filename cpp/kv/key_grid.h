// KeyGrid: what the codes of a page's keys in q3 mean. Shared by host and device code.
//
// Keys vary between dimensions more than between tokens, so that each dimension of a page has a
// range of its own (KIVI, arXiv 2402.02750): key = lowest + step * code, with codes 0 to 7.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "core/e5m3.h"
#include "core/host_device.h"

namespace h2o {

class KeyGrid {
 public:
  // `memory`: bytes(head_dim)
  H2O_HD KeyGrid(std::byte* memory, int64_t head_dim)
      : lowest_(reinterpret_cast<BF16*>(memory)),
        steps_(reinterpret_cast<E5M3*>(memory + 2 * head_dim)),
        head_dim_(head_dim) {}

  static int64_t bytes(int64_t head_dim) { return 3 * head_dim; }

  // The smallest and the largest key in dimension i, and the difference of adjacent codes.
  H2O_HD float lowest(int64_t i) const { return from_bits(uint32_t{lowest_[i].bits} << 16); }
  H2O_HD float highest(int64_t i) const { return lowest(i) + kLargestCode * step(i); }
  H2O_HD float step(int64_t i) const { return to_float(steps_[i]); }

  // Fits keys from `smallest` to `largest` in dimension i.
  H2O_HD void fit(int64_t i, float smallest, float largest) const {
    uint32_t bits;  // of the largest BF16 that is not above `smallest`
    __builtin_memcpy(&bits, &smallest, sizeof(bits));
    lowest_[i].bits = static_cast<uint16_t>((bits + (smallest < 0 ? 0xffff : 0)) >> 16);
    steps_[i] = rounded_up((largest - lowest(i)) / kLargestCode);
  }

  // (key - lowest) / step, not rounded
  H2O_HD float code(int64_t i, float key) const { return (key - lowest(i)) / step(i); }

  // The same for all dimensions.
  void fit(const float* smallest, const float* largest) const;
  void to_codes(const float* key, float* codes) const;

  // scaled[q, i] = queries[q, i] * step, and shifts[q], so that q.k = scaled.codes + shifts[q].
  void scale(const float* queries, int64_t n_queries, float* scaled, float* shifts) const;

  // bounds [2, head_dim]: the highest, then the lowest keys.
  void bounds(float* bounds) const;

 private:
  static constexpr float kLargestCode = 7;

  H2O_HD static float from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }

  BF16* lowest_;  // [head_dim]
  E5M3* steps_;   // [head_dim]
  int64_t head_dim_;
};

}  // namespace h2o

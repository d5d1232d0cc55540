// The largest logits of a row, which are copied from a device instead of the whole row.
#pragma once

#include <cstdint>

namespace h2o {

struct LargestLogits {
  static constexpr int32_t kMax = 256;

  struct Logit {
    int32_t token;
    float value;
  };

  // Number of valid entries. If it is less than kMax, all other logits are -infinity or NaN. -1:
  // not computed, because too many logits are equal or nearly equal.
  int32_t n;
  // The sum of exp((logit - largest) / temperature) over all other logits, to a relative error of
  // 2^-13. Undefined if the temperature is 0.
  float rest;
  Logit logits[kMax];  // largest first; ties: the lower token first
};

}  // namespace h2o

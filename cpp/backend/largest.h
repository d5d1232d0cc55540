// The largest logits of a row: what is copied from a device instead of the row.
#pragma once

#include <cstdint>

namespace h2o {

struct LargestLogits {
  static constexpr int32_t kMost = 256;

  struct Logit {
    int32_t token;
    float value;
  };

  // How many there are. Fewer than kMost: the others are -infinity or NaN. -1: they have not been
  // found, as too many logits are equal or nearly so.
  int32_t n;
  // The sum of exp((logit - largest) / temperature) over the others, to a relative error of 2^-13.
  // Without a temperature it is not known.
  float rest;
  Logit logits[kMost];  // the largest first, of equals the lower token
};

}  // namespace h2o

// The numbers that a cache's type can store.
#pragma once

#include <cfloat>

#include "core/dtype.h"
#include "kv/policy.h"

namespace h2o {

// The largest number in a row; scales of blocks are f16 too.
H2O_HD inline float most_stored(DType dtype) {
  constexpr float kHalf = 65504;
  switch (dtype) {
    case DType::f16:
      return kHalf;
    case DType::q8_0:
      return 127 * kHalf;
    case DType::q5_0:
      return 16 * kHalf;
    case DType::q4_0:
      return 8 * kHalf;
    default:
      return FLT_MAX;
  }
}

// Moves x into [-most, most] and returns whether it was outside. It would be stored as infinity,
// and make NaN of all that attend to it. Infinity and NaN stay as they are.
H2O_HD inline bool clamp_to(float most, float& x) {
  const float size = x < 0 ? -x : x;
  if (!(size > most && size <= FLT_MAX)) return false;
  x = x < 0 ? -most : most;
  return true;
}

}  // namespace h2o

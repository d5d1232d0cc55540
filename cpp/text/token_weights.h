// TokenWeights: how likely tokens are, relative to the most likely one.
#pragma once

#include <bit>
#include <cstdint>

namespace h2o {

// exp(x) for kMinPower <= x <= 0 to a few ulp, and exactly 1 for 0: x = n ln 2 + r with
// |r| <= ln 2 / 2, then a Taylor series. No branches or tables, so that it vectorizes; the bits are
// the same everywhere, unlike those of std::exp.
constexpr float kMinPower = -87;
inline float fast_exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, in the lowest bits
  const float shifted = x * 0x1.715476p+0f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts; n times the first is exact
  const float r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
  float y = 1.0f / 5040;
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r * r + r + 1;
  return y * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
}

struct TokenWeights {
  float largest;      // logit
  float temperature;  // above 0

  float operator()(float logit) const {
    const float x = (logit - largest) / temperature;
    return x > kMinPower ? fast_exp(x) : 0;
  }
};

}  // namespace h2o

// Q3_K and Q6_K: 16 groups of 16, x = unit * scale * level; the scale has 6 bits or is a signed
// byte, the level is -4..3 or -32..31.
#include "quantize/scale_search.h"

namespace h2o {
namespace {

struct Q3_K {
  static constexpr int kGroups = 16, kLowestScale = -32, kHighestScale = 31;
  static constexpr float kLargestScale = 26.0f, kLowest = -4.0f, kFrom = 0.7f, kTo = 1.35f;
  static float level(float x) { return nearest_level(x, {kLowest, 3.0f}); }
};

struct Q6_K {
  static constexpr int kGroups = 16, kLowestScale = -128, kHighestScale = 127;
  static constexpr float kLargestScale = 105.0f, kLowest = -32.0f, kFrom = 0.9f, kTo = 1.15f;
  static float level(float x) { return nearest_level(x, {kLowest, 31.0f}); }
};

}  // namespace

// third bits [32], low bits [64], scales [12], unit
bool quantize_q3_k(uint8_t* out, const float* x, const float* importance) {
  const auto block = ScaleSearch<Q3_K>::search(x, importance);
  if (!std::isfinite(block.unit.value)) return false;
  uint8_t* third = out;
  uint8_t* low = third + kSuperBlock / 8;
  uint8_t* scales = low + kSuperBlock / 4;
  std::memset(out, 0, 108);
  for (int e = 0; e < kSuperBlock; ++e) {
    const int bits = block.level(x, e) + 4;
    low[32 * (e / 128) + e % 32] |= static_cast<uint8_t>((bits & 3) << 2 * (e % 128 / 32));
    third[e % 32] |= static_cast<uint8_t>(bits >> 2 << e / 32);
  }
  for (int g = 0; g < Q3_K::kGroups; ++g) {
    const int scale = block.choices[g].scale + 32;
    scales[g % 8] |= static_cast<uint8_t>((scale & 15) << 4 * (g / 8));
    scales[8 + g % 4] |= static_cast<uint8_t>(scale >> 4 << 2 * (g / 4));
  }
  store(scales + 12, block.unit);
  return true;
}

// low bits [128], high bits [64], scales [16], unit
bool quantize_q6_k(uint8_t* out, const float* x, const float* importance) {
  const auto block = ScaleSearch<Q6_K>::search(x, importance);
  if (!std::isfinite(block.unit.value)) return false;
  uint8_t* low = out;
  uint8_t* high = low + kSuperBlock / 2;
  uint8_t* scales = high + kSuperBlock / 4;
  std::memset(out, 0, static_cast<size_t>(scales - out));
  for (int e = 0; e < kSuperBlock; ++e) {
    const int bits = block.level(x, e) + 32;
    // Four weights, 32 apart, share a byte of high bits; two, 64 apart, share one of low bits.
    const int half = e / 128, quarter = e % 128 / 32, byte = e % 32;
    low[64 * half + 32 * (quarter % 2) + byte] |=
        static_cast<uint8_t>((bits & 15) << 4 * (quarter / 2));
    high[32 * half + byte] |= static_cast<uint8_t>(bits >> 4 << 2 * quarter);
  }
  for (int g = 0; g < Q6_K::kGroups; ++g) {
    scales[g] = static_cast<uint8_t>(block.choices[g].scale);
  }
  store(scales + Q6_K::kGroups, block.unit);
  return true;
}

}  // namespace h2o

// IQ4_XS: 8 groups of 32, x = unit * scale * value, with 6-bit scales and one of 16 values; and
// IQ4_NL, blocks of 32 with a unit only.
#include "core/blocks.h"
#include "quantize/scale_search.h"

namespace h2o {
namespace {

// The index of the value nearest to each integer from -128 to 127.
constexpr std::array<uint8_t, 256> kNearest = [] {
  std::array<uint8_t, 256> nearest{};
  for (int x = -128; x < 128; ++x) {
    int best = 0;
    for (int i = 1; i < 16; ++i) {
      const int is = x - kIq4Values[i], was = x - kIq4Values[best];
      if (is * is < was * was) best = i;
    }
    nearest[x + 128] = static_cast<uint8_t>(best);
  }
  return nearest;
}();

int index_of(float x) {
  return kNearest[static_cast<int>(nearest_level(x, {-128.0f, 127.0f})) + 128];
}

struct IQ4_XS {
  static constexpr int kGroups = 8, kLowestScale = -32, kHighestScale = 31;
  static constexpr float kLargestScale = 27.0f, kLowest = -127.0f, kFrom = 0.75f, kTo = 1.3f;
  static float level(float x) { return kIq4Values[index_of(x)]; }
};

}  // namespace

// unit, high bits of the scales [2], low bits [4], indices [128]
bool quantize_iq4_xs(uint8_t* out, const float* x, const float* importance) {
  const auto block = ScaleSearch<IQ4_XS>::search(x, importance);
  if (!std::isfinite(block.unit.value)) return false;
  std::memset(out, 0, sizeof(BlockIQ4_XS));
  store(out, block.unit);
  for (int g = 0; g < IQ4_XS::kGroups; ++g) {
    const int scale = block.choices[g].scale + 32;
    out[2 + g / 4] |= static_cast<uint8_t>(scale >> 4 << 2 * (g % 4));
    out[4 + g / 2] |= static_cast<uint8_t>((scale & 15) << 4 * (g % 2));
    for (int i = 0; i < 32; ++i) {
      const int index = index_of(static_cast<float>(block.level(x, 32 * g + i)));
      out[8 + 16 * g + i % 16] |= static_cast<uint8_t>(index << 4 * (i / 16));
    }
  }
  return true;
}

// unit, indices [16]
bool quantize_iq4_nl(uint8_t* out, const float* x, const float* importance) {
  constexpr int kSize = 32, kTries = 40;
  float largest = 0.0f, squares = 0.0f;
  for (int i = 0; i < kSize; ++i) {
    largest = std::max(largest, std::abs(x[i]));
    squares += importance[i] * x[i] * x[i];
  }
  Half best;
  float least = squares;
  const auto consider = [&](Half unit) {
    const float inverse = 1.0f / unit.value;
    const LevelSums sums = sum_levels<kSize>(
        x, importance, [=](float value) { return IQ4_XS::level(value * inverse); });
    const float error = squares - unit.value * (2.0f * sums.qx - unit.value * sums.qq);
    if (error < least) {
      least = error;
      best = unit;
    }
    return sums;
  };
  for (int i = 0; i < kTries && largest > 0.0f; ++i) {
    // Maps the largest weight to a value between 95 and 173, of either sign.
    const Half unit = unit_of(largest / (95.0f + 2.0f * static_cast<float>(i)));
    if (!std::isfinite(unit.value)) return false;
    for (const float sign : {1.0f, -1.0f}) {
      const LevelSums sums = consider(to_half(sign * unit.value));
      const Half fitted = sums.qq > 0.0f ? to_half(sums.qx / sums.qq) : Half{};
      if (std::isfinite(fitted.value) && fitted.value != 0.0f) consider(fitted);
    }
  }
  std::memset(out, 0, sizeof(BlockIQ4_NL));
  store(out, best);
  for (int i = 0; i < kSize; ++i) {
    const int index = index_of(best.value == 0.0f ? 0.0f : x[i] * (1.0f / best.value));
    out[2 + i % 16] |= static_cast<uint8_t>(index << 4 * (i / 16));
  }
  return true;
}

}  // namespace h2o

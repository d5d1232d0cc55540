// Q6_K: 16 groups of 16, x = unit * scale * level, the scale a signed byte, the level -32..31.
#include "quantize/k_search.h"

namespace h2o {
namespace {

constexpr int kGroups = 16, kGroupSize = 16;
constexpr LevelRange kLevels{-32.0f, 31.0f};
// The scale that the largest group begins with. Not 127: the search needs room above it.
constexpr float kLargestScale = 105.0f;
// Scales tried, as multiples of the one that gives the largest weight a level of 32.
constexpr float kFrom = 0.9f, kTo = 1.15f;

struct Choice {
  float error = kInfinity;
  int scale = 0;
  LevelSums sums;
};

struct Group {
  const float* x = nullptr;
  float largest = 0.0f, squares = 0.0f;

  Group() = default;
  explicit Group(const float* weights) : x(weights) {
    for (int i = 0; i < kGroupSize; ++i) {
      largest = std::max(largest, std::abs(x[i]));
      squares += x[i] * x[i];
    }
  }

  void consider(Choice& best, float unit, int scale) const {
    if (scale < -128 || scale > 127) return;
    const float step = unit * static_cast<float>(scale);
    const LevelSums sums =
        step == 0.0f ? LevelSums{} : sum_levels<kGroupSize>(x, 1.0f / step, 0.0f, kLevels);
    const float error = squares - step * (2.0f * sums.qx - step * sums.qq);
    if (error < best.error) best = {error, scale, sums};
  }

  // Both signs: there is one more level below zero than above.
  Choice search(float unit) const {
    const float scale = unit > 0.0f ? largest / (-kLevels.lowest * unit) : 0.0f;
    const int from = static_cast<int>(std::min(scale * kFrom, 127.0f));
    const int to = static_cast<int>(std::min(scale * kTo, 127.0f)) + 1;
    Choice best;
    for (int s = from; s <= to; ++s) {
      consider(best, unit, s);
      consider(best, unit, -s);
    }
    return best;
  }

  Choice refine(const Choice& choice, float unit) const {
    Choice best;
    for (int s = choice.scale - 1; s <= choice.scale + 1; ++s) consider(best, unit, s);
    return best;
  }
};

struct Block {
  Half unit;
  std::array<Choice, kGroups> choices;
  float error = kInfinity;
};

// The unit that minimises the squared error for these scales and levels.
Half refit(const Block& block) {
  double uu = 0.0, ux = 0.0;  // u = scale * level
  for (const Choice& c : block.choices) {
    uu += static_cast<double>(c.scale) * c.scale * c.sums.qq;
    ux += static_cast<double>(c.scale) * c.sums.qx;
  }
  return uu > 0.0 && ux > 0.0 ? to_half(static_cast<float>(ux / uu)) : Half{};
}

Block search(const std::array<Group, kGroups>& groups, Half unit) {
  Block best;
  Block block{unit, {}, 0.0f};
  for (int round = 0; round <= kRefits; ++round) {
    block.error = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      Choice& choice = block.choices[g];
      choice = round == 0 ? groups[g].search(block.unit.value)
                          : groups[g].refine(choice, block.unit.value);
      block.error += choice.error;
    }
    if (block.error < best.error) best = block;
    const Half next = refit(block);
    if (!std::isfinite(next.value) || next.bits == block.unit.bits) break;
    block.unit = next;
  }
  return best;
}

// low bits [128], high bits [64], scales [16], unit
void pack(uint8_t* out, const std::array<Group, kGroups>& groups, const Block& block) {
  uint8_t* low = out;
  uint8_t* high = out + kSuperBlock / 2;
  uint8_t* scales = high + kSuperBlock / 4;
  std::memset(out, 0, static_cast<size_t>(scales - out));
  for (int g = 0; g < kGroups; ++g) {
    const int scale = block.choices[g].scale;
    const float step = block.unit.value * static_cast<float>(scale);
    for (int i = 0; i < kGroupSize; ++i) {
      const float level =
          step == 0.0f ? 0.0f : level_of(groups[g].x[i], 1.0f / step, 0.0f, kLevels);
      const int bits = static_cast<int>(level - kLevels.lowest);
      // Four weights, 32 apart, share a byte of high bits; two, 64 apart, one of low bits.
      const int element = g * kGroupSize + i;
      const int half = element / 128, quarter = element % 128 / 32, byte = element % 32;
      low[64 * half + 32 * (quarter % 2) + byte] |=
          static_cast<uint8_t>((bits & 15) << 4 * (quarter / 2));
      high[32 * half + byte] |= static_cast<uint8_t>(bits >> 4 << 2 * quarter);
    }
    scales[g] = static_cast<uint8_t>(scale);
  }
  store(scales + kGroups, block.unit);
}

}  // namespace

bool quantize_q6_k(uint8_t* out, const float* x) {
  std::array<Group, kGroups> groups;
  float largest = 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    groups[g] = Group(x + kGroupSize * g);
    largest = std::max(largest, groups[g].largest);
  }
  const Half unit = unit_of(largest / (-kLevels.lowest * kLargestScale));
  if (!std::isfinite(unit.value)) return false;
  pack(out, groups, search(groups, unit));
  return true;
}

}  // namespace h2o

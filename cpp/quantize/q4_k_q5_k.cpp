// Q4_K and Q5_K: 8 groups of 32, x = units.scale * scale * level - units.min * min, the scale and
// the min of 6 bits, the level of 4 or 5.
#include "quantize/k_search.h"

namespace h2o {
namespace {

constexpr int kGroups = 8, kGroupSize = 32, kMaxInteger = 63;
// The integers that the largest scale and min begin with: the search needs room above them.
constexpr float kLargestScale = 58.0f, kLargestMin = 60.0f;
// Scales tried, as multiples of the one that spreads the levels over all weights.
constexpr float kFrom = 0.9f, kTo = 1.1f;
// Mins tried, in parts of a step from the one that gives the lowest weight level 0.
constexpr int kParts = 6, kPartsBelow = 4, kPartsAbove = 1;

struct Units {
  Half scale, min;

  bool operator==(const Units& other) const {
    return scale.bits == other.scale.bits && min.bits == other.min.bits;
  }
};

struct Choice {
  float error = kInfinity;
  int scale = 0, min = 0;
  LevelSums sums;  // of z
};

// x in units, as far as there are integers for it.
float in_units(float x, Half unit) {
  return unit.value > 0.0f ? std::clamp(x / unit.value, 0.0f, float{kMaxInteger}) : 0.0f;
}

struct Group {
  std::array<float, kGroupSize> z = {};  // x - low: sums of its squares lose less to rounding
  float low = 0.0f, range = 0.0f;        // low <= 0, as the format can only subtract
  float sum = 0.0f, squares = 0.0f;      // of z
  LevelRange levels;

  Group() = default;
  Group(const float* x, float max_level) : levels{0.0f, max_level} {
    const auto [least, greatest] = std::minmax_element(x, x + kGroupSize);
    low = std::min(*least, 0.0f);
    range = *greatest - low;
    for (int i = 0; i < kGroupSize; ++i) {
      z[i] = x[i] - low;
      sum += z[i];
      squares += z[i] * z[i];
    }
  }

  void consider(Choice& best, const Units& units, int scale, int min) const {
    if (scale < 0 || scale > kMaxInteger || min < 0 || min > kMaxInteger) return;
    // z = step * level - offset
    const float step = units.scale.value * static_cast<float>(scale);
    const float offset = units.min.value * static_cast<float>(min) + low;
    const float inverse = 1.0f / step;
    const LevelSums sums =
        step == 0.0f ? LevelSums{}
                     : sum_levels<kGroupSize>(z.data(), inverse, offset * inverse, levels);
    const float error = squares + offset * (2.0f * sum + kGroupSize * offset) -
                        step * (2.0f * (sums.qx + offset * sums.q) - step * sums.qq);
    if (error < best.error) best = {error, scale, min, sums};
  }

  Choice search(const Units& units) const {
    Choice best;
    // All weights alike: the mean.
    const float mean = low + sum / kGroupSize;
    consider(best, units, 0, static_cast<int>(std::lround(in_units(-mean, units.min))));

    const float scale = in_units(range / levels.highest, units.scale);
    const float min = in_units(-low, units.min);
    for (int s = static_cast<int>(scale * kFrom); s <= static_cast<int>(scale * kTo) + 1; ++s) {
      const float step = units.scale.value * static_cast<float>(s);
      const float part = std::max(in_units(step / kParts, units.min), 1.0f);
      for (int i = -kPartsBelow; i <= kPartsAbove; ++i) {
        consider(best, units, s, static_cast<int>(std::lround(min + static_cast<float>(i) * part)));
      }
    }
    return best;
  }

  Choice refine(const Choice& choice, const Units& units) const {
    Choice best;
    for (int s = choice.scale - 1; s <= choice.scale + 1; ++s) {
      for (int m = choice.min - 1; m <= choice.min + 1; ++m) consider(best, units, s, m);
    }
    return best;
  }
};

struct Block {
  Units units;
  std::array<Choice, kGroups> choices;
  float error = kInfinity;
};

// The units that minimise the squared error for these integers and levels, neither of them
// negative: a and b of x = a * u - b * v, where u = scale * level and v = min.
Units refit(const std::array<Group, kGroups>& groups, const Block& block) {
  double uu = 0.0, uv = 0.0, vv = 0.0, ux = 0.0, vx = 0.0;
  for (int g = 0; g < kGroups; ++g) {
    const Group& group = groups[g];
    const Choice& c = block.choices[g];
    const double scale = c.scale, min = c.min, low = group.low;
    uu += scale * scale * c.sums.qq;
    uv += scale * min * c.sums.q;
    vv += kGroupSize * min * min;
    ux += scale * (c.sums.qx + low * c.sums.q);
    vx += min * (group.sum + kGroupSize * low);
  }
  const auto units = [](double a, double b) {
    return Units{to_half(static_cast<float>(a)), to_half(static_cast<float>(b))};
  };
  const double determinant = uu * vv - uv * uv;
  if (determinant > 1e-9 * uu * vv) {
    const double a = (ux * vv - uv * vx) / determinant;
    const double b = (uv * ux - uu * vx) / determinant;
    if (a >= 0.0 && b >= 0.0) return units(a, b);
  }
  if (ux > 0.0) return units(ux / uu, 0.0);
  return vx < 0.0 ? units(0.0, -vx / vv) : Units{};
}

Block search(const std::array<Group, kGroups>& groups, const Units& units) {
  Block best;
  Block block{units, {}, 0.0f};
  for (int round = 0; round <= kRefits; ++round) {
    block.error = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      Choice& choice = block.choices[g];
      choice = round == 0 ? groups[g].search(block.units) : groups[g].refine(choice, block.units);
      block.error += choice.error;
    }
    if (block.error < best.error) best = block;
    const Units next = refit(groups, block);
    if (!std::isfinite(next.scale.value + next.min.value) || next == block.units) break;
    block.units = next;
  }
  return best;
}

// Two integers of 6 bits for each group, in 12 bytes: the later groups' are in parts.
void pack_integers(uint8_t* out, const Block& block) {
  for (int g = 0; g < kGroups / 2; ++g) {
    const Choice& early = block.choices[g];
    const Choice& late = block.choices[g + kGroups / 2];
    out[g] = static_cast<uint8_t>(early.scale | late.scale >> 4 << 6);
    out[g + 4] = static_cast<uint8_t>(early.min | late.min >> 4 << 6);
    out[g + 8] = static_cast<uint8_t>((late.scale & 15) | (late.min & 15) << 4);
  }
}

// units, integers [12], of 5 bits the fifth ones [32], low bits [128]
template <int n_bits>
void pack(uint8_t* out, const std::array<Group, kGroups>& groups, const Block& block) {
  store(out, block.units.scale);
  store(out + 2, block.units.min);
  pack_integers(out + 4, block);
  uint8_t* fifth = out + 16;
  uint8_t* low = n_bits == 5 ? fifth + kGroupSize : fifth;
  std::memset(fifth, 0, static_cast<size_t>(low + kSuperBlock / 2 - fifth));
  for (int g = 0; g < kGroups; ++g) {
    const Group& group = groups[g];
    const float step = block.units.scale.value * static_cast<float>(block.choices[g].scale);
    if (step == 0.0f) continue;
    const float offset =
        block.units.min.value * static_cast<float>(block.choices[g].min) + group.low;
    const float inverse = 1.0f / step;
    for (int i = 0; i < kGroupSize; ++i) {
      const int level =
          static_cast<int>(level_of(group.z[i], inverse, offset * inverse, group.levels));
      low[kGroupSize * (g / 2) + i] |= static_cast<uint8_t>((level & 15) << 4 * (g % 2));
      if constexpr (n_bits == 5) fifth[i] |= static_cast<uint8_t>(level >> 4 << g);
    }
  }
}

template <int n_bits>
bool quantize(uint8_t* out, const float* x) {
  constexpr float kMaxLevel = (1 << n_bits) - 1;
  std::array<Group, kGroups> groups;
  float range = 0.0f, lowest = 0.0f;
  for (int g = 0; g < kGroups; ++g) {
    groups[g] = Group(x + kGroupSize * g, kMaxLevel);
    range = std::max(range, groups[g].range);
    lowest = std::min(lowest, groups[g].low);
  }
  // A min is of use for shifting the levels, even where no weight is negative.
  const float step = range / kMaxLevel;
  const Units units{unit_of(step / kLargestScale), unit_of(std::max(-lowest, step) / kLargestMin)};
  if (!std::isfinite(units.scale.value) || !std::isfinite(units.min.value)) return false;
  pack<n_bits>(out, groups, search(groups, units));
  return true;
}

}  // namespace

bool quantize_q4_k(uint8_t* out, const float* x) { return quantize<4>(out, x); }
bool quantize_q5_k(uint8_t* out, const float* x) { return quantize<5>(out, x); }

}  // namespace h2o

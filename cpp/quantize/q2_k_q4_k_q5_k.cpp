// Q4_K and Q5_K: 8 groups of 32, x = units.scale * scale * level - units.min * min, with 6-bit
// scales and mins and levels of 4 or 5 bits. Q2_K: 16 groups of 16, with 4-bit scales and mins and
// 2-bit levels.
#include "quantize/k_search.h"

namespace h2o {
namespace {

// The initial integers of the largest scale and min leave space above them. kFrom to kTo: scales
// tried, as multiples of the one that spreads the levels over all weights.
struct SixBits {
  static constexpr int kGroups = 8, kMaxInteger = 63;
  static constexpr float kLargestScale = 58.0f, kLargestMin = 60.0f, kFrom = 0.9f, kTo = 1.1f;
};
struct FourBits {
  static constexpr int kGroups = 16, kMaxInteger = 15;
  static constexpr float kLargestScale = 14.0f, kLargestMin = 14.0f, kFrom = 0.6f, kTo = 1.15f;
};

// Mins tried, in fractions of a step from the one that gives the lowest weight level 0.
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

template <class Format>
struct Group {
  static constexpr int kGroupSize = kSuperBlock / Format::kGroups;
  static constexpr int kMaxInteger = Format::kMaxInteger;

  std::array<float, kGroupSize> z = {};        // x - low: its squares lose less precision
  float low = 0.0f, range = 0.0f;              // low <= 0, because the format can only subtract
  const float* w = nullptr;                    // weight of each error
  float n = 0.0f, sum = 0.0f, squares = 0.0f;  // weighted sums of 1, z and z^2
  LevelRange levels;

  Group() = default;
  Group(const float* x, const float* importance, float max_level)
      : w(importance), levels{0.0f, max_level} {
    const auto [least, greatest] = std::minmax_element(x, x + kGroupSize);
    low = std::min(*least, 0.0f);
    range = *greatest - low;
    for (int i = 0; i < kGroupSize; ++i) {
      z[i] = x[i] - low;
      n += w[i];
      sum += w[i] * z[i];
      squares += w[i] * (z[i] * z[i]);
    }
  }

  // x in units, clamped to the range of the integers.
  static float in_units(float x, Half unit) {
    return unit.value > 0.0f ? std::clamp(x / unit.value, 0.0f, float{kMaxInteger}) : 0.0f;
  }

  // The level of an element, where z = step * level - offset.
  static float level_of(float z, float inverse, float offset, LevelRange levels) {
    return nearest_level(z * inverse + offset, levels);
  }

  void consider(Choice& best, const Units& units, int scale, int min) const {
    if (scale < 0 || scale > kMaxInteger || min < 0 || min > kMaxInteger) return;
    // z = step * level - offset
    const float step = units.scale.value * static_cast<float>(scale);
    const float offset = units.min.value * static_cast<float>(min) + low;
    const float inverse = 1.0f / step;
    const LevelSums sums =
        step == 0.0f ? LevelSums{} : sum_levels<kGroupSize>(z.data(), w, [=, this](float value) {
          return level_of(value, inverse, offset * inverse, levels);
        });
    const float error = squares + offset * (2.0f * sum + n * offset) -
                        step * (2.0f * (sums.qx + offset * sums.q) - step * sums.qq);
    if (error < best.error) best = {error, scale, min, sums};
  }

  Choice search(const Units& units) const {
    Choice best;
    // All weights are equal: the mean.
    const float mean = low + sum / n;
    consider(best, units, 0, static_cast<int>(std::lround(in_units(-mean, units.min))));

    const float scale = in_units(range / levels.highest, units.scale);
    const float min = in_units(-low, units.min);
    for (int s = static_cast<int>(scale * Format::kFrom);
         s <= static_cast<int>(scale * Format::kTo) + 1; ++s) {
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

template <class Format>
using Groups = std::array<Group<Format>, Format::kGroups>;

template <class Format>
struct Block {
  Units units;
  std::array<Choice, Format::kGroups> choices;
  float error = kInfinity;
};

// The units that minimize the squared error for these integers and levels, both non-negative: a and
// b of x = a * u - b * v, where u = scale * level and v = min.
template <class Format>
Units refit(const Groups<Format>& groups, const Block<Format>& block) {
  double uu = 0.0, uv = 0.0, vv = 0.0, ux = 0.0, vx = 0.0;
  for (int g = 0; g < Format::kGroups; ++g) {
    const Group<Format>& group = groups[g];
    const Choice& c = block.choices[g];
    const double scale = c.scale, min = c.min, low = group.low;
    uu += scale * scale * c.sums.qq;
    uv += scale * min * c.sums.q;
    vv += group.n * min * min;
    ux += scale * (c.sums.qx + low * c.sums.q);
    vx += min * (group.sum + group.n * low);
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

template <class Format>
Block<Format> search(const Groups<Format>& groups, const Units& units) {
  Block<Format> best;
  Block<Format> block{units, {}, 0.0f};
  for (int round = 0; round <= kRefits; ++round) {
    block.error = 0.0f;
    for (int g = 0; g < Format::kGroups; ++g) {
      Choice& choice = block.choices[g];
      choice = round == 0 ? groups[g].search(block.units) : groups[g].refine(choice, block.units);
      block.error += choice.error;
    }
    if (block.error < best.error) best = block;
    const Units next = refit<Format>(groups, block);
    if (!std::isfinite(next.scale.value + next.min.value) || next == block.units) break;
    block.units = next;
  }
  return best;
}

// The level of an element of a group.
template <class Format>
int level_in(const Block<Format>& block, const Groups<Format>& groups, int g, int i) {
  const Group<Format>& group = groups[g];
  const float step = block.units.scale.value * static_cast<float>(block.choices[g].scale);
  if (step == 0.0f) return 0;
  const float offset = block.units.min.value * static_cast<float>(block.choices[g].min) + group.low;
  const float inverse = 1.0f / step;
  return static_cast<int>(group.level_of(group.z[i], inverse, offset * inverse, group.levels));
}

// Two 6-bit integers per group, in 12 bytes; those of the later groups are split.
void pack_integers(uint8_t* out, const Block<SixBits>& block) {
  constexpr int kHalf = SixBits::kGroups / 2;
  for (int g = 0; g < kHalf; ++g) {
    const Choice& early = block.choices[g];
    const Choice& late = block.choices[g + kHalf];
    out[g] = static_cast<uint8_t>(early.scale | late.scale >> 4 << 6);
    out[g + 4] = static_cast<uint8_t>(early.min | late.min >> 4 << 6);
    out[g + 8] = static_cast<uint8_t>((late.scale & 15) | (late.min & 15) << 4);
  }
}

// units, integers [12], for 5 bits the fifth bits [32], low bits [128]
template <int n_bits>
void pack(uint8_t* out, const Groups<SixBits>& groups, const Block<SixBits>& block) {
  store(out, block.units.scale);
  store(out + 2, block.units.min);
  pack_integers(out + 4, block);
  uint8_t* fifth = out + 16;
  uint8_t* low = n_bits == 5 ? fifth + 32 : fifth;
  std::memset(fifth, 0, static_cast<size_t>(low + kSuperBlock / 2 - fifth));
  for (int g = 0; g < SixBits::kGroups; ++g) {
    for (int i = 0; i < 32; ++i) {
      const int level = level_in(block, groups, g, i);
      low[32 * (g / 2) + i] |= static_cast<uint8_t>((level & 15) << 4 * (g % 2));
      if constexpr (n_bits == 5) fifth[i] |= static_cast<uint8_t>(level >> 4 << g);
    }
  }
}

// integers [16], levels [64], units
void pack_two_bits(uint8_t* out, const Groups<FourBits>& groups, const Block<FourBits>& block) {
  uint8_t* levels = out + FourBits::kGroups;
  std::memset(levels, 0, kSuperBlock / 4);
  for (int g = 0; g < FourBits::kGroups; ++g) {
    out[g] = static_cast<uint8_t>(block.choices[g].scale | block.choices[g].min << 4);
    for (int i = 0; i < 16; ++i) {
      const int e = 16 * g + i;
      levels[32 * (e / 128) + e % 32] |=
          static_cast<uint8_t>(level_in(block, groups, g, i) << 2 * (e % 128 / 32));
    }
  }
  store(levels + kSuperBlock / 4, block.units.scale);
  store(levels + kSuperBlock / 4 + 2, block.units.min);
}

template <class Format>
struct Search {
  Groups<Format> groups;
  Units units;

  Search(const float* x, const float* importance, float max_level) {
    float range = 0.0f, lowest = 0.0f;
    for (int g = 0; g < Format::kGroups; ++g) {
      const int first = Group<Format>::kGroupSize * g;
      groups[g] = Group<Format>(x + first, importance + first, max_level);
      range = std::max(range, groups[g].range);
      lowest = std::min(lowest, groups[g].low);
    }
    // A min can improve the levels even if no weight is negative.
    const float step = range / max_level;
    units = {unit_of(step / Format::kLargestScale),
             unit_of(std::max(-lowest, step) / Format::kLargestMin)};
  }

  bool fits() const { return std::isfinite(units.scale.value) && std::isfinite(units.min.value); }
  Block<Format> best() const { return search<Format>(groups, units); }
};

template <int n_bits>
bool quantize(uint8_t* out, const float* x, const float* importance) {
  const Search<SixBits> search(x, importance, (1 << n_bits) - 1);
  if (search.fits()) pack<n_bits>(out, search.groups, search.best());
  return search.fits();
}

}  // namespace

bool quantize_q2_k(uint8_t* out, const float* x, const float* importance) {
  const Search<FourBits> search(x, importance, 3.0f);
  if (search.fits()) pack_two_bits(out, search.groups, search.best());
  return search.fits();
}
bool quantize_q4_k(uint8_t* out, const float* x, const float* importance) {
  return quantize<4>(out, x, importance);
}
bool quantize_q5_k(uint8_t* out, const float* x, const float* importance) {
  return quantize<5>(out, x, importance);
}

}  // namespace h2o

// The search for blocks of 256 with one unit, x = unit * scale * level, where each group has a
// signed scale. See k_search.h.
//
// A Format defines
// - kGroups groups, and scales from kLowestScale to kHighestScale;
// - kLargestScale, where the scale of the largest group starts, to leave space above it;
// - the range of scales tried, kFrom to kTo times the one that gives the largest weight a level of
//   -kLowest;
// - level(x), the level for x.
#pragma once

#include "quantize/k_search.h"

namespace h2o {

template <class Format>
struct ScaleSearch {
  static constexpr int kGroupSize = kSuperBlock / Format::kGroups;

  struct Choice {
    float error = kInfinity;
    int scale = 0;
    LevelSums sums;
  };

  struct Group {
    const float* x = nullptr;
    const float* w = nullptr;  // weight of each error
    float largest = 0.0f, squares = 0.0f;

    Group() = default;
    Group(const float* weights, const float* importance) : x(weights), w(importance) {
      for (int i = 0; i < kGroupSize; ++i) {
        largest = std::max(largest, std::abs(x[i]));
        squares += w[i] * (x[i] * x[i]);
      }
    }

    void consider(Choice& best, float unit, int scale) const {
      if (scale < Format::kLowestScale || scale > Format::kHighestScale) return;
      const float step = unit * static_cast<float>(scale);
      const float inverse = 1.0f / step;
      const LevelSums sums =
          step == 0.0f ? LevelSums{} : sum_levels<kGroupSize>(x, w, [=](float value) {
            return Format::level(value * inverse);
          });
      const float error = squares - step * (2.0f * sums.qx - step * sums.qq);
      if (error < best.error) best = {error, scale, sums};
    }

    // Both signs: there is one more level below zero than above.
    Choice search(float unit) const {
      constexpr auto kMax = static_cast<float>(Format::kHighestScale);
      const float scale = unit > 0.0f ? largest / (-Format::kLowest * unit) : 0.0f;
      const int from = static_cast<int>(std::min(scale * Format::kFrom, kMax));
      const int to = static_cast<int>(std::min(scale * Format::kTo, kMax)) + 1;
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
    std::array<Choice, Format::kGroups> choices;
    float error = kInfinity;

    // The level of an element, and the step of its group.
    int level(const float* x, int element) const {
      const float step = unit.value * static_cast<float>(choices[element / kGroupSize].scale);
      return step == 0.0f ? 0 : static_cast<int>(Format::level(x[element] * (1.0f / step)));
    }
  };

  // The unit that minimizes the squared error for these scales and levels.
  static Half refit(const Block& block) {
    double uu = 0.0, ux = 0.0;  // u = scale * level
    for (const Choice& c : block.choices) {
      uu += static_cast<double>(c.scale) * c.scale * c.sums.qq;
      ux += static_cast<double>(c.scale) * c.sums.qx;
    }
    return uu > 0.0 && ux > 0.0 ? to_half(static_cast<float>(ux / uu)) : Half{};
  }

  // The best block; its unit is not finite if the weights are too large.
  static Block search(const float* x, const float* importance) {
    std::array<Group, Format::kGroups> groups;
    float largest = 0.0f;
    for (int g = 0; g < Format::kGroups; ++g) {
      groups[g] = Group(x + kGroupSize * g, importance + kGroupSize * g);
      largest = std::max(largest, groups[g].largest);
    }
    Block best;
    Block block{unit_of(largest / (-Format::kLowest * Format::kLargestScale)), {}, 0.0f};
    if (!std::isfinite(block.unit.value)) return block;
    for (int round = 0; round <= kRefits; ++round) {
      block.error = 0.0f;
      for (int g = 0; g < Format::kGroups; ++g) {
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
};

}  // namespace h2o

#include "model/rope.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

namespace h2o {
namespace {

// The dimension that rotates `turns` times over the original context (YaRN, arXiv 2309.00071,
// section 3.2).
double dimension_of(const RopeConfig& rope, double turns) {
  return rope.n_rot * std::log(rope.n_ctx_orig / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(double{rope.freq_base}));
}

}  // namespace

std::vector<float> rope_frequencies(const RopeConfig& rope, const Tensor& divisors) {
  double low = 0;
  double high = 0;
  if (rope.yarn) {
    low = dimension_of(rope, rope.yarn_beta_fast);
    high = dimension_of(rope, rope.yarn_beta_slow);
    if (rope.yarn_whole) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(0.0, low);
    high = std::min(rope.n_rot - 1.0, high);
  }
  std::vector<float> frequencies(rope.n_rot / 2);
  for (int32_t i = 0; i < rope.n_rot / 2; ++i) {
    double plain = std::pow(double{rope.freq_base}, -2.0 * i / rope.n_rot);
    if (divisors) plain /= divisors.floats()[i];
    // Fast dimensions keep their frequency, slow ones are interpolated, with a ramp in between.
    double keep = 0;
    if (rope.yarn) {
      const double ramp = (i - low) / std::max(0.001, high - low);
      keep = (1 - std::clamp(ramp, 0.0, 1.0)) * rope.yarn_ext_factor;
    }
    frequencies[i] = static_cast<float>(plain * (rope.freq_scale * (1 - keep) + keep));
  }
  return frequencies;
}

std::vector<float> alibi_slopes(int32_t n_heads, float max_bias) {
  // The slopes for a power of two heads; further heads are interleaved from twice that number.
  const auto power = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(n_heads)));
  std::vector<float> slopes(n_heads);
  for (int32_t h = 0; h < n_heads; ++h) {
    const double i = h < power ? h + 1 : h - power + 0.5;
    slopes[h] = static_cast<float>(std::exp2(-double{max_bias} * i / power));
  }
  return slopes;
}

}  // namespace h2o

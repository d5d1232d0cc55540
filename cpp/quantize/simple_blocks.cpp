// The blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. The arithmetic is exactly gguf-py's, in float: a
// scale from the extremes, its reciprocal, and rounding by truncation.
#include <array>

#include "quantize/blocks.h"

namespace h2o {
namespace {

constexpr int kSize = 32;

// 0 if 1/d overflows. In that case d is 0 as f16, and so is the block.
float reciprocal(float d) {
  const float inverse = 1.0f / d;
  return std::isfinite(inverse) ? inverse : 0.0f;
}

// The value of largest magnitude (ties: the first).
float extreme(const float* x) {
  float value = x[0];
  for (int i = 1; i < kSize; ++i) {
    if (std::abs(x[i]) > std::abs(value)) value = x[i];
  }
  return value;
}

// Levels of `n_bits` bits: for 5 bits the high bits come first, then the rest as for 4, two per
// byte.
template <int n_bits>
void store_levels(uint8_t* out, const std::array<uint8_t, kSize>& levels) {
  if constexpr (n_bits == 5) {
    uint32_t high = 0;
    for (int i = 0; i < kSize; ++i) high |= uint32_t{levels[i]} >> 4 << i;
    std::memcpy(out, &high, sizeof high);
    out += sizeof high;
  }
  for (int i = 0; i < kSize / 2; ++i) {
    out[i] = static_cast<uint8_t>((levels[i] & 15) | levels[i + kSize / 2] << 4);
  }
}

// x = d * (level - number of levels / 2); the extreme value is exact.
template <int n_bits>
bool quantize_symmetric(uint8_t* out, const float* x) {
  constexpr int kZero = 1 << (n_bits - 1);
  const float d = extreme(x) / -kZero;
  const float inverse = reciprocal(d);
  // On x86-64, gguf-py's levels are 0 if its 1/d overflows.
  const float offset = inverse == 0.0f && d != 0.0f ? 0.0f : kZero + 0.5f;
  std::array<uint8_t, kSize> levels;
  for (int i = 0; i < kSize; ++i) {
    const int level = static_cast<int>(x[i] * inverse + offset);
    levels[i] = static_cast<uint8_t>(std::clamp(level, 0, 2 * kZero - 1));
  }
  const Half scale = to_half(d);
  store(out, scale);
  store_levels<n_bits>(out + 2, levels);
  return std::isfinite(scale.value);
}

// x = d * level + min
template <int n_bits>
bool quantize_from_min(uint8_t* out, const float* x) {
  constexpr int kMaxLevel = (1 << n_bits) - 1;
  const auto [low, high] = std::minmax_element(x, x + kSize);
  const float min = *low;
  const float d = (*high - min) / kMaxLevel;
  if (!std::isfinite(d)) return false;
  const float inverse = reciprocal(d);
  std::array<uint8_t, kSize> levels;
  for (int i = 0; i < kSize; ++i) {
    const int level = static_cast<int>((x[i] - min) * inverse + 0.5f);
    levels[i] = static_cast<uint8_t>(std::clamp(level, 0, kMaxLevel));
  }
  const Half scale = to_half(d);
  const Half offset = to_half(min);
  store(out, scale);
  store(out + 2, offset);
  store_levels<n_bits>(out + 4, levels);
  return std::isfinite(scale.value) && std::isfinite(offset.value);
}

}  // namespace

bool quantize_q4_0(uint8_t* out, const float* x) { return quantize_symmetric<4>(out, x); }
bool quantize_q4_1(uint8_t* out, const float* x) { return quantize_from_min<4>(out, x); }
bool quantize_q5_0(uint8_t* out, const float* x) { return quantize_symmetric<5>(out, x); }
bool quantize_q5_1(uint8_t* out, const float* x) { return quantize_from_min<5>(out, x); }

// x = d * level, a signed byte
bool quantize_q8_0(uint8_t* out, const float* x) {
  const float d = std::abs(extreme(x)) / 127;
  const float inverse = reciprocal(d);
  for (int i = 0; i < kSize; ++i) {
    // Ties round away from zero.
    const float scaled = std::abs(x[i] * inverse);
    int level = static_cast<int>(scaled);
    if (scaled - static_cast<float>(level) >= 0.5f) ++level;
    out[2 + i] = static_cast<uint8_t>(x[i] < 0.0f ? -level : level);
  }
  const Half scale = to_half(d);
  store(out, scale);
  return std::isfinite(scale.value);
}

}  // namespace h2o

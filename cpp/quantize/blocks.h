// Quantization of one block, for each type; used by quantize_rows().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace h2o {

// Each writes one block to `out` and returns whether its f16 fields are finite. x: [block size],
// finite; importance: [block size], positive: the weight of each element's squared error.
using QuantizeBlock = bool (*)(uint8_t* out, const float* x, const float* importance);

bool quantize_q4_0(uint8_t* out, const float* x);
bool quantize_q4_1(uint8_t* out, const float* x);
bool quantize_q5_0(uint8_t* out, const float* x);
bool quantize_q5_1(uint8_t* out, const float* x);
bool quantize_q8_0(uint8_t* out, const float* x);
bool quantize_q2_k(uint8_t* out, const float* x, const float* importance);
bool quantize_q3_k(uint8_t* out, const float* x, const float* importance);
bool quantize_q4_k(uint8_t* out, const float* x, const float* importance);
bool quantize_q5_k(uint8_t* out, const float* x, const float* importance);
bool quantize_q6_k(uint8_t* out, const float* x, const float* importance);
bool quantize_iq4_nl(uint8_t* out, const float* x, const float* importance);
bool quantize_iq4_xs(uint8_t* out, const float* x, const float* importance);

// A number rounded to f16, to nearest even: its bits and its value.
struct Half {
  uint16_t bits = 0;
  float value = 0.0f;
};

inline Half to_half(float x) {
  const float magnitude = std::abs(x);
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (!(magnitude < 65520.0f)) {
    return {static_cast<uint16_t>(sign | 0x7c00), std::copysign(HUGE_VALF, x)};
  }
  // Denormals use the exponent of the smallest normal number.
  const int exponent = magnitude > 0.0f ? std::max(std::ilogb(magnitude), -14) : -14;
  const float steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  // 1024 steps are the implicit bit: adding it and the carry of rounding increments the exponent.
  const uint32_t bits = (static_cast<uint32_t>(exponent + 14) << 10) + static_cast<uint32_t>(steps);
  return {static_cast<uint16_t>(sign | bits), std::copysign(std::ldexp(steps, exponent - 10), x)};
}

// Stores a field of a block; files are little-endian, and so is the machine.
inline void store(uint8_t* out, Half half) { std::memcpy(out, &half.bits, sizeof half.bits); }

}  // namespace h2o

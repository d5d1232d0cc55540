#include "core/unpack_tables.h"

#include <bit>

namespace h2o {
namespace {

template <size_t kSize>
constexpr Codebook<uint64_t, kSize> signs() {
  Codebook<uint64_t, kSize> masks{};
  for (size_t i = 0; i < kSize; ++i) {
    const size_t eighth = kSize == 128 ? std::popcount(i) % 2 : 0;
    for (int e = 0; e < 8; ++e) {
      if (((i | eighth << 7) >> e & 1) != 0) masks.entries[i] |= uint64_t{255} << 8 * e;
    }
  }
  return masks;
}

// Converts normal numbers that an f16 represents exactly.
constexpr F16 half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return {value == 0 ? uint16_t{0} : static_cast<uint16_t>((bits - (112u << 23)) >> 13)};
}

constexpr Codebook<F16, 256> nvfp4_scales() {
  Codebook<F16, 256> scales{};
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15;
    const auto fraction = static_cast<float>(bits & 7);
    const auto power = static_cast<float>(1 << exponent);
    scales.entries[bits] =
        half(exponent == 0 ? fraction * 0x1p-10f : (8 + fraction) * power * 0x1p-11f);
  }
  scales.entries[0x7f] = {0};
  return scales;
}

}  // namespace

const Codebook<uint64_t, 256> kSigns = signs<256>();
const Codebook<uint64_t, 128> kEvenSigns = signs<128>();
const Codebook<F16, 256> kNvfp4Scales = nvfp4_scales();

}  // namespace h2o

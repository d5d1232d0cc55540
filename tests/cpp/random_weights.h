// Random weights of every type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/tensor.h"
#include "cpu/isa/detect.h"
#include "device_rig.h"
#include "testing.h"

namespace h2o {

// Offsets of the f16 numbers of a block that determine its scales.
inline std::vector<int64_t> block_scales(DType dtype) {
  switch (dtype) {
    case DType::q4_1:
    case DType::q5_1:
    case DType::q4_k:
    case DType::q5_k:
      return {0, 2};
    case DType::q2_k:
      return {80, 82};
    case DType::q3_k:
      return {108};
    case DType::q6_k:
      return {208};
    case DType::tq1_0:
      return {52};
    case DType::tq2_0:
      return {64};
    case DType::iq1_m:
    case DType::mxfp4:
    case DType::nvfp4:
      return {};
    default:
      return {0};
  }
}

// The weight types that the test device supports: CUDA rejects codebook types.
inline std::vector<DType> device_dtypes() {
  constexpr DType kOnCpu[] = {DType::iq1_s, DType::iq1_m,   DType::iq2_xxs, DType::iq2_xs,
                              DType::iq2_s, DType::iq3_xxs, DType::iq3_s,   DType::tq1_0,
                              DType::tq2_0, DType::nvfp4,   DType::q1_0,    DType::q2_0};
  std::vector<DType> found;
  for (const DType dtype : computable_dtypes()) {
    if (!on_cuda() || std::ranges::find(kOnCpu, dtype) == std::end(kOnCpu)) found.push_back(dtype);
  }
  return found;
}

// An f16 as bits: 1, which makes elements of blocks integers; or from 2^-8 to 2^-6.
inline uint16_t unit_scales(Random&) { return 0x3c00; }
inline uint16_t real_scales(Random& random) {
  return static_cast<uint16_t>(random.integer(7, 8) << 10 | random.integer(0, 1023));
}

// n elements: blocks of random bits with these scales; floats of either sign (integers with unit
// scales) that have at most the precision of f16, unless dtype is f32.
inline std::vector<std::byte> random_weights(Random& random, DType dtype, int64_t n,
                                             uint16_t (*scale)(Random&)) {
  std::vector<std::byte> bytes(byte_size(dtype, n));
  if (!is_quantized(dtype)) {
    std::vector<float> values = random.reals(n);
    for (float& value : values) {
      if (scale == unit_scales) value = std::round(value * 50);
    }
    choose_kernels("scalar").of(dtype).encode(bytes.data(), values.data(), n);
    return bytes;
  }
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.bits());
  for (int64_t i = 0; i < std::ssize(bytes); i += info(dtype).block_bytes) {
    for (const int64_t at : block_scales(dtype)) {
      const uint16_t bits = scale(random);
      std::memcpy(&bytes[i + at], &bits, sizeof(bits));
    }
    if (dtype == DType::mxfp4) {  // 1, or from 2^-8 to 2^-6
      bytes[i] = static_cast<std::byte>(scale == unit_scales ? 128 : random.integer(120, 122));
    }
    for (int64_t at = 0; dtype == DType::nvfp4 && at < 4; ++at) {  // 1, or from 2^-7 to 2^-5
      bytes[i + at] =
          static_cast<std::byte>(scale == unit_scales ? 0x40 : random.integer(0x08, 0x17));
    }
    uint16_t d = 0;
    for (int64_t at = 0; dtype == DType::iq1_m && at < 4; ++at) {  // 4 bits in each word of scales
      if (at == 0) d = scale(random);
      std::byte& high = bytes[i + 48 + 2 * at + 1];
      high = (high & std::byte{15}) | static_cast<std::byte>((d >> 4 * at & 15) << 4);
    }
  }
  return bytes;
}

// A view of the bytes.
inline Tensor tensor_of(const std::vector<std::byte>& bytes, DType dtype, int64_t rows,
                        int64_t cols) {
  return {const_cast<std::byte*>(bytes.data()), dtype, rows, cols};
}

// Random weights [n_out, n_in] of a type, on a back end.
inline Affine uploaded_weights(Backend& backend, std::vector<Buffer>& owner, Random& random,
                               DType dtype, int64_t n_out, int64_t n_in) {
  const std::vector<std::byte> bytes = random_weights(random, dtype, n_out * n_in, real_scales);
  return {backend.upload(tensor_of(bytes, dtype, n_out, n_in), owner), {}};
}

}  // namespace h2o

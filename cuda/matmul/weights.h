// Weights on the device: quantized types in the layout of cuda/matmul/formats.cuh, others as in the
// file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kv/policy.h"  // H2O_HD

namespace h2o::cuda {

struct Weights {
  const std::byte* data;
  DType dtype;
  int64_t rows;
  int64_t cols;
  int64_t row_bytes;  // row stride

  H2O_HD const std::byte* row(int64_t i) const { return data + i * row_bytes; }
};

// A product on the device: y = x w^T + bias, or y += it.
struct DeviceProduct {
  float* y;           // [rows, w.rows]
  const float* bias;  // [w.rows] or nullptr
  Weights w;          // of the first expert, if the rows have experts

  // The product from row `first` of y on.
  DeviceProduct from(int64_t first) const { return {y + first * w.rows, bias, w}; }
};

// Rows grouped by expert: the grouping is only known on the device. Expert e has rows [offsets[e],
// offsets[e + 1]). The weights and biases of all experts are contiguous.
struct ExpertRows {
  const int32_t* offsets;  // [n_experts + 1] on the device
  int n_experts;
};

}  // namespace h2o::cuda

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

}  // namespace h2o::cuda

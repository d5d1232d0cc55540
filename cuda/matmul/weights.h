// Weights as they lie on the device: of quantised types in the order of cuda/formats.cuh, of others
// as in the file.
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
  int64_t row_bytes;  // from a row to the next

  H2O_HD const std::byte* row(int64_t i) const { return data + i * row_bytes; }
};

}  // namespace h2o::cuda

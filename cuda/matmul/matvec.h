// Products of a few rows with weights, straight from the weights' type: bound by the weights'
// bytes.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/matmul/weights.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

constexpr int64_t kMatvecRows = 8;  // of one call, at most

// y = x w^T + bias, or y += it.
struct Matvec {
  float* y;  // [n_rows, y_stride]
  int64_t y_stride;
  const float* bias;  // [w.rows] or nullptr
  int64_t n_rows;
  bool add;
};

// x [n_rows, w.cols]; w of a type that is not quantised.
void matvec(const Stream& stream, const Matvec& m, const Weights& w, const float* x);

// x [8, w.cols], of which n_rows count; w of a quantised type.
void matvec(const Stream& stream, const Matvec& m, const Weights& w, const QuantizedRows& x);

}  // namespace h2o::cuda

// Conversions: weights to floats, activations to operands for weights.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cuda/matmul/weights.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// Rows [begin, begin + n) of quantized weights as f16 [n, w.cols].
void dequantize(const Stream& stream, void* to, const Weights& w, int64_t begin, int64_t n);

// x[i] = table[tokens[i]]; tokens: [x.rows] on the device.
void embed(const Stream& stream, const Tensor& x, const Weights& table, const int32_t* tokens);

// x as f16, clamped to its range, or bf16.
void convert(const Stream& stream, void* to, DType dtype, const Tensor& x);

// y [n_rows, n of stride] = bias [n] in every row, or y += bias.
void start_with_bias(const Stream& stream, float* y, int64_t stride, int64_t n_rows,
                     const float* bias, int64_t n, bool add);

}  // namespace h2o::cuda

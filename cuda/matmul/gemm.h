// Products of many rows with weights on tensor cores, without cuBLAS.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "cuda/matmul/weights.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// The operand type for these weights: bf16 for bf16; f16 for f16 and quantized types.
DType gemm_factors(DType weights);

// Does gemm() support these weights? Not f32, nor rows that are not 16-byte aligned.
bool gemm_takes(const Weights& w);

// x [n_rows, w.cols] in gemm_factors(w.dtype). Quantized weights are rounded to f16; sums are f32.
void gemm(const Stream& stream, const DeviceProduct& product, const void* x, int64_t n_rows,
          bool add);

// Computes rows [begin, begin + n_rows) of y, grouped by expert.
void gemm_experts(const Stream& stream, const DeviceProduct& product, const void* x, int64_t begin,
                  int64_t n_rows, const ExpertRows& experts);

}  // namespace h2o::cuda

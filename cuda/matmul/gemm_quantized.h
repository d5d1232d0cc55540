// gemm() and gemm_experts() for quantized weights, in a separate file for parallel compilation.
#pragma once

#include "cuda/matmul/expert_rows.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct Gemm;

void gemm_quantized(const Stream& stream, const Gemm& g);
void gemm_quantized_experts(const Stream& stream, const Gemm& g, const ExpertRows& experts,
                            int begin);

}  // namespace h2o::cuda

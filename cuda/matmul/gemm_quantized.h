// gemm() of quantised weights, in a file that compiles beside that of the others.
#pragma once

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct Gemm;

void gemm_quantized(const Stream& stream, const Gemm& g);

}  // namespace h2o::cuda

// Converts keys and values to f16 for the tensor-core kernels.
#pragma once

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct PrefillStep;

// Fills step.k_halves and step.v_halves.
void dequantize_rows(const Stream& stream, const PrefillStep& step);

}  // namespace h2o::cuda

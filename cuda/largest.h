// The largest logits of rows, so that a step copies only these.
#pragma once

#include "backend/largest_logits.h"
#include "core/tensor.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

// to[i] = the largest logits of row i; temperatures [x.rows], see Batch.
void select_largest(const Stream& stream, LargestLogits* to, const Tensor& x,
                    const float* temperatures);

}  // namespace h2o::cuda

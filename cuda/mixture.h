// Mixtures of experts, except their products; see backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

void route(const Stream& stream, const Routes& routes, const Tensor& logits, const Tensor& bias);

// Here and below, the result is also written to `rounded`, unless that is empty.
void dispatch(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes,
              const QuantizedRows& rounded);
void gate_rows(const Stream& stream, const Tensor& x, const Tensor& gate,
               const QuantizedRows& rounded);

void combine_add(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes);

}  // namespace h2o::cuda

// Row-wise and element-wise operations; see backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

void add_positions(const Stream& stream, Tensor x, const Tensor& table, const int32_t* positions);

void scale_by_position(const Stream& stream, Tensor x, float scale, int32_t length,
                       const int32_t* positions);

// Here and below, the result is also written to `rounded`, unless that is empty.
void layer_norm(const Stream& stream, Tensor y, const Tensor& x, const Affine& norm, float eps,
                const QuantizedRows& rounded);
void rms_norm(const Stream& stream, Tensor y, const Tensor& x, const Tensor& weight, float eps,
              const QuantizedRows& rounded);
void relu(const Stream& stream, Tensor x, const QuantizedRows& rounded);
void relu_squared(const Stream& stream, Tensor x, const QuantizedRows& rounded);
void gelu_tanh(const Stream& stream, Tensor x, const QuantizedRows& rounded);
void gelu_erf(const Stream& stream, Tensor x, const QuantizedRows& rounded);
void apply_gate(const Stream& stream, Gate kind, Tensor up, const Tensor& gate,
                const QuantizedRows& rounded);

void add(const Stream& stream, Tensor y, const Tensor& x);
void scale(const Stream& stream, Tensor x, float factor);
void softcap(const Stream& stream, Tensor x, float cap);
void argmax(const Stream& stream, int32_t* tokens, const Tensor& x);
void gather(const Stream& stream, Tensor y, const Tensor& x, const int32_t* rows);

}  // namespace h2o::cuda

// Operations other than products and attention; see backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "backend/largest_logits.h"
#include "core/tensor.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

void add_positions(const Stream& stream, Tensor x, const Tensor& table, const int32_t* positions);

void scale_by_position(const Stream& stream, Tensor x, float scale, int32_t length, int32_t offset,
                       const int32_t* positions);

void rotate(const Stream& stream, const Tensor& q, const Tensor& k, int64_t head_dim,
            const Rope& rope, const int32_t* positions);
void clamp(const Stream& stream, Tensor x, float limit);

// The results of these are also written to `operands`.
void layer_norm(const Stream& stream, Tensor y, const Tensor& x, const Affine& norm, float eps,
                const Operands& operands);
void rms_norm(const Stream& stream, Tensor y, const Tensor& x, const Tensor& weight, float eps,
              const Operands& operands);
void relu(const Stream& stream, Tensor x, const Operands& operands);
void relu_squared(const Stream& stream, Tensor x, const Operands& operands);
void gelu_tanh(const Stream& stream, Tensor x, const Operands& operands);
void gelu_erf(const Stream& stream, Tensor x, const Operands& operands);
void xielu(const Stream& stream, Tensor x, const Xielu& f, const Operands& operands);
void apply_gate(const Stream& stream, Gate kind, Tensor up, const Tensor& gate,
                const Operands& operands);

void add(const Stream& stream, Tensor y, const Tensor& x);
void scale(const Stream& stream, Tensor x, float factor);
void softcap(const Stream& stream, Tensor x, float cap);
void argmax(const Stream& stream, int32_t* tokens, const Tensor& x);
void gather(const Stream& stream, Tensor y, const Tensor& x, const int32_t* rows);

void route(const Stream& stream, const Routes& routes, const Tensor& logits, const Tensor& bias);

// The results of these are also written to `operands`.
void dispatch(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes,
              const Operands& operands);
void gate_rows(const Stream& stream, const Tensor& x, const Tensor& gate, const Operands& operands);

void combine_add(const Stream& stream, const Tensor& y, const Tensor& x, const Routes& routes);

void delta_net(const Stream& stream, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch);

void split_blocks(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& x,
                  int64_t width);

void copy_heads(const Stream& stream, const Heads& to, const Heads& from, int64_t n_rows,
                int64_t n_heads, int64_t width);

void short_conv(const Stream& stream, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch);

// to[i] = the largest logits of row i; temperatures [x.rows], see Batch.
void select_largest(const Stream& stream, LargestLogits* to, const Tensor& x,
                    const float* temperatures);

}  // namespace h2o::cuda

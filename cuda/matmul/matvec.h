// Products of a few rows with weights in their stored type: bound by reading the weights.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "backend/backend.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/matmul/weights.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

constexpr int64_t kMatvecRows = 8;  // per call

// With up to so many rows, sums over weights that are not quantized have the order of a single row.
constexpr int64_t kSameOrderRows = 4;

constexpr int kMaxProducts = 3;  // per call: q, k and v

// The rows of y that a call computes, and how.
struct MatvecRows {
  int64_t begin;
  int64_t n;
  bool add;
  bool alone = false;  // as if each were: of weights that are not quantized, kSameOrderRows rows
  std::optional<Gate> gate;  // two products, up and gate, of the same shape: up.y receives the
                             // gated result, gate.y nothing. Not for quantized types.
  std::optional<ExpertRows> experts;  // the rows are grouped by expert, and there may be many
};

// Products of the same x in one launch: their weights have the same type, not quantized, and the
// same number of columns. x [rows.n, w.cols]
void matvec(const Stream& stream, std::span<const DeviceProduct> products, const MatvecRows& rows,
            const float* x);

// The same for quantized weights. x: at least rows.n rows.
void matvec(const Stream& stream, std::span<const DeviceProduct> products, const MatvecRows& rows,
            const QuantizedRows& x);

}  // namespace h2o::cuda

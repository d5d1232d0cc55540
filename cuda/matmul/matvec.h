// Products of a few rows with weights, straight from the weights' type: bound by the weights'
// bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "backend/backend.h"
#include "cuda/matmul/expert_rows.h"
#include "cuda/matmul/quantize_activations.h"
#include "cuda/matmul/weights.h"
#include "cuda/runtime/device.h"

namespace h2o::cuda {

constexpr int64_t kMatvecRows = 8;  // of one call, at most

constexpr int kMostProducts = 3;  // of one call: q, k and v

// y = x w^T + bias, or y += it.
struct Matvec {
  float* y;           // [rows, w.rows]
  const float* bias;  // [w.rows] or nullptr
  Weights w;          // of the first expert, if there are any
};

// The rows of y that a call computes, and what becomes of them.
struct MatvecRows {
  int64_t begin;
  int64_t n;
  bool add;
  std::optional<Gate> gate;  // of two products, up and gate, of one shape: up.y gets both as one,
                             // gate.y nothing. Not of a quantised type.
  std::optional<ExpertRows> experts;  // that these rows are of; then there may be many of them
};

// Products of the same x, in one launch: their weights have the same type, not a quantised one, and
// as many columns. x [rows.n, w.cols]
void matvec(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
            const float* x);

// The same for weights of a quantised type. x: at least rows.n rows.
void matvec(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
            const QuantizedRows& x);

}  // namespace h2o::cuda

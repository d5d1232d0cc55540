// Tensor: a non-owning view of a row-major matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace h2o {

// Shape [rows, cols], the last dimension contiguous (GGUF's ne[0] = cols). A vector has one row. A
// default-constructed Tensor is empty: the model has no such tensor.
struct Tensor {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  bool interleaved = false;  // in a back end's own layout: single rows cannot be viewed

  explicit operator bool() const { return data != nullptr; }
  int64_t row_bytes() const {
    return interleaved ? cols / info(dtype).block_size * interleaved_block_bytes(dtype)
                       : byte_size(dtype, cols);
  }
  int64_t bytes() const { return rows * row_bytes(); }
  std::span<const std::byte> memory() const { return {data, static_cast<size_t>(bytes())}; }
  std::byte* row(int64_t i) const { return data + i * row_bytes(); }
  float* floats() const { return reinterpret_cast<float*>(data); }  // dtype must be f32

  // The first n rows, as a view.
  Tensor first(int64_t n) const { return {data, dtype, n, cols}; }
};

// A linear map (weight [out, in], bias [out]) or the scale and shift of a norm ([n] each).
struct Affine {
  Tensor weight;
  Tensor bias;  // may be empty
  Tensor factor =
      {};  // f32 [n_matrices], of the weight: the scale of a whole matrix in NVFP4; or empty
};

}  // namespace h2o
